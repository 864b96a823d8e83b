"""What a set of rollouts did: Pass@1, and the behaviour that the paper reports beside it. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any

from compactionrl.evaluation.statistics import PassRate, pass_rate
from compactionrl.rollout.ledger import ENDS, Kind, Rollout, Turn

SOLVED = 1.0
"""A rollout counts as solved from this reward on; partial credit shows in `reward`."""


def behaviour(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """Describe rollouts that reached a verdict (JSON-serialisable, never NaN; None: nothing to average over).

    Rollouts that ended in "error" say nothing about the policy: the caller counts them. ValueError if one is given.
    """
    broken = [rollout.id for rollout in rollouts if rollout.end == "error"]
    if broken:
        raise ValueError(f"rollouts that ended in 'error' have no verdict: {', '.join(broken[:5])}")
    ends = Counter(rollout.end for rollout in rollouts)
    responses = sum(rollout.turns for rollout in rollouts)
    thinking = sum(rollout.thinking_tokens for rollout in rollouts)
    execution = sum(sum(segment_lengths(rollout, "execution")) for rollout in rollouts)
    return {
        **solved(rollouts),
        "reward": mean(rollout.reward for rollout in rollouts),
        "compacted": solved([rollout for rollout in rollouts if rollout.compactions]),
        "by_compactions": by_compactions(rollouts),
        "compactions": mean(rollout.compactions for rollout in rollouts),
        "turns": mean(rollout.turns for rollout in rollouts),
        "tool_calls": mean(rollout.tool_calls for rollout in rollouts),
        "summary_tokens": mean(n for rollout in rollouts for n in segment_lengths(rollout, "summary")),
        "response_tokens": execution / responses if responses else None,
        "thinking_tokens": thinking / responses if responses else None,
        "sampled_tokens": mean(rollout.token_counts()["sampled"] for rollout in rollouts),
        "cut_responses": mean(rollout.cut_responses for rollout in rollouts),
        "budget_exhausted": ends["budget"] / len(rollouts) if rollouts else None,
        "ends": {end: ends[end] for end in ENDS if end != "error"},
        "rejected_summaries": dict(sorted(rejected_summaries(rollouts).items())),
        "cut_summaries": sum(turn.note == "summary (cut)" for turn in turns(rollouts)),
    }


def solved(rollouts: Sequence[Rollout]) -> PassRate:
    return pass_rate([rollout.reward >= SOLVED for rollout in rollouts])


def by_compactions(rollouts: Sequence[Rollout]) -> dict[str, PassRate]:
    """Pass@1 of the rollouts that compacted 0, 1, 2, ... times; only the numbers that occur."""
    counts = sorted({rollout.compactions for rollout in rollouts})
    return {str(n): solved([rollout for rollout in rollouts if rollout.compactions == n]) for n in counts}


def segment_lengths(rollout: Rollout, kind: Kind) -> list[int]:
    """Tokens sampled in each segment of one kind."""
    return [window.count(segment) for window in rollout.windows for segment in window.segments if segment.kind == kind]


def rejected_summaries(rollouts: Sequence[Rollout]) -> Counter[str]:
    """Summary attempts that were not accepted, by reason."""
    return Counter(attempt.reason for rollout in rollouts for window in rollout.windows for attempt in window.rejected)


def turns(rollouts: Sequence[Rollout]) -> list[Turn]:
    return [turn for rollout in rollouts for window in rollout.windows for turn in window.turns]


def mean(numbers: Iterable[float]) -> float | None:
    values = list(numbers)
    return fmean(values) if values else None
