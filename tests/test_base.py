"""The base from nothing: reproducible, ready to use, learned from the demonstrations."""

import asyncio
from pathlib import Path

import pytest
import torch
from conftest import DEMO, TINY

from compactionrl import build
from compactionrl.base import make_base, prepare
from compactionrl.config import ConfigError, load_config
from compactionrl.evaluation.evaluate import evaluate
from compactionrl.measure import open_policy
from compactionrl.models import load_policy


def test_same_configuration_same_base(base: Path, tmp_path: Path) -> None:
    make_base(load_config(DEMO, TINY), tmp_path / "again")
    make_base(load_config(DEMO, TINY | {"warm_start.seed": 1}), tmp_path / "other")
    for name in ("model.safetensors", "tokenizer.json"):
        assert (base / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
    assert (base / "model.safetensors").read_bytes() != (tmp_path / "other" / "model.safetensors").read_bytes()


def test_everything_a_task_says_is_one_token_a_word(base: Path) -> None:
    chat = build.build_chat(load_config(DEMO), base)
    assert len(chat.encode("found cup3 map0 key7")) == 4
    assert len(chat.encode("summarise")) == len(chat.encode("again")) == len(chat.encode("later")) == 1


def test_demonstrations_are_learned(tmp_path: Path) -> None:
    """Tasks of one note and one fact, seen over and over, are solved at once."""
    options = {"seed": 1, "notes": [1, 1], "facts": 1, "values": 2, "noise": 1, "n_train": 1, "n_heldout": 1}
    learned = {
        "warm_start.demonstrations": 64,
        "warm_start.epochs": 60,
        "warm_start.batch_tokens": 1024,
        "warm_start.long_share": 0,
    }
    config = load_config(DEMO, TINY | learned | {"environment.options": options})
    assert make_base(config, tmp_path / "base") < 0.05
    chat, sampler = open_policy(config, tmp_path / "base")
    work = evaluate(build.build_tasks(config), sampler, chat, config, modes=["x1"], n_tasks=1, split="train", seed=0)
    assert asyncio.run(work)["x1"]["pass_at_1"] == 1.0


def test_prepare_makes_the_runs_own_base_once(tmp_path: Path) -> None:
    config = load_config(DEMO, TINY | {"model.path": "warm-start", "run.folder": str(tmp_path)})
    prepare(config)
    folder = build.model_folder(config)
    assert folder == tmp_path / "base"
    weights = (folder / "model.safetensors").stat().st_mtime_ns
    prepare(config)
    assert (folder / "model.safetensors").stat().st_mtime_ns == weights
    assert torch.isfinite(load_policy(folder).head_weight).all()


class Wordless:
    """A task family that does not say which words it needs."""

    def size(self, split: str) -> int:
        return 1


def test_a_family_without_texts_is_refused(tmp_path: Path) -> None:
    config = load_config(DEMO, {"environment.tasks": f"{__name__}:Wordless", "environment.options": {}})
    with pytest.raises(ConfigError, match=r"environment\.tasks.*texts"):
        make_base(config, tmp_path / "base")
    assert not (tmp_path / "base").exists()
