"""Markdown tables and the figures in them. What is missing is a dash."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

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


def signed(rate: float) -> str:
    return minus(f"{100 * rate:+z.1f}")


def minus(text: str) -> str:
    return text.replace("-", "−")
