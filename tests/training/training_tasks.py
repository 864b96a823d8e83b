"""A tiny run that really trains: a base of random weights, and tasks whose reward depends on what was said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from training_fakes import small_config

from compactionrl.config import Config, parse_config
from compactionrl.environments.protocol import Message, Observation, Response, Verdict
from compactionrl.models import Transformer, save_policy
from compactionrl.training.tokenizer import build_tokenizer

WORDS = "go on say more you summarise again later red green blue"


class Chatter:
    """A few turns of chat; the reward is 1 if an even number of characters was said."""

    def __init__(self, index: int, broken: bool, most: int) -> None:
        self.index = index
        self.most = most
        self.broken = broken
        self.said = ""
        self.turns = 0

    async def start(self) -> list[Message]:
        if self.broken:
            raise OSError("the sandbox is gone")
        return [{"role": "system", "content": "say more"}, {"role": "user", "content": WORDS.split()[self.index % 8]}]

    async def step(self, response: Response) -> Observation:
        self.said += response.text + response.thinking
        self.turns += 1
        return Observation("go on say more red green blue", done=self.turns == self.most)

    async def verify(self) -> Verdict:
        return Verdict(float(len(self.said) % 2 == 0), {"said": len(self.said)})

    async def close(self) -> None:
        """Nothing is held."""


class ChatterTasks:
    """A TaskSet of `size` tasks a split, of so many turns; those in `broken` always break down."""

    def __init__(self, size: int = 1000, broken: tuple[int, ...] = (), heldout: int = 8, turns: int = 4) -> None:
        if size < 1:
            raise ValueError("size must be positive")
        self.sizes = {"train": size, "heldout": heldout}
        self.broken = broken
        self.turns = turns

    def size(self, split: str) -> int:
        return self.sizes[split]

    def task_id(self, split: str, index: int) -> str:
        return f"{split}-{index}"

    def environment(self, split: str, index: int) -> Chatter:
        return Chatter(index, split == "train" and index in self.broken, self.turns)


def make_base(folder: Path) -> Path:
    """A model folder: 2 layers of width 32, random weights, and a tokenizer."""
    tokenizer = build_tokenizer([WORDS])
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = small_config(len(tokenizer), max_position_embeddings=512, initializer_range=0.1)
    save_policy(Transformer(config), folder)
    return folder


def tiny_config(tmp: Path, **overrides: Any) -> Config:
    """A run of a few seconds: two batches of value pretraining, six steps."""
    data: dict[str, Any] = {
        "model": {"path": str(tmp / "base")},
        "context": {
            "budget": 96,
            "threshold": 40,
            "response_tokens": 12,
            "min_response": 8,
            "summary_tokens": 12,
            "tail_steps": 1,
            "summary_attempts": 2,
            "summary_request": "summarise",
            "retry_request": "again",
            "resume_template": "you {summary}",
            "placeholder": "later",
        },
        "sampling": {"concurrency": 8},
        "environment": {"tasks": "training_tasks:ChatterTasks"},
        "train": {
            "steps": 6,
            "rollouts_per_step": 6,
            "value_pretraining_steps": 2,
            "checkpoint_every": 2,
            "policy_lr": 1e-2,
            "critic_lr": 1e-2,
        },
        "evaluation": {"every": 3, "tasks": 4, "modes": ["x1", "x4"]},
        "run": {"folder": str(tmp / "run"), "seed": 5},
    }
    for key, value in overrides.items():
        section, name = key.split("__")
        data[section][name] = value
    return parse_config(data)
