"""The pages of /app/book. Reward: (damaged rows that are right - other rows that are spoiled) / damaged rows, at least 0."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from reading import expected, read, reward


def rows(text: str) -> list[str]:
    """Its lines, spaces evened out."""
    return ["".join(line.split()) for line in text.splitlines() if line.strip()]


def main() -> None:
    right = expected()
    damaged, score = set(right["damaged"]), 0
    for name, text in right["pages"].items():
        wanted = rows(text)
        found = rows(read(f"/app/book/{name}") or "")
        # A page of another length is spoiled as a whole.
        pairs = zip(wanted, found if len(found) == len(wanted) else [""] * len(wanted), strict=True)
        for line, given in list(pairs)[1:]:
            is_damaged = int(line.split(",")[0]) in damaged
            score += (line == given) if is_damaged else -(line != given)
    reward(max(0, score) / len(damaged))


main()
