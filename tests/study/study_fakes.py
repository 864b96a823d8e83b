"""A tiny setting, and studies of it whose cells are run by `fake_cell.py`."""

from __future__ import annotations

import fcntl
import json
import sys
import time
from collections.abc import Callable, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

from rich.console import Console

from compactionrl.study.grid import Cell, Setting, load_setting
from compactionrl.study.progress import Board
from compactionrl.study.results import Results
from compactionrl.study.runner import Runner

HERE = Path(__file__).parent
TINY = HERE / "tiny.toml"


def tiny(quick: bool = False, **overrides: Any) -> Setting:
    """The setting in tiny.toml; train__steps=1 changes a key."""
    return load_setting(str(TINY), {key.replace("__", "."): value for key, value in overrides.items()}, quick=quick)


class Study:
    """A study in `folder` with the fake program."""

    def __init__(self, folder: Path, cells: Sequence[Cell], *, keep_plan: bool = False) -> None:
        self.folder = folder
        self.cells = list(cells)
        self.ledger = folder / "out" / "study.json"
        self.runs = folder / "runs"
        self.output = StringIO()
        folder.mkdir(exist_ok=True)
        if not keep_plan:
            self.plan()

    def plan(self, **plan: dict[str, Any]) -> None:
        """What becomes of which cell, by its key; see fake_cell.py."""
        (self.folder / "plan.json").write_text(json.dumps(plan))

    def runner(self, jobs: int = 2) -> Runner:
        """As after a new start: the ledger is read from disk."""
        settings = list({cell.setting.name: cell.setting for cell in self.cells}.values())
        results = Results(self.ledger, settings, self.cells)
        done = sum(results.finished(cell) for cell in self.cells)
        board = Board(len(self.cells), done, Console(file=self.output, width=300))
        program = (sys.executable, "-I", "-S", str(HERE / "fake_cell.py"), str(self.folder))
        return Runner(self.cells, results, self.runs, jobs, board, program)

    def run(self, jobs: int = 2) -> bool:
        return self.runner(jobs).run()

    @property
    def said(self) -> str:
        return self.output.getvalue()

    def events(self, key: str = "") -> list[str]:
        """What happened, in order: "start tiny/base/1"; or to one cell: "start"."""
        path = self.folder / "events"
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        if key:
            return [line["event"] for line in lines if line["key"] == key]
        return [f"{line['event']} {line['key']}" for line in lines]

    def recorded(self) -> dict[str, Any]:
        """The ledger's cells on disk."""
        return json.loads(self.ledger.read_text())["cells"] if self.ledger.exists() else {}

    def without_time(self) -> dict[str, Any]:
        return {key: {k: v for k, v in cell.items() if k != "seconds"} for key, cell in self.recorded().items()}


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 200
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def nobody_works(runs: Path) -> bool:
    """Whether no process holds a cell's folder."""
    for path in runs.glob("*/*/*/lock"):
        with path.open("r+") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
    return True
