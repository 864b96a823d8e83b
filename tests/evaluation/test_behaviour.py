"""Figures computed by hand from small ledgers."""

import json
from typing import Any

import pytest

from compactionrl.evaluation.behaviour import behaviour
from compactionrl.rollout.ledger import Attempt, Rollout, Segment, Window


def window(execution: list[int], summary: int = 0, first: int = 0, note: str = "summary") -> Window:
    """A window with context, responses of the given lengths and, with `summary` > 0, a summary of that length."""
    made, acting = Window(), Segment("execution", first)
    made.append_context([9] * 7, "user", "task")
    for n in execution:
        made.append_sampled([1] * n, [-0.5] * n, [0] * n, acting)
        made.append_context([9] * 3, "user")
    if summary:
        made.append_sampled([2] * summary, [-0.5] * summary, [0] * summary, Segment("summary", first + 1), note)
    return made


def compacted(reward: float) -> Rollout:
    """Two compactions (summaries of 4 and 6 tokens, the second cut), one rejected try of 5, responses of 2+3, 4 and 1."""
    windows = [window([2, 3], 4), window([4], 6, first=2, note="summary (cut)"), window([1], first=4)]
    windows[0].rejected.append(Attempt([3] * 5, [-1.0] * 5, "only thinking"))
    return Rollout("b", "task-b", windows, reward=reward, end="submitted", turns=4, tool_calls=5, thinking_tokens=2)


def plain(reward: float, end: Any) -> Rollout:
    return Rollout("a", "task-a", [window([2])], reward=reward, end=end, turns=1, tool_calls=1, cut_responses=1)


def test_every_figure() -> None:
    measured = behaviour([compacted(1.0), compacted(0.0), plain(1.0, "submitted"), plain(0.5, "budget")])
    assert (measured["pass_at_1"], measured["n"]) == (0.5, 4)  # 0.5 is partial credit, not solved
    assert measured["reward"] == (1 + 0 + 1 + 0.5) / 4
    assert measured["compacted"]["pass_at_1"] == 0.5
    assert {k: (v["pass_at_1"], v["n"]) for k, v in measured["by_compactions"].items()} == {
        "0": (0.5, 2),
        "2": (0.5, 2),
    }
    assert measured["compactions"] == 1.0
    assert measured["turns"] == (4 + 4 + 1 + 1) / 4
    assert measured["tool_calls"] == (5 + 5 + 1 + 1) / 4
    assert measured["summary_tokens"] == 5.0  # of accepted summaries: 4, 6, 4, 6
    assert measured["response_tokens"] == (10 + 10 + 2 + 2) / 10  # per response
    assert measured["thinking_tokens"] == (2 + 2) / 10
    assert measured["sampled_tokens"] == (25 + 25 + 2 + 2) / 4  # rejected ones count as sampled
    assert measured["cut_responses"] == 0.5
    assert measured["budget_exhausted"] == 0.25
    assert measured["ends"] == {"submitted": 3, "turns": 0, "budget": 1, "time": 0}
    assert measured["rejected_summaries"] == {"only thinking": 2}
    assert measured["cut_summaries"] == 2


def test_the_interval_is_wilsons() -> None:
    measured = behaviour([plain(1.0, "submitted")] * 5 + [plain(0.0, "turns")] * 5)
    assert (measured["low"], measured["high"]) == pytest.approx((0.2366, 0.7634), abs=5e-5)


@pytest.mark.parametrize("rollouts", [[], [plain(0.0, "turns")], [Rollout("e", "t", end="budget")]])
def test_never_nan(rollouts: list[Rollout]) -> None:
    json.dumps(behaviour(rollouts), allow_nan=False)


def test_nothing_to_average_over_is_none_not_zero() -> None:
    assert behaviour([])["pass_at_1"] is None
    assert behaviour([plain(1.0, "submitted")])["summary_tokens"] is None
    assert behaviour([plain(1.0, "submitted")])["compacted"]["pass_at_1"] is None


def test_a_rollout_that_broke_down_is_refused() -> None:
    with pytest.raises(ValueError, match="broken-7"):
        behaviour([plain(1.0, "submitted"), Rollout("broken-7", "t", end="error")])
