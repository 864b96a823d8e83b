"""Intervals for outcomes of several seeds on the same held-out tasks.

Seeds and tasks are both samples, and every seed meets every task. So both are resampled, independently of each other:
the crossed bootstrap (Owen, "The pigeonhole bootstrap", 2007). It counts the noise of single outcomes up to three
times, so it is too wide where that noise dominates; where seeds differ much it is too narrow, as every percentile
bootstrap over a handful of seeds is. So a t interval over the seeds' own differences stands beside it; that one takes
the tasks as given.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

REPLICATES = 10_000
LEVEL = 0.95

OUTCOME = {"0": 0.0, "1": 1.0, "-": math.nan}
"""Failed, solved, broke down (says nothing about the policy)."""


class Interval(NamedTuple):
    mean: float
    """Mean over seeds of each seed's mean over the tasks it finished."""
    low: float
    high: float


class Paired(NamedTuple):
    difference: float
    """Mean over the common seeds of each seed's mean difference over the tasks that both finished."""
    low: float
    high: float
    t_low: float
    """The t interval over the seeds; infinite with one seed, which cannot say how seeds differ."""
    t_high: float
    per_seed: dict[int, float]


@dataclass(frozen=True)
class Outcomes:
    """Outcomes (or their differences) of some seeds; every seed has at least one."""

    seeds: tuple[int, ...]
    matrix: np.ndarray
    """[seeds, tasks]; NaN where a task broke down."""

    @property
    def per_seed(self) -> dict[int, float]:
        """Each seed's mean over the tasks it finished."""
        return dict(zip(self.seeds, (float(np.nanmean(row)) for row in self.matrix), strict=True))

    def on(self, seeds: Collection[int]) -> Outcomes:
        """Those of `seeds` that are here."""
        keep = [seed in seeds for seed in self.seeds]
        return Outcomes(tuple(seed for seed in self.seeds if seed in seeds), self.matrix[keep])

    def minus(self, other: Outcomes) -> Outcomes:
        """Task by task, on the seeds that both have and the tasks that both finished."""
        mine, theirs = self.on(other.seeds), other.on(self.seeds)
        difference = mine.matrix - theirs.matrix
        measured = ~np.isnan(difference).all(axis=1)
        return Outcomes(tuple(np.array(mine.seeds, dtype=int)[measured].tolist()), difference[measured])


def outcomes(
    ledger: Mapping[str, Any], setting: str, variant: str, mode: str, seeds: Collection[int] | None = None
) -> Outcomes:
    """What the finished cells of `variant` measured in `mode` ("executor/summariser" for the variant "swap").

    Without a finished cell there are no seeds in it. ValueError for a setting or variant that the study does not have,
    and for a cell that was not evaluated on the setting's tasks.
    """
    known = [each["name"] for each in ledger["variants"]] + ["swap"]
    if setting not in ledger["settings"] or variant not in known:
        raise ValueError(f"the study has no {setting}/{variant}; settings: {[*ledger['settings']]}, variants: {known}")
    tasks = ledger["settings"][setting]["tasks"]
    rows = {}
    for key, cell in ledger["cells"].items():
        if (cell["setting"], cell["variant"]) == (setting, variant) and mode in cell["evaluation"]:
            text = cell["evaluation"][mode]["outcomes"]
            if len(text) != tasks or not set(text) <= OUTCOME.keys():
                raise ValueError(
                    f"{key} in {mode}: expected {tasks} outcomes, each 0, 1 or -, found {text!r}; run this cell again"
                )
            if set(text) != {"-"} and (seeds is None or cell["seed"] in seeds):
                rows[cell["seed"]] = [OUTCOME[outcome] for outcome in text]
    order = sorted(rows)
    return Outcomes(tuple(order), np.array([rows[seed] for seed in order]).reshape(len(order), tasks))


def interval(matrix: np.ndarray, *, seed: int = 0) -> Interval:
    """Mean and 95% percentile interval of [seeds, tasks] by the crossed bootstrap; `seed` picks the resamples."""
    return Interval(mean(matrix), *ends(np.ascontiguousarray(matrix, dtype=float).tobytes(), matrix.shape, seed))


