"""What the benchmark of a real model checks can fail, and its page says what was found. The model itself takes too long here."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from compactionrl.method import token_logprobs
from compactionrl.models import ModelConfig, Transformer
from compactionrl.rollout.ledger import Rollout, Segment, Window

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def smollm2():
    sys.path.insert(0, str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location("benchmark_smollm2", BENCHMARKS / "smollm2.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.path.remove(str(BENCHMARKS))
    return module


def test_a_log_probability_that_is_off_is_found(smollm2) -> None:
    torch.manual_seed(0)
    policy = Transformer(ModelConfig("Qwen3ForCausalLM", 61, 32, 48, 2, 4, 2, 8))
    ids = torch.randint(61, (12,))
    with torch.no_grad():
        logprobs, _ = token_logprobs(policy(ids, [12])[3:11], policy.head_weight, ids[4:])
    window = Window()
    window.append_context(ids[:4].tolist(), "user")
    window.append_sampled(ids[4:].tolist(), logprobs.tolist(), [2] * 8, Segment("execution", 0))
    rollout = Rollout("r", "t", [window], end="submitted")
    assert smollm2.difference(policy, rollout, 2) < 1e-5
    window.logprobs[9] += 0.25
    assert smollm2.difference(policy, rollout, 2) == pytest.approx(0.25, abs=1e-5)
    with pytest.raises(RuntimeError, match="not sampled from version 1"):
        smollm2.difference(policy, rollout, 1)


def test_the_page(smollm2) -> None:
    ran = {"command": "compactionrl eval x", "minutes": 1.24, "cpu_minutes": 1.1, "gib": 3.21}
    mode = {"reward": 0.25, "pass_at_1": 0.0, "compactions": 1.5, "sampled_tokens": 120.0}
    step = dict.fromkeys(smollm2.LOGGED, 0.5)
    training = {"steps": [step] * 3, "stated": "3.1 GiB", "weights_moved": 2e-6, "logprob_difference": 3e-5}
    found = {name: ran | ({"modes": {"x1": mode}} if "eval" in name else training) for name in smollm2.RUNS}
    text = smollm2.page(found)
    assert "| x1 | 0.25 | 0.00 | 1.50 | 120.00 |" in text
    assert "| train: all weights, 3 steps | 1.2 | 1.1 | 3.2 | 3.1 GiB |" in text
    assert "**3.0e-05**" in text
    assert text.count("compactionrl eval x") == len(smollm2.RUNS)
