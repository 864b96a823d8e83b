"""Every pair of arms in the paper's Tables 1 to 4, and the questions that go beyond it, put to a study.

The paper's consistent orderings are those that all of its columns agree on; the others are mixed in the paper itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any, Literal

from compactionrl.study.bootstrap import Interval, Outcomes, Paired, outcomes, paired, share

Ledger = Mapping[str, Any]
Point = tuple[str, str]
"""A variant, and a mode or its role in the setting: "compacting", "long". Swaps: "swap", "executor/summariser"."""
Outcome = Literal["holds", "does not hold", "undecided", "not run"]

X1, XN = "x1", "compacting"

PAPER: dict[Point, tuple[float | None, ...]] = {
    ("base", X1): (47.5, 14.6, 57.8, 17.9),
    ("base", XN): (50.5, 13.4, 59.8, 21.4),
    ("rl-c", X1): (50.0, 16.9, 58.3, 20.2),
    ("rl-c", XN): (48.0, 12.4, 62.5, 23.6),
    ("rl-2c", X1): (48.3, 11.8, 63.0, 20.8),
    ("rl-2c", XN): (52.5, 23.6, 64.5, 23.0),
    ("no-summary", X1): (52.5, 9.0, 54.5, 17.6),
    ("no-summary", XN): (54.5, 12.4, 64.5, 21.5),
    ("full", X1): (43.7, 16.9, 57.3, 21.4),
    ("full", XN): (56.0, 20.2, 66.8, 24.5),
    ("segment-loss", XN): (None, None, 60.0, 21.3),
    ("segment-gae", XN): (None, None, 63.0, 22.5),
    # The paper holds one executing agent fixed; here the claim is checked with two.
    ("swap", "base/base"): (49.0,),
    ("swap", "base/full"): (55.5,),
    ("swap", "full/base"): (49.0,),
    ("swap", "full/full"): (55.5,),
}
"""Pass@1 in %. Columns: GLM-4.7-Flash on SWE-bench Verified and Terminal-Bench 2.0, GLM-4.5-Air on the same two."""


@dataclass(frozen=True)
class Claim:
    """Two arms, in the direction that most of the paper's columns show; where as many show the other, its mean."""

    table: str
    text: str
    better: Point
    worse: Point

    @property
    def paper(self) -> list[tuple[float, float]]:
        """(better, worse) in each of the paper's columns that has both."""
        columns = zip(PAPER[self.better], PAPER[self.worse], strict=True)
        return [(better, worse) for better, worse in columns if better is not None and worse is not None]

    @property
    def held(self) -> int:
        """In how many of the paper's columns it holds; a tie is none."""
        return sum(better > worse for better, worse in self.paper)

    @property
    def consistent(self) -> bool:
        """Whether all of the paper's columns agree on it."""
        return self.held == len(self.paper)

    @property
    def gain(self) -> float:
        """The paper's mean difference, as a rate."""
        return fmean(better - worse for better, worse in self.paper) / 100


@dataclass(frozen=True)
class Verdict:
    claim: Claim
    outcome: Outcome
    paired: Paired | None
    agrees: bool = True
    """Whether the t interval over the seeds says the same as the bootstrap."""

    @property
    def excludes_paper(self) -> bool:
        """Undecided, but the interval does not hold the paper's mean difference."""
        found = self.paired
        return self.outcome == "undecided" and found is not None and not found.low <= self.claim.gain <= found.high


@dataclass(frozen=True)
class Answer:
    """What a study says to a question: in words, and the difference or the share behind them."""

    question: str
    result: str
    estimate: Paired | Interval | None
    agrees: bool = True
    """Whether the t interval over the seeds says the same as the bootstrap; a share has none."""


def judge(claim: Claim, ledger: Ledger, setting: str) -> Verdict:
    """Holds (or does not): the 95% interval of the paired difference is wholly above (below) 0."""
    found = compare(ledger, setting, claim.better, claim.worse)
    if found is None:
        return Verdict(claim, "not run", None)
    words: dict[int, Outcome] = {1: "holds", -1: "does not hold", 0: "undecided"}
    return Verdict(claim, words[side(found.low, found.high)], found, agrees=agrees(found))


