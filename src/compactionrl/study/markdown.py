"""Markdown tables and the figures in them. What is missing is a dash."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

from compactionrl.study.bootstrap import Interval, Paired

DASH = "–"


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1, notes: Sequence[str] = ()) -> str:
    """A table whose first `left` columns are text, the others right-aligned, and a paragraph for each note."""
    align = ["---"] * left + ["---:"] * (len(head) - left)
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, align, *rows)]
    return "\n".join([*lines, *(f"\n{note}" for note in notes)]) + "\n"


def escape(text: str) -> str:
    """Text that is shown as it is, on one line: neither HTML nor Markdown, and within its cell."""
    return re.sub(r"[\\`*_\[\]<&|~$]", r"\\\g<0>", one_line(text))


def code(text: str) -> str:
    """A code span, whatever is in it, that also stands in a table."""
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    pad = " " * (len(fence) > 1)
    inside = one_line(text).replace("|", r"\|")
    return f"{fence}{pad}{inside}{pad}{fence}"


def one_line(text: str) -> str:
    return re.sub(r"[\r\n]", " ", text)


def number(value: float | None, digits: int = 2) -> str:
    return DASH if value is None else minus(f"{value:z,.{digits}f}")


def change(first: float | None, last: float | None) -> str:
    return DASH if first is None and last is None else f"{number(first)} → {number(last)}"


def percent(value: float | None) -> str:
    return DASH if value is None else number(100 * value, 1)


def percents(found: Interval | None) -> str:
    """In %: 71.2 (68.0–74.1)."""
    return DASH if found is None else f"{percent(found.mean)} ({percent(found.low)}–{percent(found.high)})"


def points(found: Paired | None) -> str:
    """A difference in points: +3.1 (−0.5 to +6.7)."""
    return DASH if found is None else f"{signed(found.difference)} ({signed(found.low)} to {signed(found.high)})"


def seed_points(found: Paired | None) -> str:
    """Its t interval over the seeds; one seed has none."""
    return DASH if found is None or math.isinf(found.t_low) else f"{signed(found.t_low)} to {signed(found.t_high)}"


def signed(rate: float) -> str:
    return minus(f"{100 * rate:+z.1f}")


def minus(text: str) -> str:
    return text.replace("-", "−")
