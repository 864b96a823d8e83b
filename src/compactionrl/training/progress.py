"""What a run shows while it runs: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections import deque
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

SHOWN = 12
"""Batches in the live table."""
COLUMNS = {
    "reward": ("rollout/reward", "{:.3f}"),
    "Pass@1": ("rollout/pass_at_1", "{:.1%}"),
    "compactions": ("rollout/compactions", "{:.2f}"),
    "summary tokens": ("rollout/summary_tokens", "{:.1f}"),
    "entropy": ("policy/entropy", "{:.3f}"),
    "tokens/s": ("speed/tokens_per_second", "{:,.0f}"),
}


class Progress:
    """Shows batches, evaluations and messages of a run of `batches` batches, of which `done` are done."""

    def __init__(self, batches: int, done: int = 0, console: Console | None = None) -> None:
        self.console = console or Console()
        self.left = batches - done
        self.rows: deque[list[str]] = deque(maxlen=SHOWN)
        self.durations: deque[float] = deque(maxlen=10)
        self.status = ""
        self.finished = 0
        self.total = 0
        self.started = time.monotonic()
        self.live = Live(console=self.console, get_renderable=self.render, refresh_per_second=4, transient=True)

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self.live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.live.stop()

    def begin(self, status: str, total: int) -> None:
        """Something of `total` rollouts begins."""
        self.status, self.finished, self.total = status, 0, total
        self.started = time.monotonic()

    def rollout(self, rollout: object) -> None:
        """One more rollout has finished."""
        self.finished += 1

    def reached(self, finished: int) -> None:
        """So many rollouts have finished."""
        self.finished = finished

    def batch(self, name: str, metrics: dict[str, float]) -> None:
        """A batch is done: a row of the table, or a line."""
        self.left -= 1
        self.durations.append(time.monotonic() - self.started)
        cells = [form.format(metrics[key]) if key in metrics else "–" for key, form in COLUMNS.values()]
        self.rows.append([name, *cells])
        if not self.console.is_terminal:
            described = ", ".join(f"{title} {cell}" for title, cell in zip(COLUMNS, cells, strict=True))
            self.say(f"{name}: {described}, {self.time_left()} left")

    def evaluation(self, step: int, results: dict[str, dict[str, Any]]) -> None:
        rates = ((mode, result["pass_at_1"]) for mode, result in results.items())
        self.say(
            f"held-out after {step} steps: " + ", ".join(f"{m} {'–' if r is None else f'{r:.1%}'}" for m, r in rates)
        )

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def time_left(self) -> str:
        if not self.durations:
            return "?"
        seconds = round(self.left * sum(self.durations) / len(self.durations))
        return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"

    def render(self) -> Group:
        table = Table("batch", *COLUMNS, box=None)
        for row in self.rows:
            table.add_row(*row)
        progress = f"{self.finished}/{self.total} rollouts" if self.finished < self.total else "updating"
        return Group(table, Text(f"{self.status}: {progress}, {self.time_left()} left"))
