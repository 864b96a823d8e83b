"""The whole study in one call: run what is missing of the grid, then write the report."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console

from compactionrl.study.grid import check, grid, load_setting
from compactionrl.study.progress import Board
from compactionrl.study.report import write_report
from compactionrl.study.results import Results
from compactionrl.study.runner import Runner, alone

LEDGER = "study.json"


def study(
    names: Sequence[str],
    overrides: Mapping[str, Any],
    *,
    seeds: int,
    extra: bool,
    quick: bool,
    jobs: int,
    output: Path,
    runs: Path,
    console: Console,
) -> bool:
    """True when every cell is finished and reported; False if some broke down, or a signal stopped it.

    `output` receives study.json and the report, `runs` the training runs. ConfigError before anything is run if a cell
    cannot work, or if `output` holds results of other settings.
    """
    settings = [load_setting(name, overrides, quick=quick) for name in dict.fromkeys(names)]
    cells = grid(settings, seeds, extra=extra)
    check(cells)
    with alone(runs, output):
        results = Results(output / LEDGER, settings, cells)
        done = sum(results.finished(cell) for cell in cells)
        console.print(f"{len(cells)} cells, {done} finished before, {jobs} side by side", highlight=False)
        board = Board(len(cells), done, console)
        runner = Runner(cells, results, runs, jobs, board)
        complete = False
        try:
            with signals_interrupt(), board:
                complete = runner.run()
        except KeyboardInterrupt:
            board.say("stopped: every cell has a checkpoint; the same command goes on")
        for key, log in runner.failed.items():
            board.say(f"not finished: {key}; see {log}")
        results.save()
        for path in write_report(results.ledger, output):
            board.say(f"wrote {path}")
    return complete


@contextmanager
def signals_interrupt() -> Iterator[None]:
    """SIGTERM stops as Ctrl-C does."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
