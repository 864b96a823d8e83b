"""What every verifier needs: reading what an agent left, whatever it is, and writing the reward."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

LARGEST = 1_000_000
"""Bytes of a file that is read at all."""


def expected() -> Any:
    return json.loads((Path(__file__).parent / "expected.json").read_text(encoding="utf-8"))


def read(path: str | Path) -> str | None:
    """The text of an ordinary file; None for anything else (missing, folder, link, pipe, too large, not UTF-8)."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:
        return None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        return None
    with os.fdopen(descriptor, "rb") as file:
        content = file.read(LARGEST + 1)
    try:
        return content.decode("utf-8") if len(content) <= LARGEST else None
    except UnicodeDecodeError:
        return None


def reward(value: float) -> None:
    """A number of [0, 1], to four digits."""
    Path("/logs/verifier/reward.json").write_text(json.dumps({"reward": round(value, 4)}) + "\n", encoding="utf-8")
