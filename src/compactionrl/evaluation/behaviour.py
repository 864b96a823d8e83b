"""What a set of rollouts did: Pass@1, and the behaviour that the paper reports beside it. No torch."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from compactionrl.evaluation.statistics import PassRate, pass_rate
from compactionrl.evaluation.usage import Usage, sampled_turns, turn_tokens, usage
from compactionrl.rollout.ledger import ENDS, End, Rollout, Turn

SOLVED = 1.0
"""A rollout counts as solved from this reward on; partial credit shows in `reward`."""


@dataclass(frozen=True)
class Digest:
    """What the figures need of a rollout; a ledger of 250,000 tokens takes some 10 MB of memory."""

    id: str
    task_id: str
    reward: float
    end: End
    turns: int
    tool_calls: int
    cut_responses: int
    thinking_tokens: int
    compactions: int
    summary_lengths: tuple[int, ...]
    rejected: tuple[str, ...]
    """The reason of each summary attempt that was not accepted."""
    cut_summaries: int
    responses: Usage
    summaries: Usage

    @property
    def solved(self) -> bool:
        return self.reward >= SOLVED


def digest(rollout: Rollout) -> Digest:
    spent = usage(rollout)
    return Digest(
        id=rollout.id,
        task_id=rollout.task_id,
        reward=rollout.reward,
        end=rollout.end,
        turns=rollout.turns,
        tool_calls=rollout.tool_calls,
        cut_responses=rollout.cut_responses,
        thinking_tokens=rollout.thinking_tokens,
        compactions=rollout.compactions,
        summary_lengths=tuple(summary_lengths(rollout)),
        rejected=tuple(attempt.reason for window in rollout.windows for attempt in window.rejected),
        cut_summaries=sum(turn.note == "summary (cut)" for turn in turns(rollout)),
        responses=spent["execution"],
        summaries=spent["summary"],
    )


def behaviour(rollouts: Iterable[Rollout]) -> dict[str, Any]:
    """Describe rollouts that reached a verdict; see `describe`."""
    return describe([digest(rollout) for rollout in rollouts])


def describe(rollouts: Sequence[Digest]) -> dict[str, Any]:
    """Describe rollouts that reached a verdict (JSON-serialisable, never NaN; None: nothing to average over).

    Rollouts that ended in "error" say nothing about the policy: the caller counts them. ValueError if one is given.
    """
    broken = [rollout.id for rollout in rollouts if rollout.end == "error"]
    if broken:
        raise ValueError(f"rollouts that ended in 'error' have no verdict: {', '.join(broken[:5])}")
    ends = Counter(rollout.end for rollout in rollouts)
    responses = sum(rollout.turns for rollout in rollouts)
    return {
        **solved(rollouts),
        "reward": mean(rollout.reward for rollout in rollouts),
        "compacted": solved([rollout for rollout in rollouts if rollout.compactions]),
        "by_compactions": by_compactions(rollouts),
        "compactions": mean(rollout.compactions for rollout in rollouts),
        "turns": mean(rollout.turns for rollout in rollouts),
        "tool_calls": mean(rollout.tool_calls for rollout in rollouts),
        "summary_tokens": mean(n for rollout in rollouts for n in rollout.summary_lengths),
        "response_tokens": sum(rollout.responses.sampled for rollout in rollouts) / responses if responses else None,
        "thinking_tokens": sum(rollout.thinking_tokens for rollout in rollouts) / responses if responses else None,
        "sampled_tokens": mean(rollout.responses.sampled + rollout.summaries.sampled for rollout in rollouts),
        "cut_responses": mean(rollout.cut_responses for rollout in rollouts),
        "budget_exhausted": ends["budget"] / len(rollouts) if rollouts else None,
        "ends": {end: ends[end] for end in ENDS if end != "error"},
        "rejected_summaries": dict(sorted(Counter(r for rollout in rollouts for r in rollout.rejected).items())),
        "cut_summaries": sum(rollout.cut_summaries for rollout in rollouts),
    }


def solved(rollouts: Sequence[Digest]) -> PassRate:
    """Pass@1; rollouts of the same task are tries of it."""
    tasks: defaultdict[str, list[bool]] = defaultdict(list)
    for rollout in rollouts:
        tasks[rollout.task_id].append(rollout.solved)
    return pass_rate([*tasks.values()])


def by_compactions(rollouts: Sequence[Digest]) -> dict[str, PassRate]:
    """Pass@1 of the rollouts that compacted 0, 1, 2, ... times; only the numbers that occur."""
    counts = sorted({rollout.compactions for rollout in rollouts})
    return {str(n): solved([rollout for rollout in rollouts if rollout.compactions == n]) for n in counts}


def summary_lengths(rollout: Rollout) -> list[int]:
    """Tokens of each accepted summary."""
    return [
        turn_tokens(turn) for window in rollout.windows for kind, turn in sampled_turns(window) if kind == "summary"
    ]


def turns(rollout: Rollout) -> list[Turn]:
    return [turn for window in rollout.windows for turn in window.turns]


def mean(numbers: Iterable[float]) -> float | None:
    values = list(numbers)
    return fmean(values) if values else None
