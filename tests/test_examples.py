"""The example runs as it is, and really trains."""

import importlib.util
from itertools import cycle
from pathlib import Path
from types import ModuleType

import pytest
import torch

from compactionrl.config import load_config
from compactionrl.environments.notes import NotesEnvironment
from compactionrl.environments.protocol import Verdict
from compactionrl.models import load_policy

EXAMPLE = Path(__file__).parents[1] / "examples" / "basic.py"


@pytest.fixture
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("basic", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_basic(
    example: ModuleType, base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An untrained base never solves a task, so half of the rollouts are rewarded as if they had."""
    rewards = cycle([0.0, 1.0])

    async def verify(self: NotesEnvironment) -> Verdict:
        return Verdict(next(rewards))

    monkeypatch.setattr(NotesEnvironment, "verify", verify)
    overrides = {
        "model.path": str(base),
        "train.rollouts_per_step": 4,
        "train.value_pretraining_steps": 1,
        "limits.turns": 6,
    }
    config = load_config(example.RECIPE, overrides)
    before = load_policy(base).state_dict()

    pretrained = example.train(config, updates=0)
    assert all(torch.equal(before[name], tensor) for name, tensor in pretrained.policy.state_dict().items())
    assert pretrained.critic.score.weight.any()

    trained = example.train(config, updates=1).policy.state_dict()
    assert all(torch.isfinite(tensor).all() for tensor in trained.values())
    assert not any(torch.equal(before[name], tensor) for name, tensor in trained.items())
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(",")[0] for line in lines] == [
        f"{label}: reward 0.500" for label in ("critic only", "critic only", "update 1")
    ]
