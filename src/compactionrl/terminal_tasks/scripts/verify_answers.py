"""/app/answer.txt: one line `name: value` for each name that is asked for. Reward: the share of right values.

A name that was not asked for, a name that comes twice, or a line of another shape makes the whole answer worth nothing:
so nobody gains by listing every candidate.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from reading import expected, read, reward


def answers(text: str, names: set[str]) -> dict[str, str] | None:
    """Name -> plain value; None if a line is not as asked."""
    found: dict[str, str] = {}
    for line in filter(str.strip, text.splitlines()):
        name, colon, value = line.partition(":")
        name = name.strip()
        if not colon or name not in names or name in found:
            return None
        found[name] = plain(value)
    return found


def plain(value: str) -> str:
    """Letter case, spaces and commas evened out."""
    return " ".join(value.lower().replace(",", " ").split())


def score(text: str | None, right: dict[str, str]) -> float:
    given = answers(text or "", set(right)) or {}
    return sum(given.get(name) == plain(value) for name, value in right.items()) / len(right)


if __name__ == "__main__":
    reward(score(read("/app/answer.txt"), expected()))
