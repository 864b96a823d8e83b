"""Runs the cells of a study, several side by side, each in its own process; what is finished is never run again."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from compactionrl.config import ConfigError
from compactionrl.study.grid import Cell
from compactionrl.study.progress import Board
from compactionrl.study.results import Results
from compactionrl.training.atomic import write_file

SPEC, RESULT, LOG = "cell.json", "result.json", "log.txt"
CELL = (sys.executable, "-m", "compactionrl.study.cell")
"""The program that runs a cell, given its folder."""
POLL = 0.5
"""Seconds between looks at the running processes."""


@dataclass
class Running:
    """A cell at work. Its stdin is held open by this process alone: should that die, the cell stops too."""

    cell: Cell
    folder: Path
    process: subprocess.Popen[bytes]
    started: float = field(default_factory=time.monotonic)


class Runner:
    """Runs `cells` in `root`/<setting>/<variant>/<seed>, and records them in `results`."""

    def __init__(
        self,
        cells: Sequence[Cell],
        results: Results,
        root: Path,
        jobs: int,
        board: Board,
        program: Sequence[str] = CELL,
    ) -> None:
        self.cells = list(cells)
        self.results = results
        self.root = root.resolve()
        self.jobs = jobs
        self.board = board
        self.program = program
        self.running: dict[str, Running] = {}
        self.failed: dict[str, Path] = {}
        """Cells that broke down, and what they wrote to say why."""

    def run(self) -> bool:
        """Run what is not finished; True when all cells are. A cell that breaks down does not stop the others.

        On KeyboardInterrupt the running cells write a checkpoint, then it is raised again.
        """
        started = time.monotonic()
        now = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
        session: dict[str, Any] = {"started": now, "seconds": 0.0, "jobs": self.jobs, "cells": []}
        try:
            self.adopt(session)
            while self.running or self.next_cell():
                while len(self.running) < self.jobs and (cell := self.next_cell()):
                    self.start(cell)
                self.board.show(self.running.values(), self.pending())
                time.sleep(POLL)
                for running in [one for one in self.running.values() if one.process.poll() is not None]:
                    self.finish(running, session, started)
        finally:
            self.stop()
        return not self.pending()

    def adopt(self, session: dict[str, Any]) -> None:
        """Record what was finished while an earlier sitting was being stopped, or was dead already.

        ConfigError if the folder of a cell holds a run with other settings.
        """
        for cell in self.cells:
            spec = self.root / cell.key / SPEC
            if spec.exists() and json.loads(spec.read_text()).get("fingerprint") != cell.fingerprint:
                raise ConfigError(
                    f"{spec.parent} holds a run with other settings than the present ones: "
                    "take back the change, remove that folder, or choose another --runs"
                )
            if not self.results.finished(cell) and (result := self.left(cell)) is not None:
                self.record(cell, result, session)

    def pending(self) -> list[Cell]:
        return [cell for cell in self.cells if not self.results.finished(cell)]

    def next_cell(self) -> Cell | None:
        """The first cell that can start: what it needs is there, or is run (again) first."""
        return next((found for cell in self.pending() if (found := self.startable(cell))), None)

    def startable(self, cell: Cell) -> Cell | None:
        """`cell`, or what it needs and lacks; None if that is at work, or broke down."""
        if cell.key in self.running or cell.key in self.failed:
            return None
        missing = [need for need in cell.needs if not self.available(need)]
        return self.startable(missing[0]) if missing else cell

    def available(self, cell: Cell) -> bool:
        """Whether the cell is finished and its policy is on this machine."""
        result, policy = self.left(cell), cell.policy_folder(self.root, cell.name)
        return result is not None and self.results.holds(cell, result) and policy.exists()

    def left(self, cell: Cell) -> dict[str, Any] | None:
        """The result that lies in the cell's folder."""
        result = self.root / cell.key / RESULT
        return json.loads(result.read_text()) if result.exists() else None

    def start(self, cell: Cell) -> None:
        folder = self.root / cell.key
        folder.mkdir(parents=True, exist_ok=True)
        spec = {
            "kind": cell.kind,
            "fingerprint": cell.fingerprint,
            "config": cell.config(self.root).model_dump(mode="json"),
            "policies": {need.name: str(need.policy_folder(self.root, need.name)) for need in cell.needs},
        }
        (folder / RESULT).unlink(missing_ok=True)
        write_file(folder / SPEC, lambda path: path.write_text(json.dumps(spec, indent=1)))
        with (folder / LOG).open("ab") as log:
            process = subprocess.Popen(
                [*self.program, str(folder)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"},
                start_new_session=True,  # a Ctrl-C reaches the study alone, which then stops its cells in good order
            )
        self.running[cell.key] = Running(cell, folder, process)
        self.board.started(cell)

    def finish(self, running: Running, session: dict[str, Any], started: float) -> None:
        """Record what a process left."""
        cell, result = running.cell, running.folder / RESULT
        close(self.running.pop(cell.key))
        if running.process.returncode or not result.exists():
            self.failed[cell.key] = running.folder / LOG
            self.board.broke(cell, running.process.returncode, running.folder / LOG)
            return
        session["seconds"] = round(time.monotonic() - started, 1)
        self.record(cell, json.loads(result.read_text()), session)

    def record(self, cell: Cell, result: dict[str, Any], session: dict[str, Any]) -> None:
        session["cells"].append(cell.key)
        self.results.add_session(session)
        self.results.record(cell, result)
        self.board.finished(cell, self.results.ledger["cells"][cell.key])

    def stop(self) -> None:
        """Ask what still runs to write a checkpoint, and wait for it."""
        for running in self.running.values():
            close(running)
        for running in self.running.values():
            running.process.wait()
        self.running.clear()


def close(running: Running) -> None:
    assert running.process.stdin is not None
    running.process.stdin.close()


@contextmanager
def alone(*folders: Path) -> Iterator[None]:
    """Hold the folders for one study at a time."""
    with ExitStack() as locks:
        for folder in {folder.resolve() for folder in folders}:
            folder.mkdir(parents=True, exist_ok=True)
            lock = locks.enter_context((folder / ".lock").open("w"))
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(
                    f"another study is at work in {folder}: wait for it, or choose another --runs and --output"
                ) from None
        yield
