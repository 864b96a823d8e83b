"""The page that the benchmark of sandboxes fills."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("sandbox_benchmark", ROOT / "benchmarks" / "sandbox.py")
assert spec is not None
assert spec.loader is not None
benchmark = importlib.util.module_from_spec(spec)
spec.loader.exec_module(benchmark)


def test_only_what_is_between_the_marks_changes() -> None:
    page = (ROOT / "docs" / "sandboxes.md").read_text()
    begin, end = "<!-- times: written by benchmarks/sandbox.py -->", "<!-- end of times -->"
    filled = benchmark.fill(page, "times", "new")
    assert filled == f"{page.split(begin)[0]}{begin}\nnew\n{end}{page.split(end)[1]}"
    assert benchmark.fill(filled, "times", "new") == filled


def test_an_escape_is_counted_and_shown() -> None:
    def row(held: bool) -> dict[str, object]:
        return {"group": "g", "attempt": "a", "outcome": "x | y", "held": held, "seconds": 1.0}

    report = {"changed": ["/etc/passwd"], "leaked": [], "megabytes": 3}
    table = benchmark.attempts_table(
        {"root": {**report, "rows": [row(True), row(False)]}, "other": {**report, "rows": [row(True), row(True)]}}
    )
    assert "As root: 2 attempts, 1 held, 1 escapes; 1 things changed" in table
    assert "| g | a | **not held**: x \\| y | x \\| y |" in table


def test_users_must_have_tried_the_same() -> None:
    report = {"changed": [], "leaked": [], "megabytes": 3}
    row = {"group": "g", "attempt": "a", "outcome": "", "held": True, "seconds": 1.0}
    with pytest.raises(ValueError, match="shorter"):
        benchmark.attempts_table({"root": {**report, "rows": [row, row]}, "other": {**report, "rows": [row]}})
