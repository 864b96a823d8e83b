"""What a setting declares, and what was changed of it on the command line."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from typing import Any

from compactionrl.config import EnvironmentConfig, put
from compactionrl.study.grid import OWN
from compactionrl.study.markdown import code, escape, table

CHANGED = "# Changed on the command line:\n"
"""Behind it, the text of a setting names what was changed, a key on each line."""
DIALS = ("context", "limits", "sampling", "train", "warm_start")
"""Sections of a declaration that are shown; prompts and other texts in them are not."""


def declaration(header: Mapping[str, Any]) -> list[str]:
    """A setting in one short table, with what its author says at the head of the file.

    With the resolved configuration in the ledger, that is shown, defaults and all; else what the file declares.
    """
    declared = header.get("config") or as_declared(header["toml"])
    environment, windows = declared.get("environment", {}), header["windows"]
    compacting = escape(header["compacting"])
    rows = {
        "window C": f"{header['budget']:,} tokens",
        "compacting mode": f"{compacting}: up to {windows - 1} compactions, so {windows} windows of C",
        "modes measured": escape(", ".join(header["modes"])),
        "training": f"{header['steps']} policy updates of {header['rollouts_per_step']} rollouts",
        "held-out tasks": f"{header['tasks']:,}",
        "tasks": code(environment.get("tasks", EnvironmentConfig().tasks)),
        "their dials": dials("environment.options", environment.get("options", {})),
        **{section.replace("_", " "): dials(section, declared.get(section, {})) for section in DIALS},
    }
    return [about(header["toml"]), table(["", ""], ([name, value] for name, value in rows.items() if value), left=2)]


def as_declared(toml: str) -> dict[str, Any]:
    declared = tomllib.loads(toml)
    for key, value in changes(toml).items():
        put(declared, key, value)
    return declared


def about(toml: str) -> str:
    """The comment at the head of a setting, as plain paragraphs."""
    head = re.match(r"(?:#.*\n)*", toml)
    lines = head[0].splitlines() if head else []
    return "\n".join(plain(line.lstrip("# ")) for line in lines)


def plain(line: str) -> str:
    """A line of text that begins no list, quotation or heading."""
    return re.sub(r"^(\d*)(?=[-+=>#.)])", r"\1\\", escape(line))


def dials(section: str, values: Mapping[str, Any]) -> str:
    """Numbers, switches and, for training, choices; without what a study sets by itself."""

    def shown(key: str, value: Any) -> bool:
        prompt = isinstance(value, str) and section != "train"
        return not prompt and not isinstance(value, dict) and f"{section}.{key}" not in OWN

    return ", ".join(code(f"{key} = {json.dumps(value)}") for key, value in values.items() if shown(key, value))


def changes(toml: str) -> dict[str, Any]:
    """What was changed on the command line."""
    lines = (line.removeprefix("# ").partition(" = ") for line in toml.partition(CHANGED)[2].splitlines())
    return {key: json.loads(value) for key, _, value in lines}