def answers(ledger: Ledger, setting: str) -> list[Answer]:
    """The study's answer to each question that goes beyond the paper."""
    words = {1: "higher", -1: "lower", 0: "undecided"}

    def word(_: float, low: float, high: float) -> str:
        return words[side(low, high)]

    compared = [answer(question, compare(ledger, setting, *points), word) for question, points in QUESTIONS.items()]
    return [*compared, robust_in_one_window(ledger, setting), robust_share(ledger, setting)]


def answer(question: str, found: Paired | None, word: Callable[[float, float, float], str]) -> Answer:
    """`word` makes the result of a mean and its interval."""
    if found is None:
        return Answer(question, "not run", None)
    result = word(found.difference, found.low, found.high)
    return Answer(question, result, found, agrees=word(found.difference, found.t_low, found.t_high) == result)


def robust_in_one_window(ledger: Ledger, setting: str) -> Answer:
    """Training with compaction on or off at random should cost at most two points where there is none."""
    question = "compaction on or off at random, x1: at most 2 points below RL without compaction, C"
    return answer(question, compare(ledger, setting, ("robust", X1), ("rl-c", X1)), partial(criterion, least=-0.02))


def robust_share(ledger: Ledger, setting: str) -> Answer:
    """Training with compaction on or off at random should keep nine tenths of the gain from training with it."""
    question = "compaction on or off at random: at least 90% of CompactionRL's gain over the base"
    robust, full, base = (measured(ledger, setting, (name, XN)) for name in ("robust", "full", "base"))
    if not robust.minus(base).minus(full).seeds:
        return Answer(question, "not run", None)
    kept = share(robust, full, base)
    if kept is None:
        return Answer(question, "CompactionRL has no sure gain", None)
    return Answer(question, criterion(*kept, least=0.9), kept)


def criterion(mean: float, low: float, high: float, *, least: float) -> str:
    """Whether a mean is above `least`, and whether its interval settles it."""
    if low > least:
        return "met"
    if high < least:
        return "not met"
    return "met by the mean, interval open" if mean > least else "not met by the mean, interval open"


def compare(ledger: Ledger, setting: str, a: Point, b: Point) -> Paired | None:
    """a - b; None while they have no finished seed in common."""
    ours, theirs = measured(ledger, setting, a), measured(ledger, setting, b)
    return paired(ours, theirs) if ours.minus(theirs).seeds else None


def measured(ledger: Ledger, setting: str, point: Point) -> Outcomes:
    variant, mode = point
    return outcomes(ledger, setting, variant, ledger["settings"][setting].get(mode, mode))


def agrees(found: Paired) -> bool:
    """Whether the t interval over the seeds says the same of the difference as the bootstrap."""
    return side(found.t_low, found.t_high) == side(found.low, found.high)


def side(low: float, high: float) -> int:
    """Of 0, on which an interval lies: 1 above, -1 below, 0 if it contains 0."""
    return int(low > 0) - int(high < 0)


