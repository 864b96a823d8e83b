"""What a running study shows: a live table on a terminal, a line per finished cell elsewhere."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from compactionrl.study.grid import Cell

if TYPE_CHECKING:
    from compactionrl.study.runner import Running


class Board:
    """Use as a context manager."""

    def __init__(self, cells: int, finished: int, console: Console) -> None:
        self.cells, self.already = cells, finished
        self.console = console
        self.live = Live(console=console, refresh_per_second=2, transient=True) if console.is_terminal else None
        self.began = time.monotonic()

    def __enter__(self) -> Self:
        if self.live:
            self.live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self.live:
            self.live.stop()

    def show(self, running: Iterable[Running], pending: Sequence[Cell]) -> None:
        if self.live:
            self.live.update(self.table(list(running), len(pending)))

    def table(self, running: Sequence[Running], pending: int) -> Table:
        done = self.cells - pending
        table = Table(title=f"{done} of {self.cells} cells finished{self.rest(pending)}", title_justify="left")
        for name in ("cell", "at", "reward", "minutes"):
            table.add_column(name, justify="left" if name == "cell" else "right")
        for one in running:
            at, reward = standing(one.folder)
            table.add_row(escape(one.cell.key), at, reward, f"{(time.monotonic() - one.started) / 60:.1f}")
        return table

    def rest(self, pending: int) -> str:
        """How long what is left may take, from what this sitting has finished."""
        done = self.cells - pending - self.already
        minutes = (time.monotonic() - self.began) / 60
        return f", about {minutes / done * pending:.0f} minutes left" if done >= 2 else ""

    def started(self, cell: Cell) -> None:
        if not self.live:
            self.say(f"{cell.key}: started")

    def finished(self, cell: Cell, entry: dict[str, Any]) -> None:
        rates = ", ".join(f"{mode} {rate(found['outcomes'])}" for mode, found in entry["evaluation"].items())
        self.say(f"{cell.key}: {rates}  ({entry['seconds']['cpu'] / 60:.1f} CPU minutes)")

    def broke(self, cell: Cell, code: int, log: Path) -> None:
        self.say(f"{cell.key}: broke down with exit code {code}; {log} says why")

    def say(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)


def standing(folder: Path) -> tuple[str, str]:
    """Where a run is and its latest reward, from the end of its metrics."""
    try:
        with (folder / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - 16384))
            lines = file.read().splitlines()
    except OSError:
        return "", ""
    for text in reversed(lines):
        try:
            line = json.loads(text)
        except ValueError:  # the first line may be cut off by the seek, the last one may be half written
            continue
        reward = line.get("rollout/reward", line.get("pretraining/rollout/reward"))
        return f"{line['phase']} {line['step']}", "" if reward is None else f"{reward:.2f}"
    return "", ""


def rate(outcomes: str) -> str:
    solved, n = outcomes.count("1"), len(outcomes) - outcomes.count("-")
    return f"{100 * solved / n:.1f}%" if n else "–"
