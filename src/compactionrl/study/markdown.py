"""The figures of a study in Markdown, beside those of `compactionrl.markdown`."""

from __future__ import annotations

import math

from compactionrl.markdown import DASH, change, code, escape, minus, number, one_line, percent, signed, table
from compactionrl.study.bootstrap import Interval, Paired

__all__ = [
    "DASH",
    "change",
    "code",
    "escape",
    "minus",
    "number",
    "one_line",
    "percent",
    "percents",
    "points",
    "seed_points",
    "signed",
    "table",
]


def percents(found: Interval | None) -> str:
    """In %: 71.2 (68.0–74.1)."""
    return DASH if found is None else f"{percent(found.mean)} ({percent(found.low)}–{percent(found.high)})"


def points(found: Paired | None) -> str:
    """A difference in points: +3.1 (−0.5 to +6.7)."""
    return DASH if found is None else f"{signed(found.difference)} ({signed(found.low)} to {signed(found.high)})"


def seed_points(found: Paired | None) -> str:
    """Its t interval over the seeds; one seed has none."""
    return DASH if found is None or math.isinf(found.t_low) else f"{signed(found.t_low)} to {signed(found.t_high)}"
