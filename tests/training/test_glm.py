"""A run on each GLM architecture and on Qwen3 by `transformers`: rollouts with compactions, critic, evaluation, resume."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from tiny_glm import ARCHITECTURES, make_model
from training_tasks import WORDS, tiny_config

from compactionrl.config import Config
from compactionrl.method import token_logprobs
from compactionrl.models import Policy, load_critic, load_policy
from compactionrl.rollout.ledger import Rollout
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
    """One batch of value pretraining, two steps, an evaluation before and after."""
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
        evaluation__modes=["x4"],
        run__threads=1,
    )


def train(config: Config, resume: bool = False) -> None:
    trainer = Trainer(config, resume=resume, console=Console(file=StringIO()))
    assert trainer.learner.policy.implementation == trainer.sampling.policy.implementation == "transformers"
    assert trainer.run()


def weights(folder: Path) -> dict[str, str]:
    files = sorted(folder.rglob("*.safetensors"))
    return {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def off_policy(policy: Policy, rollouts: list[Rollout]) -> float:
    """The largest difference between a recorded log-probability and that of the trainer's forward, windows packed."""
    windows = [window for rollout in rollouts for window in rollout.windows]
    ids = torch.tensor([token for window in windows for token in window.token_ids])
    with torch.no_grad():
        hidden = policy(ids, [len(window) for window in windows])
        found, _ = token_logprobs(hidden[:-1], policy.head_weight, ids[1:])
    sampled = np.concatenate([np.asarray(window.segment_ids) >= 0 for window in windows])[1:]
    recorded = np.concatenate([np.asarray(window.logprobs, dtype=np.float64) for window in windows])[1:]
    assert sampled.sum() > 100
    return float(np.abs(found.numpy() - recorded)[sampled].max())


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_run_and_its_continuation(architecture: str, tmp_path: Path) -> None:
    tokenizer = build_tokenizer([WORDS])
    tokenizer.save_pretrained(tmp_path / "base")
    make_model(architecture, len(tokenizer), tmp_path / "base")
    config = glm_config(tmp_path)
    train(config)

    run, final = tmp_path / "run", tmp_path / "run" / "checkpoints" / "step-000002"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    numbers = [value for line in lines for value in line.values() if isinstance(value, float)]
    assert np.isfinite(numbers).all()
    assert sum("eval/x4/pass_at_1" in line for line in lines) == 2
    assert not any(value for line in lines for key, value in line.items() if key.endswith("/skipped"))

    base, trained = (load_policy(path, implementation="transformers") for path in (tmp_path / "base", final / "policy"))
    rollouts = read_rollouts(run / "rollouts" / "step-000001.parquet")  # sampled before the first policy update
    assert any(len(rollout.windows) > 1 for rollout in rollouts)
    assert off_policy(base, rollouts) < 1e-4
    assert off_policy(trained, rollouts) > 1e-3
    before = dict(base.named_parameters())
    changed = {name for name, p in trained.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {name for name in before if "indexer" not in name}
    assert load_critic(final / "critic").score.weight.any()

    whole = weights(final)
    assert {"policy", "critic", "policy_adam.safetensors"} < {Path(name).parts[0] for name in whole}
    shutil.rmtree(final)
    train(config, resume=True)
    assert weights(final) == whole