def paired(a: Outcomes, b: Outcomes, *, seed: int = 0) -> Paired:
    """The difference a - b, seed by seed and task by task. ValueError when there is no pair."""
    differences = a.minus(b)
    if not differences.seeds:
        raise ValueError(
            f"nothing to compare: finished seeds {[*a.seeds]} and {[*b.seeds]} have no task in common; "
            "run the missing cells with `compactionrl study`"
        )
    per_seed = differences.per_seed
    return Paired(*interval(differences.matrix, seed=seed), *t_interval(np.array([*per_seed.values()])), per_seed)


def share(part: Outcomes, whole: Outcomes, base: Outcomes, *, seed: int = 0) -> Interval | None:
    """(part - base) / (whole - base) on the seeds that all three have; all are resampled together.

    None when `whole` has no gain that is sure to be above 0: then there is nothing to take a share of.
    """
    gain, full_gain = part.minus(base), whole.minus(base)
    common = set(gain.seeds) & set(full_gain.seeds)
    gain, full_gain = gain.on(common), full_gain.on(common)
    if not common or interval(full_gain.matrix, seed=seed).low <= 0:
        return None
    numerator, denominator = replicates(gain.matrix, seed), replicates(full_gain.matrix, seed)
    # At most one replicate in forty: those in which the whole gained nothing.
    gained = denominator > 0
    low, high = percentiles(numerator[gained] / denominator[gained])
    return Interval(mean(gain.matrix) / mean(full_gain.matrix), low, high)


def t_interval(values: np.ndarray) -> tuple[float, float]:
    """95% interval of the mean of a few independent values; infinite for one value."""
    if len(values) < 2:
        return -math.inf, math.inf
    half = t_quantile(len(values) - 1) * values.std(ddof=1) / math.sqrt(len(values))
    return float(values.mean() - half), float(values.mean() + half)


def t_quantile(df: int) -> float:
    """t with P(|T| < t) = 95% for Student's T.

    T = sqrt(df) tan(phi) with the density of phi proportional to cos(phi)^(df - 1), which is summed up on a grid.
    """
    angles = np.linspace(0, math.pi / 2, 100_001)
    density = np.cos(angles) ** (df - 1)
    within = np.concatenate([[0], np.cumsum(density[1:] + density[:-1])])
    return math.sqrt(df) * math.tan(np.interp(LEVEL, within / within[-1], angles))


def mean(matrix: np.ndarray) -> float:
    return float(weighted_means(matrix, *(np.ones((1, n)) for n in matrix.shape))[0])


def replicates(matrix: np.ndarray, seed: int) -> np.ndarray:
    """[REPLICATES] means of [seeds, tasks], each over one resample of the seeds and one of the tasks.

    Equal `seed` and shape give the same resamples: two matrices of the same seeds and tasks are resampled together.
    """
    seeds, tasks = matrix.shape
    means = weighted_means(matrix, resamples(seeds, 0, seed), resamples(tasks, 1, seed))
    return means[~np.isnan(means)]


def weighted_means(matrix: np.ndarray, seed_weights: np.ndarray, task_weights: np.ndarray) -> np.ndarray:
    """[B] means of [S, T] over seeds, weighted [B, S], of the means over finished tasks, weighted [B, T].

    A seed none of whose finished tasks has weight does not count; NaN if that is so for every seed with weight.
    """
    finished = ~np.isnan(matrix)
    weight = task_weights @ finished.T
    solved = task_weights @ np.where(finished, matrix, 0).T
    means = np.divide(solved, weight, out=np.zeros_like(weight), where=weight > 0)
    seed_weights = seed_weights * (weight > 0)
    total = seed_weights.sum(axis=1)
    return np.divide((seed_weights * means).sum(axis=1), total, out=np.full_like(total, np.nan), where=total > 0)


@lru_cache(maxsize=8)
def resamples(n: int, axis: int, seed: int) -> np.ndarray:
    """[REPLICATES, n]: how often each of n things is drawn in each of the resamples."""
    rng = np.random.default_rng([seed, axis])
    return rng.multinomial(n, np.full(n, 1 / n), size=REPLICATES).astype(float)


@lru_cache(maxsize=512)
def ends(matrix: bytes, shape: tuple[int, ...], seed: int) -> tuple[float, float]:
    """Of the interval; a report asks for the same one in several of its tables and figures."""
    return percentiles(replicates(np.frombuffer(matrix).reshape(shape), seed))


def percentiles(values: np.ndarray) -> tuple[float, float]:
    low, high = np.quantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)
