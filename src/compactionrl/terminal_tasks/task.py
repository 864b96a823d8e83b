"""A generated task, and the Harbor folder that holds it (schema 1.4)."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

GRADES = ("easy", "medium", "hard")
AGENT_SECONDS = {"easy": 1800, "medium": 3600, "hard": 7200}
SCRIPTS = files(__package__) / "scripts"

DOCKERFILE = """\
# Needs bash, coreutils, grep, sed, awk and python3; nothing is installed and nothing is fetched.
FROM python:3.12-slim-bookworm
ENV LANG=C.UTF-8
WORKDIR /app
COPY app/ /app/
"""
TEST = """\
#!/bin/bash
# Writes /logs/verifier/reward.json. Python starts isolated: variables and files that were left behind do not reach it.
mkdir -p /logs/verifier
cd /
exec env -i PATH=/usr/local/bin:/usr/bin:/bin LANG=C.UTF-8 python3 -I -B /tests/verify.py
"""
SOLVE = """\
#!/bin/bash
set -eu
cd /app
python3 -B /solution/solve.py
"""


@dataclass(frozen=True)
class Draft:
    """What a kind makes of its draws.

    `files`: path below /app -> text. `expected`: what the verifier compares with (JSON). `verify` and `solve`: names below
    `scripts/`. `solution`: path below /solution -> text, for an oracle that cannot work the answer out.
    """

    instruction: str
    files: dict[str, str]
    expected: Any
    solve: str
    verify: str = "answers"
    solution: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class TerminalTask:
    """One instance: `name` says which, `folder()` is all that Harbor needs."""

    kind: str
    grade: str
    split: str
    seed: int
    draft: Draft

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.grade}-{self.split}-{self.seed}"

    def content_hash(self) -> str:
        """Of what the agent sees and what is expected of it: equal for two instances only if they are the same task."""
        content = [self.draft.instruction, sorted(self.draft.files.items()), self.draft.expected]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def folder(self) -> dict[str, str]:
        """Path below the task's folder -> text."""
        return {
            "task.toml": self._toml(),
            "instruction.md": self.draft.instruction,
            "environment/Dockerfile": DOCKERFILE,
            **{f"environment/app/{path}": text for path, text in self.draft.files.items()},
            "tests/test.sh": TEST,
            "tests/verify.py": script(f"verify_{self.draft.verify}"),
            "tests/reading.py": script("reading"),
            "tests/expected.json": json.dumps(self.draft.expected) + "\n",
            "solution/solve.sh": SOLVE,
            "solution/prose.py": script("prose"),
            "solution/instruction.md": self.draft.instruction,
            "solution/solve.py": script(f"solve_{self.draft.solve}"),
            **{f"solution/{path}": text for path, text in self.draft.solution.items()},
        }

    def write(self, parent: Path) -> Path:
        """Write `parent/name`. Raises FileExistsError if it is there already."""
        target = parent / self.name
        target.mkdir(parents=True)
        for path, text in self.folder().items():
            file = target / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8", newline="\n")
            file.chmod(0o755 if file.suffix == ".sh" else 0o644)
        return target

    def _toml(self) -> str:
        return f"""\
schema_version = "1.4"

[task]
name = "compactionrl/{self.name}"
description = "Generated task for agents whose work outlasts their context window."
keywords = ["long-horizon", "{self.kind}"]

[metadata]
kind = "{self.kind}"
grade = "{self.grade}"
split = "{self.split}"
seed = {self.seed}
content_hash = "{self.content_hash()}"

[agent]
timeout_sec = {AGENT_SECONDS[self.grade]}

[verifier]
timeout_sec = 60

[environment]
network_mode = "no-network"
build_timeout_sec = 300
cpus = 1
memory_mb = 512
storage_mb = 512
"""


def script(name: str) -> str:
    """The text of a script that goes into task folders; it needs Python's standard library alone."""
    return (SCRIPTS / f"{name}.py").read_text(encoding="utf-8")
