"""A run on each GLM architecture and on Qwen3 by `transformers`: rollouts with compactions, critic, evaluation, resume."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from io import StringIO
from itertools import chain
from pathlib import Path

import pytest
import torch
from rich.console import Console
from tiny_glm import ARCHITECTURES, make_model
from training_tasks import WORDS, tiny_config

from compactionrl.config import Config
from compactionrl.models import load_policy
from compactionrl.training.records import read_rollouts
from compactionrl.training.tokenizer import build_tokenizer
from compactionrl.training.trainer import Trainer


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def glm_config(tmp: Path) -> Config:
    """One batch of value pretraining, two steps."""
    return tiny_config(
        tmp,
        model__implementation="transformers",
        train__steps=2,
        train__rollouts_per_step=3,
        train__value_pretraining_steps=1,
        train__checkpoint_every=1,
        train__policy_lr=1e-3,
        evaluation__every=2,
        evaluation__tasks=2,
        run__threads=1,
    )


def weights(folder: Path) -> dict[str, str]:
    final = folder / "checkpoints" / "step-000002"
    files = sorted(final.rglob("*.safetensors"))
    return {str(file.relative_to(final)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_run_and_its_continuation(architecture: str, tmp_path: Path) -> None:
    tokenizer = build_tokenizer([WORDS])
    tokenizer.save_pretrained(tmp_path / "base")
    make_model(architecture, len(tokenizer), tmp_path / "base")
    config = glm_config(tmp_path)
    assert Trainer(config, console=Console(file=StringIO())).run()

    run = tmp_path / "run"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    numbers = [value for line in lines for value in line.values() if isinstance(value, float)]
    assert torch.tensor(numbers).isfinite().all()
    rollouts = list(chain.from_iterable(read_rollouts(file) for file in sorted((run / "rollouts").glob("*"))))
    assert any(len(rollout.windows) > 1 for rollout in rollouts)
    before = load_policy(tmp_path / "base", implementation="transformers").state_dict()
    after = load_policy(run / "checkpoints" / "step-000002" / "policy", implementation="transformers").state_dict()
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[name], after[name]) for name in before)

    whole, final = weights(run), run / "checkpoints" / "step-000002"
    assert {"policy", "critic", "critic_adam.safetensors"} < {Path(name).parts[0] for name in whole}
    shutil.rmtree(final)
    assert Trainer(config, resume=True, console=Console(file=StringIO())).run()
    assert weights(run) == whole
