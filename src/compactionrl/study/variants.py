"""What is compared: the arms of the paper's Tables 2 to 4, and those that go beyond it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Changes = dict[str, Any]


@dataclass(frozen=True)
class Variant:
    """An arm: dotted configuration keys and what it sets them to, all else being equal.

    `changes` is a function of the number of windows in the setting's compacting mode (4: x4), which some arms refer to.
    """

    name: str
    title: str
    changes: Callable[[int], Changes]
    extra: bool = False

    def trained_in(self, windows: int) -> str:
        """The modes that its rollouts are trained in; empty for the base."""
        if self.name == BASE:
            return ""
        return " or ".join(self.changes(windows).get("train.modes", [f"x{windows}"]))


def fixed(**changes: Any) -> Callable[[int], Changes]:
    return lambda windows: {f"train.{key}": value for key, value in changes.items()}


BASE, FULL, UNTRAINED = "base", "full", "no-summary"

VARIANTS = (
    Variant(BASE, "base", fixed()),
    Variant("rl-c", "RL without compaction, C", fixed(modes=["x1"])),
    Variant("rl-2c", "RL without compaction, 2C", fixed(modes=["2C"])),
    Variant(UNTRAINED, "CompactionRL, summaries not trained", fixed(summaries=False)),
    Variant("segment-loss", "CompactionRL without token-level loss", fixed(normalisation="segment")),
    Variant("segment-gae", "CompactionRL without cross-trajectory GAE", fixed(estimator="segment")),
    Variant(FULL, "CompactionRL", fixed()),
    Variant("rl-total", "RL without compaction, all windows in one", lambda n: {"train.modes": [f"{n}C"]}, extra=True),
    Variant("concatenated", "exact GAE over the joined rollout", fixed(estimator="concatenated"), extra=True),
    Variant("lambda-segment", "lambda from the segment's length", fixed(lambda_length="segment"), extra=True),
    Variant("lambda-window", "lambda from the window's length", fixed(lambda_length="window"), extra=True),
    Variant("coupled-lambda", "the critic's lambda is the policy's", fixed(critic_lambda="policy"), extra=True),
    Variant("group", "group-relative, no critic", fixed(estimator="group", group_size=8), extra=True),
    Variant(
        "robust", "compaction on or off, drawn per rollout", lambda n: {"train.modes": ["x1", f"x{n}"]}, extra=True
    ),
)
"""In the order of the report; `extra` ones go beyond the paper."""


def variant(name: str) -> Variant:
    return next(one for one in VARIANTS if one.name == name)
