"""Which instances there are: eight kinds, three grades, and for each of them training and held-out instances without end."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from compactionrl.environments.logbook import SPLITS, Draws
from compactionrl.terminal_tasks.kinds import (
    config_archaeology,
    data_repair,
    log_forensics,
    pipeline_repair,
    refactoring,
    sealed_letters,
    stock_ledger,
    witnesses,
)
from compactionrl.terminal_tasks.task import GRADES, Draft, TerminalTask

KINDS: dict[str, Callable[[str, Draws], Draft]] = {
    "config-archaeology": config_archaeology.make,
    "data-repair": data_repair.make,
    "log-forensics": log_forensics.make,
    "pipeline-repair": pipeline_repair.make,
    "refactoring": refactoring.make,
    "sealed-letters": sealed_letters.make,
    "stock-ledger": stock_ledger.make,
    "witnesses": witnesses.make,
}


def make_task(kind: str, grade: str, split: str, seed: int) -> TerminalTask:
    """One instance. The random stream is that of its whole name, so no two splits ever share one.

    Raises ValueError for a kind, grade or split that there is not, or a negative seed.
    """
    for value, choices in ((kind, KINDS), (grade, GRADES), (split, SPLITS)):
        if value not in choices:
            raise ValueError(f"There is no {value!r}: choose one of {', '.join(choices)}.")
    if seed < 0:
        raise ValueError(f"seed must be 0 or more, not {seed}.")
    draft = KINDS[kind](grade, Draws(f"terminal/{split}/{seed}/{kind}/{grade}"))
    return TerminalTask(kind, grade, split, seed, draft)


def instances(
    split: str = "heldout", grades: Sequence[str] = GRADES, count: int = 1, seed: int = 0
) -> Iterator[TerminalTask]:
    """`count` instances of every kind in each of the grades, with seeds `seed`, `seed` + 1, ...

    By default the 24 canonical ones: every kind in every grade, held-out, seed 0.
    """
    for number in range(seed, seed + count):
        for kind in KINDS:
            for grade in grades:
                yield make_task(kind, grade, split, number)


def write_tasks(parent: Path, tasks: Iterable[TerminalTask]) -> list[Path]:
    """Write each below `parent`; the folders.

    Raises FileExistsError if a folder is there already, ValueError for an instance that is there under another name: the
    same content in two splits would be a task that is trained on and measured.
    """
    there = {tomllib.loads(file.read_text())["metadata"]["content_hash"]: file for file in parent.glob("*/task.toml")}
    written = []
    for task in tasks:
        if task.content_hash() in there and there[task.content_hash()].parent.name != task.name:
            raise ValueError(f"{task.name} is the same task as {there[task.content_hash()].parent}")
        written.append(task.write(parent))
        there[task.content_hash()] = written[-1] / "task.toml"
    return written
