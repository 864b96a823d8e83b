"""`harbor run` as a user types it: our agent and our sandbox against `compactionrl serve`."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from _needs_harbor import AGENT, BWRAP  # skips the module where Harbor or a sandbox cannot be had

from compactionrl.evaluation.rollout_file import read_rollouts
from compactionrl.terminal_tasks.catalogue import make_task, write_tasks

SERVER_PYTHON = os.environ.get("COMPACTIONRL_SERVER_PYTHON")
"""An interpreter with `compactionrl[serve]`, which has torch; this one has not."""
MODEL = """
import sys
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM
from compactionrl.build import DEMO
tokenizer = AutoTokenizer.from_pretrained(DEMO)
config = Qwen3Config(
    vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=1, head_dim=8, max_position_embeddings=16384, tie_word_embeddings=True,
)
Qwen3ForCausalLM(config).save_pretrained(sys.argv[1])
tokenizer.save_pretrained(sys.argv[1])
"""
"""A model of random weights with room for a terminal's prompts."""
SERVE = "import sys; from compactionrl.cli import main; main(sys.argv[1:])"

if not SERVER_PYTHON:
    pytest.skip("COMPACTIONRL_SERVER_PYTHON names no interpreter with compactionrl[serve]", allow_module_level=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    subprocess.run([SERVER_PYTHON, "-c", MODEL, folder], check=True)
    return folder


@pytest.fixture(scope="module")
def url(model: Path) -> Iterator[str]:
    command = [SERVER_PYTHON, "-c", SERVE, "serve", "--checkpoint", str(model), "--name", "m", "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield next(line.split()[-1] for line in server.stdout or () if "http://" in line)
    finally:
        server.terminate()
        server.communicate(timeout=60)


@pytest.mark.parametrize(("mode", "windows"), [("x1", 1), ("x4", 4)])
def test_a_job_finishes(url: str, model: Path, mode: str, windows: int, tmp_path: Path) -> None:
    write_tasks(tmp_path / "tasks", [make_task("data-repair", "easy", "heldout", 0)])
    sizes = {"response_tokens": 300, "summary_tokens": 100, "min_response": 50, "threshold": 1200}
    keys: dict[str, Any] = {f"context.{name}": tokens for name, tokens in sizes.items()} | {"limits.turns": 12}
    command = [Path(sys.executable).with_name("harbor"), "run", "-y", "-p", "tasks", "-o", "jobs", "--job-name", mode]
    command += ["-a", AGENT, "-m", "hosted_vllm/m"]
    command += ["-e", BWRAP]
    options = {"api_base": url, "context_limit": 4096, "mode": mode, "tokenizer": str(model), "keys": json.dumps(keys)}
    options["terminal"] = json.dumps({"tools": "fenced"})
    command += [part for name, value in options.items() for part in ("--ak", f"{name}={value}")]
    environment = {**os.environ, "HARBOR_TELEMETRY": "off", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    (result,) = [json.loads(path.read_text()) for path in (tmp_path / "jobs" / mode).glob("*/result.json")]
    assert result["exception_info"] is None
    assert result["verifier_result"]["rewards"]["reward"] == 0.0
    told = result["agent_result"]
    assert told["metadata"]["exact_tokens"]
    assert 1 <= told["metadata"]["windows"] <= windows
    assert (told["metadata"]["compactions"] > 0) == (windows > 1)
    (file,) = (tmp_path / "jobs" / mode).glob("*/agent/rollouts.jsonl.gz")
    (rollout,) = read_rollouts(file)
    counts = rollout.token_counts()
    assert counts["trained"] == sum(
        len(ids) for each in told["rollout_details"] for ids in each["completion_token_ids"]
    )
