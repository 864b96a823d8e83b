"""The folder of a run.

runs/demo/
  config.toml      every key as this run uses it
  base/            with `model.path = "warm-start"`: where the policy begins
  machine.json     what was chosen on this machine: threads, device, versions
  metrics.jsonl    one line per batch and per evaluation
  tensorboard/     the same, for TensorBoard
  rollouts/        one parquet file per batch
  checkpoints/     the latest ones, and `best`, a link
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from compactionrl.config import Config, ConfigError, load_config
from compactionrl.config_toml import dump
from compactionrl.training.atomic import write_file


class RunFolder:
    """`config.run.folder`. Raises ConfigError for a new run in a used folder, or a resumed run with other settings."""

    def __init__(self, config: Config, *, resume: bool) -> None:
        self.settings = config
        self.path = Path(config.run.folder)
        self.config = self.path / "config.toml"
        self.machine = self.path / "machine.json"
        self.rollouts = self.path / "rollouts"
        self.checkpoints = self.path / "checkpoints"
        if resume:
            check_same(self.stored(), config)
        elif self.checkpoints.exists() or (self.config.exists() and (self.path / "base").exists()):
            raise ConfigError(
                f"run.folder: {self.path} already holds a run; go on with --resume, or choose another folder"
            )

    def begin(self) -> None:
        """Write the configuration: from here on the run can be resumed."""
        self.path.mkdir(parents=True, exist_ok=True)
        write_file(self.config, lambda path: path.write_text(dump(self.settings)))

    def create(self) -> None:
        """Write the configuration and what else is missing."""
        self.begin()
        for folder in (self.rollouts, self.checkpoints):
            folder.mkdir(exist_ok=True)

    def stored(self) -> Config:
        if not self.config.exists():
            raise ConfigError(f"run.folder: there is no run in {self.path} to resume; start it without --resume")
        return load_config(self.config)

    def recall(self) -> dict[str, Any]:
        """What `remember` stored; empty in a new run."""
        return json.loads(self.machine.read_text()) if self.machine.exists() else {}

    def remember(self, choices: dict[str, Any]) -> None:
        write_file(self.machine, lambda path: path.write_text(json.dumps(choices, indent=1) + "\n"))

    def rollout_file(self, name: str) -> Path:
        return self.rollouts / f"{name}.parquet"

    def drop_rollouts_after(self, value_batches: int, step: int) -> None:
        """Remove the files of batches that the resumed run is going to do again, and what was half written."""
        done = {f"value-{n + 1:06}" for n in range(value_batches)} | {f"step-{n + 1:06}" for n in range(step)}
        for path in self.rollouts.glob("*.parquet"):
            if path.stem not in done:
                path.unlink()


def check_same(stored: Config, config: Config) -> None:
    """Raise ConfigError unless `config` is the stored one; more steps, another place and other servers are allowed."""
    old, new = flat(stored.model_dump()), flat(config.model_dump())
    changed = sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))
    allowed = {"run.folder"} | ({"train.steps"} if config.train.steps >= stored.train.steps else set())
    if refused := [key for key in changed if key not in allowed and not key.startswith("server.")]:
        lines = (f"  {key}: {old.get(key)!r} in the run, {new.get(key)!r} now" for key in refused)
        raise ConfigError(
            "this run cannot be resumed with another configuration (only train.steps may be raised, and [server] differ):\n"
            + "\n".join(lines)
        )


def flat(data: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dictionaries as dotted keys."""
    result: dict[str, Any] = {}
    for key, value in data.items():
        result |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
    return result
