"""Pass@1 and paired differences, with 95% intervals that stay honest for few tasks and for rates near 0 and 1.

A task may be tried several times. Tries of one task are not independent: the tasks are the sample, and both intervals are
over them. A bootstrap over tasks would do as well for a hundred of them, but not for ten, or where all tasks end alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypedDict

Z95 = 1.959963984540054
"""The 0.975 quantile of the standard normal distribution."""


class PassRate(TypedDict):
    pass_at_1: float | None
    """Solved / n; None when nothing was measured."""
    low: float
    high: float
    n: int


class Difference(TypedDict):
    difference: float | None
    """Mean over the tasks; None when there is none."""
    low: float
    high: float
    tasks: int


def wilson(solved: float, n: float, z: float = Z95) -> tuple[float, float]:
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


def pass_rate(tasks: Sequence[Sequence[bool]]) -> PassRate:
    """Pass@1 over all tries, given the outcomes of each task's tries, with its 95% interval.

    The interval is Wilson's, for the effective number of tries (Korn and Graubard 1998; Dean and Pagano 2015): as many
    independent ones as would give the variance that the tasks show. With one try each, it is the number of tasks.
    """
    solved, n = sum(map(sum, tasks)), sum(map(len, tasks))
    rate = solved / n if n else None
    effective = effective_tries(tasks, rate) if rate is not None else 0.0
    low, high = wilson((rate or 0.0) * effective, effective)
    return PassRate(pass_at_1=rate, low=low, high=high, n=n)


def effective_tries(tasks: Sequence[Sequence[bool]], rate: float) -> float:
    """rate (1 - rate) / the variance of the rate between tasks; never more than there are tries.

    Where all tries end alike, they say no more than one of each task: Kish's number, (sum of tries)^2 / sum of squares.
    """
    n = sum(map(len, tasks))
    if rate in (0.0, 1.0):
        return n**2 / sum(len(tries) ** 2 for tries in tasks)
    between = sum((sum(tries) - rate * len(tries)) ** 2 for tries in tasks)
    return min(n, rate * (1 - rate) * n**2 / between) if between else n


def paired_difference(differences: Sequence[float], z: float = Z95) -> Difference:
    """The mean of differences in [-1, 1], one per task, with its 95% interval.

    Agresti and Min (2005), "Simple improved confidence intervals for comparing matched proportions": Wald's interval after
    adding half a task to each of: better, worse, and twice the same. So there is one also where no task differs.
    """
    n = len(differences)
    if not n:
        return Difference(difference=None, low=-1.0, high=1.0, tasks=0)
    total = sum(differences)
    centre = total / (n + 2)
    variance = (sum(d * d for d in differences) + 1) / (n + 2) - centre**2
    half = z * math.sqrt(variance / (n + 2))
    return Difference(difference=total / n, low=max(centre - half, -1.0), high=min(centre + half, 1.0), tasks=n)
