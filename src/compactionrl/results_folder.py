"""The folder of an evaluation.

runs/eval/.../
  config.toml         what is measured, every key
  about.json          what the servers said of themselves
  rollouts.jsonl.gz   every finished rollout, token by token, written when it ends
  results.json        the figures
  report.md           the same for people

An evaluation goes on where it was stopped. It may then also get more tasks, runs, modes or summarisers: whatever is there is
not measured again. With another configuration it is refused, since its figures would be of two different things.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from compactionrl.agents import names, open_chat, replace
from compactionrl.config import Config, ConfigError, ContextConfig, load_config
from compactionrl.config_toml import dump
from compactionrl.evaluation.evaluate import RETRY
from compactionrl.evaluation.modes import for_mode
from compactionrl.evaluation.page import page
from compactionrl.evaluation.rollout_file import RolloutFile, read_rollouts
from compactionrl.rollout.chat import ChatFormat
from compactionrl.rollout.ledger import Rollout
from compactionrl.samplers.http import hide_login
from compactionrl.training.atomic import write_file
from compactionrl.training.run_folder import flat

ELSEWHERE = ("lora", "warm_start", "train", "run")
"""Sections that are not about evaluating."""
FREE = {
    "sampling.concurrency",
    *(f"evaluation.{key}" for key in ("modes", "runs", "summarisers", "final_tasks", "every", "tasks")),
    *(
        f"evaluation.{key}"
        for key in ("prompt_price", "completion_price", "summariser_model", "summariser_key_variable")
    ),
}
"""Keys that say how much is measured, and how: no rollout depends on them, or its arm's name says it. So do those of [server],
all but the model."""


class ResultsFolder:
    """Raises ConfigError if the folder holds an evaluation with another configuration, or something else."""

    def __init__(self, path: Path, config: Config) -> None:
        self.path = path
        self.stored = path / "config.toml"
        self.about = path / "about.json"
        self.rollout_file = path / "rollouts.jsonl.gz"
        self.results = path / "results.json"
        self.report = path / "report.md"
        self.config = config
        if self.begun:
            if not self.rollout_file.exists():
                raise ConfigError(f"--output: {path} holds something else; choose another folder")
            stored = load_config(self.stored)
            self.config = adopt(stored, config)
            check_same(stored, self.config)

    def rollouts(self) -> RolloutFile:
        """Those that have ended, for reading and appending."""
        return RolloutFile(self.rollout_file)

    @property
    def begun(self) -> bool:
        return self.stored.exists()

    def begin(self, config: Config, about: dict[str, Any]) -> None:
        """Write what is measured: from here on, nothing else can be in this folder.

        Raises ConfigError if a summariser is not what it was when the folder was begun.
        """
        before = self.recall()["summarisers"] if self.begun else {}
        for name, described in about["summarisers"].items():
            if before.setdefault(name, described) != described:
                raise ConfigError(
                    f"--summariser {name} was {before[name]}, and is now {described}: choose another --output"
                )
        about = {**about, "summarisers": before}
        self.path.mkdir(parents=True, exist_ok=True)
        self.rollout_file.touch()
        write_json(self.about, about)
        text = dump(without_logins(config))
        write_file(self.stored, lambda path: path.write_text(text))

    def recall(self) -> dict[str, Any]:
        """What `begin` was told."""
        return json.loads(self.about.read_text())

    def finish(self, record: dict[str, Any]) -> None:
        write_json(self.results, record)
        text = page(record)
        write_file(self.report, lambda path: path.write_text(text))


def list_rollouts(path: Path) -> Iterator[Rollout]:
    """What an evaluation has finished so far. Raises ConfigError if there is none in `path`."""
    file = path / "rollouts.jsonl.gz"
    if not file.exists():
        raise ConfigError(f"--from {path}: there is no evaluation (it has no {file.name})")
    return read_rollouts(file)


def find_rollout(path: Path, rollout_id: str) -> tuple[Rollout, ChatFormat, ContextConfig]:
    """One of them, the format in which to read it, and the context that it ran in. Raises ConfigError if it is not there."""
    for rollout in list_rollouts(path):
        if RETRY.sub("", rollout.id) == RETRY.sub("", rollout_id):
            config = load_config(path / "config.toml")
            mode = re.split(r"[+-]", rollout.id)[0]
            return rollout, open_chat(config), for_mode(config, mode)
    raise ConfigError(f"--id {rollout_id}: {path} has no such rollout; without --id, all are listed")


def default_folder(config: Config) -> Path:
    """The same for the same measurement, whatever it has been stopped for."""
    name = (config.server.model or names(config)) if config.server.urls else Path(config.model.path).name
    readable = re.sub(r"[^\w.-]+", "-", name).strip("-.") or "model"
    key = json.dumps(measured(config), sort_keys=True).encode()
    return Path("runs/eval") / f"{readable}-{hashlib.blake2b(key, digest_size=4).hexdigest()}"


def adopt(stored: Config, config: Config) -> Config:
    """`config` with what the servers were asked for when the folder was begun, and need not be asked again.

    Raises ConfigError for other servers, unless it says that they serve the same model.
    """
    if config.sampling.sampler == "auto":
        config = replace(config, {"sampling": {"sampler": stored.sampling.sampler}})
    if config.server.model:
        return config
    before, now = (without_logins(each).server.urls for each in (stored, config))
    if before != now:
        raise ConfigError(
            f"server.urls: {', '.join(before)} in the folder, {', '.join(now)} now; if the same model is served there, name it "
            f"with --model {stored.server.model}, else choose another --output"
        )
    return replace(config, {"server": {"model": stored.server.model}})


def check_same(stored: Config, config: Config) -> None:
    """Raise ConfigError, which names the keys, unless both measure the same."""
    old, new = measured(stored), measured(config)
    changed = sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))
    if changed:
        lines = (f"  {key}: {old.get(key)!r} there, {new.get(key)!r} now" for key in changed)
        raise ConfigError(
            "the folder holds an evaluation with another configuration; choose another --output:\n" + "\n".join(lines)
        )


def measured(config: Config) -> dict[str, Any]:
    """The keys on which a rollout depends. Addresses are among them only where no name says what they serve."""
    keys = flat(without_logins(config).model_dump(exclude=set(ELSEWHERE)))
    about_server = {"server.model"} if config.server.model else {"server.urls"}
    return {
        key: value
        for key, value in keys.items()
        if key not in FREE and (not key.startswith("server.") or key in about_server)
    }


def without_logins(config: Config) -> Config:
    """A password in an address is for no file."""
    return replace(
        config,
        {
            "server": {"urls": [hide_login(url) for url in config.server.urls]},
            "evaluation": {"summarisers": [hide_login(source) for source in config.evaluation.summarisers]},
        },
    )


def write_json(path: Path, data: dict[str, Any]) -> None:
    text = json.dumps(data, indent=1, allow_nan=False) + "\n"
    write_file(path, lambda partial: partial.write_text(text))
