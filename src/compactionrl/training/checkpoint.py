"""A checkpoint: policy and critic, always as a pair, their optimisers, and where the run stands.

step-000010/
  policy/                       a Hugging Face folder with its tokenizer, ready to use; adapters: a folder of peft
  critic/                       the same as a token classifier with one label (not with estimator 'group')
  value_head.safetensors        instead of critic/, where only the value head is trained
  policy_adam.safetensors       optimiser state, float32 masters included; never a pickle
  critic_adam.safetensors
  state.json                    counters, task cursor, position in the metrics
  manifest.json                 size and hash of every file: written last, so that half a checkpoint is none
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from compactionrl.config import Config
from compactionrl.models.tensors import save_tensors
from compactionrl.training.atomic import PARTIAL, is_complete, write_folder
from compactionrl.training.learner import Learner
from compactionrl.training.optimiser import Optimiser
from compactionrl.training.pair import build_pair, save_pair

TOKENIZER_FILES = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "chat_template*", "vocab*", "merges.txt", "*.model",
    "generation_config.json",
)  # fmt: skip
NAME = re.compile(r"(value|step)-\d+")


@dataclass
class State:
    """Where a run stands. Everything else that a run needs follows from it and the configuration."""

    value_batches: int = 0
    """Batches of value pretraining done."""
    step: int = 0
    """Policy updates done; the version of the policy."""
    units: int = 0
    """Task groups consumed: the cursor in the task order."""
    dropped: int = 0
    """Rollouts dropped because they broke down."""
    evaluated: int = -1
    """Step of the latest held-out evaluation."""
    best: dict[str, Any] = field(default_factory=dict)
    """`checkpoint` name, `step` and `pass_at_1` of the best evaluation so far; empty before the first."""
    metrics_bytes: int = 0
    """Length of the metrics file."""

    @property
    def name(self) -> str:
        """Of the checkpoint; names sort by age within a phase, and pretraining comes first (see `age`)."""
        return f"step-{self.step:06}" if self.step else f"value-{self.value_batches:06}"


class Checkpoints:
    """The `checkpoints/` folder of a run: the `keep` latest ones, and `best`, a link to the best one."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder
        self.keep = keep

    def save(self, state: State, learner: Learner, base: Path) -> Path:
        """Write the checkpoint of `state`, then drop those that are neither recent nor the best.

        `base` is the folder that the run began with: the tokenizer is copied from there.

        One that exists is kept as it is, though an evaluation may have changed `state.best` since: resume repeats it.
        """
        folder = self.folder / state.name
        if not folder.exists():
            write_folder(folder, lambda partial: fill(partial, state, learner, base))
        self.link_best(state)
        kept = {*self.names()[-self.keep :], state.best.get("checkpoint")}
        for name in self.names():
            if name not in kept:
                shutil.rmtree(self.folder / name)
        return folder

    def latest(self, warn: Callable[[str], None]) -> Path | None:
        """The newest complete checkpoint; incomplete ones are removed, with a warning."""
        for partial in self.folder.glob(PARTIAL + "*"):
            shutil.rmtree(partial)
        for name in reversed(self.names()):
            if is_complete(self.folder / name):
                return self.folder / name
            warn(f"checkpoint {name} is incomplete or damaged: removed")
            shutil.rmtree(self.folder / name)
        return None

    def names(self) -> list[str]:
        """Oldest first."""
        return sorted((path.name for path in self.folder.glob("*-*") if NAME.fullmatch(path.name)), key=age)

    def link_best(self, state: State) -> None:
        if state.best:
            link = self.folder / ".best"
            link.unlink(missing_ok=True)
            link.symlink_to(state.best["checkpoint"])
            link.replace(self.folder / "best")


def age(name: str) -> tuple[bool, int]:
    phase, number = name.split("-")
    return phase == "step", int(number)


def fill(folder: Path, state: State, learner: Learner, base: Path) -> None:
    save_pair(learner.policy, learner.critic, folder, base)
    copy_tokenizer(base, folder / "policy")
    optimisers = [o for o in (learner.policy_optimiser, learner.critic_optimiser) if o is not None]
    for optimiser in optimisers:
        save_tensors(optimiser.tensors(), folder / f"{optimiser.name}_adam.safetensors")
    bad = {optimiser.name: optimiser.bad for optimiser in optimisers}
    (folder / "state.json").write_text(json.dumps(asdict(state) | {"bad_updates": bad}, indent=1) + "\n")


def copy_tokenizer(source: Path, folder: Path) -> None:
    for path in sorted({path for pattern in TOKENIZER_FILES for path in source.glob(pattern)}):
        shutil.copyfile(path, folder / path.name)


def load(folder: Path, config: Config, base: Path, device: torch.device | str = "cpu") -> tuple[State, Learner]:
    """What `Checkpoints.save` wrote. The next update is bit for bit the one that would have followed."""
    policy, critic = build_pair(config, base, device, folder)
    learner = Learner(policy, critic, config.train, temperature=config.sampling.temperature)
    entries = json.loads((folder / "state.json").read_text())
    bad = entries.pop("bad_updates")

    def restore(optimiser: Optimiser | None) -> None:
        if optimiser is not None:
            optimiser.load_tensors(load_file(folder / f"{optimiser.name}_adam.safetensors"))
            optimiser.bad = bad[optimiser.name]

    restore(learner.policy_optimiser)
    restore(learner.critic_optimiser)
    return State(**entries), learner