CLAIMS = (
    Claim(
        "1", "the base acts better with the trained policy's summaries", ("swap", "base/full"), ("swap", "base/base")
    ),
    Claim("1", "the trained policy acts better with its own summaries", ("swap", "full/full"), ("swap", "full/base")),
    # In the compacting mode.
    Claim("2, 3", "CompactionRL beats the base", ("full", XN), ("base", XN)),
    Claim("2, 3", "CompactionRL beats RL in one window of C", ("full", XN), ("rl-c", XN)),
    Claim("2, 3", "CompactionRL beats RL in one window of 2C", ("full", XN), ("rl-2c", XN)),
    Claim("2, 3", "training the summaries pays", ("full", XN), ("no-summary", XN)),
    Claim("2, 3", "CompactionRL beats the base even with summaries untrained", ("no-summary", XN), ("base", XN)),
    Claim("2, 3", "with summaries untrained it beats RL in one window of C", ("no-summary", XN), ("rl-c", XN)),
    Claim("2, 3", "RL in one window of 2C beats it with summaries untrained", ("rl-2c", XN), ("no-summary", XN)),
    Claim("2, 3", "RL in one window of 2C beats that of C", ("rl-2c", XN), ("rl-c", XN)),
    Claim("2, 3", "RL in one window of 2C beats the base", ("rl-2c", XN), ("base", XN)),
    Claim("2, 3", "RL in one window of C beats the base", ("rl-c", XN), ("base", XN)),
    # Compaction on against off, the same policy.
    Claim("2, 3", "the base gains from compaction", ("base", XN), ("base", X1)),
    Claim("2, 3", "RL in one window of C gains from compaction", ("rl-c", XN), ("rl-c", X1)),
    Claim("2, 3", "RL in one window of 2C gains from compaction", ("rl-2c", XN), ("rl-2c", X1)),
    Claim("2, 3", "with summaries untrained it gains from compaction", ("no-summary", XN), ("no-summary", X1)),
    Claim("2, 3", "CompactionRL gains from compaction", ("full", XN), ("full", X1)),
    # Compaction off: the paper says that the gains do not carry over.
    Claim("2, 3", "x1: RL in one window of C beats CompactionRL", ("rl-c", X1), ("full", X1)),
    Claim("2, 3", "x1: RL in one window of 2C beats CompactionRL", ("rl-2c", X1), ("full", X1)),
    Claim("2, 3", "x1: CompactionRL beats the base", ("full", X1), ("base", X1)),
    Claim("2, 3", "x1: training the summaries pays", ("full", X1), ("no-summary", X1)),
    Claim("2, 3", "x1: the base beats CompactionRL with summaries untrained", ("base", X1), ("no-summary", X1)),
    Claim("2, 3", "x1: RL in one window of C beats it with summaries untrained", ("rl-c", X1), ("no-summary", X1)),
    Claim("2, 3", "x1: RL in one window of 2C beats it with summaries untrained", ("rl-2c", X1), ("no-summary", X1)),
    Claim("2, 3", "x1: RL in one window of C beats that of 2C", ("rl-c", X1), ("rl-2c", X1)),
    Claim("2, 3", "x1: RL in one window of C beats the base", ("rl-c", X1), ("base", X1)),
    Claim("2, 3", "x1: RL in one window of 2C beats the base", ("rl-2c", X1), ("base", X1)),
    # Ablations, in the compacting mode; the paper has them for one of its models.
    Claim("4", "the token-level loss pays", ("full", XN), ("segment-loss", XN)),
    Claim("4", "cross-trajectory GAE pays", ("full", XN), ("segment-gae", XN)),
    Claim("4", "the token-level loss matters more", ("segment-gae", XN), ("segment-loss", XN)),
    Claim("4", "without cross-trajectory GAE it beats the base", ("segment-gae", XN), ("base", XN)),
    Claim("4", "RL in one window of C beats it without cross-trajectory GAE", ("rl-c", XN), ("segment-gae", XN)),
    Claim("4", "RL in one window of 2C beats it without cross-trajectory GAE", ("rl-2c", XN), ("segment-gae", XN)),
    Claim("4", "untrained summaries cost less than no cross-trajectory GAE", ("no-summary", XN), ("segment-gae", XN)),
    Claim("4", "without the token-level loss it beats the base", ("segment-loss", XN), ("base", XN)),
    Claim("4", "RL in one window of C beats it without the token-level loss", ("rl-c", XN), ("segment-loss", XN)),
    Claim("4", "RL in one window of 2C beats it without the token-level loss", ("rl-2c", XN), ("segment-loss", XN)),
    Claim("4", "untrained summaries cost less than no token-level loss", ("no-summary", XN), ("segment-loss", XN)),
)


def against_full(name: str) -> tuple[Point, Point]:
    return (name, XN), ("full", XN)


QUESTIONS: dict[str, tuple[Point, Point]] = {
    "exact GAE over the joined rollout, against E14's correction": against_full("concatenated"),
    "lambda from the segment's length (the paper's words taken literally), against the rollout's": against_full(
        "lambda-segment"
    ),
    "lambda from the window's length, against the rollout's": against_full("lambda-window"),
    "the critic's lambda coupled to the policy's, against 1": against_full("coupled-lambda"),
    "group-relative without a critic, against CompactionRL": against_full("group"),
    "RL in one window as long as all, then compacting, against CompactionRL": against_full("rl-total"),
    "RL in one window as long as all, never compacting, against CompactionRL": (("rl-total", "long"), ("full", XN)),
    "compaction on or off at random, against CompactionRL": against_full("robust"),
    "compaction on or off at random, x1, against CompactionRL": (("robust", X1), ("full", X1)),
}
"""Both in the compacting mode where nothing else is said; a question leaves open which is higher."""
