"""Pass@1 with an interval that stays honest for few tasks and for rates near 0 and 1."""

from __future__ import annotations

import math
from typing import TypedDict

Z95 = 1.959963984540054
"""The 0.975 quantile of the standard normal distribution."""


class PassRate(TypedDict):
    pass_at_1: float | None
    """Solved / n; None when nothing was measured."""
    low: float
    high: float
    n: int


def wilson(solved: int, n: int, z: float = Z95) -> tuple[float, float]:
    """The Wilson score interval of a rate (Wilson 1927): (low, high) within [0, 1]; (0, 1) when n is 0."""
    if not 0 <= solved <= n:
        raise ValueError(f"{solved} solved of {n} rollouts: must be between 0 and n")
    if n == 0:
        return 0.0, 1.0
    rate, spread = solved / n, z * z / n
    centre = rate + spread / 2
    half = math.sqrt(spread * (rate * (1 - rate) + spread / 4))
    # At 0 and n the bound is exact; rounding would leave 1e-17 there.
    low = 0.0 if solved == 0 else (centre - half) / (1 + spread)
    high = 1.0 if solved == n else (centre + half) / (1 + spread)
    return low, high


def pass_rate(outcomes: list[bool]) -> PassRate:
    """Pass@1 of one attempt per task, with its 95% Wilson interval."""
    solved, n = sum(outcomes), len(outcomes)
    low, high = wilson(solved, n)
    return PassRate(pass_at_1=solved / n if n else None, low=low, high=high, n=n)
