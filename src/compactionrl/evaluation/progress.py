"""What an evaluation shows while it runs: a bar for each arm on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from compactionrl.evaluation.evaluate import Evaluation
from compactionrl.rollout.ledger import Rollout

EVERY = 10.0
"""Seconds between two lines, where there is no terminal."""


class EvaluationProgress:
    """Shows how far each arm of an evaluation is; on stderr, unless another console is given."""

    def __init__(
        self,
        evaluation: Evaluation,
        *,
        label: str = "",
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.evaluation, self.label, self.clock = evaluation, f"{label} ".lstrip(), clock
        self.console = console or Console(stderr=True)
        self.begun = self.said = clock()
        self.pending = len(evaluation.pending)
        self.ended = self.sampled = 0
        self.bars: dict[str, TaskID] = {}
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[state]}"), TimeRemainingColumn())
        self.live = Progress(TextColumn("{task.description}", markup=False), *columns, console=self.console)

    def __enter__(self) -> Self:
        if self.console.is_terminal and self.pending:
            for arm in self.evaluation.arms:
                total = self.evaluation.n_tasks * self.evaluation.runs
                self.bars[arm.name] = self.live.add_task(f"{self.label}{arm.name}", total=total, state="")
            self.live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self.bars:
            self.live.stop()

    def ended_one(self, rollout: Rollout) -> None:
        """A rollout has ended, well or not, and is counted in the evaluation."""
        self.ended += 1
        self.sampled += rollout.token_counts()["sampled"]
        for name, bar in self.bars.items():
            tally = self.evaluation.tallies[name]
            self.live.update(bar, completed=tally.ended, state=f"{tally.state}, {self.rate:,.0f} tokens/s in all")
        if not self.bars and (self.ended == self.pending or self.clock() - self.said >= EVERY):
            self.said = self.clock()
            self.console.print(self.line(), highlight=False, markup=False, soft_wrap=True)

    @property
    def rate(self) -> float:
        """Tokens sampled per second by rollouts that have ended."""
        return self.sampled / max(self.clock() - self.begun, 1e-3)

    def line(self) -> str:
        total = self.evaluation.n_tasks * self.evaluation.runs
        arms = (f"{name} {tally.ended}/{total} ({tally.state})" for name, tally in self.evaluation.tallies.items())
        seconds = round((self.pending - self.ended) * (self.clock() - self.begun) / self.ended)
        left = f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02} left"
        return f"{self.label}{', '.join(arms)}; {self.rate:,.0f} tokens/s, {left}"
