"""Asynchronous against synchronous training on the demo's tasks, and the page that shows it: docs/asynchronous.md and .json.

python benchmarks/asynchronous.py [--seeds 11 12 13] [--steps 15] [--jobs 2] [--skip-times]

Quality: every arm trains the demo's recipe on every seed, from one value-pretrained critic per seed, and is measured on held-out
tasks at the end. Times: runs of ten updates without value pretraining, one at a time, on tasks that answer at once and on tasks
that take a while. Every run is an ordinary `compactionrl train` in its own process, with one thread per computation, kept in
runs/asynchronous; one that is complete is not run again. How old each trained token was is read from the rollout files.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from compactionrl.config import load_config
from compactionrl.environments.notes import NotesEnvironment, NotesTasks
from compactionrl.environments.protocol import Observation, Response
from compactionrl.training.run_folder import RunFolder
from compactionrl.training.staleness import recorded_staleness

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "recipes" / "demo.toml"
RUNS = ROOT / "runs" / "asynchronous"
LOSSES: dict[str, dict[str, Any]] = {
    "clip": {"train.policy_loss": "clip"},
    "truncated": {"train.policy_loss": "truncated"},
    "masked": {"train.policy_loss": "masked"},
    "masked-wide": {"train.policy_loss": "masked", "train.clip_low": 0.5, "train.clip_high": 4.0},
}
ARMS = [(0, "clip"), *((staleness, loss) for staleness in (1, 2) for loss in LOSSES)]
TASKS = 512
TIMED_UPDATES = 10
REPEATS = 2
QUALITY_COLUMNS = ("acted on", "KL", "mean age", "max age")
TIME_COLUMNS = ("seconds", "repeats", "against s = 0", "waiting", "update", "overlap", "processor")
TIME_COLUMNS += ("mean age", "max age", "spanning")

Options = Mapping[str, Any]


class SlowNotes(NotesTasks):
    """The demo's tasks, but each step takes 50 to 200 ms, and one in thirty takes 2 s."""

    def environment(self, split: str, index: int) -> NotesEnvironment:
        environment = super().environment(split, index)
        answer, rng = environment.step, random.Random(f"{split}-{index}")

        async def step(response: Response) -> Observation:
            await asyncio.sleep(2.0 if rng.random() < 1 / 30 else rng.uniform(0.05, 0.2))
            return await answer(response)

        environment.step = step  # type: ignore[method-assign]
        return environment


@dataclass(frozen=True)
class Run:
    """One training run; `origin`: whose checkpoints it begins with."""

    name: str
    options: Options
    origin: Run | None = None

    @property
    def folder(self) -> Path:
        return RUNS / self.name

    @property
    def settings(self) -> dict[str, Any]:
        return {**self.options, "run.folder": str(self.folder)}

    @property
    def lines(self) -> list[dict[str, Any]]:
        path = self.folder / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def complete(self) -> bool:
        return any(line["phase"] == "eval" and line["step"] == self.options["train.steps"] for line in self.lines)

    def __call__(self) -> None:
        """Raises CalledProcessError if it fails."""
        if self.complete:
            return
        print(f"{self.name} ...", flush=True)
        if self.origin and not self.folder.exists():
            adopt(self.origin, self)
        resume = ["--resume"] if (self.folder / "config.toml").exists() else []
        options = [f"--{key}={option(value)}" for key, value in self.settings.items()]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        paths = [str(Path(__file__).parent), *filter(None, [environment.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
        command = [sys.executable, "-m", "compactionrl.cli", "train", str(RECIPE), *options, *resume]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
        print(f"{self.name}: done", flush=True)


def option(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def adopt(origin: Run, run: Run) -> None:
    """Give `run` what `origin` has done, under its own configuration."""
    folder = RunFolder(load_config(RECIPE, run.settings), resume=False)
    folder.begin()
    for name in ("checkpoints", "rollouts"):
        shutil.copytree(origin.folder / name, run.folder / name, symlinks=True)
    shutil.copyfile(origin.folder / "metrics.jsonl", run.folder / "metrics.jsonl")


def quality_run(staleness: int, loss: str, seed: int, steps: int) -> Run:
    shared = {"run.seed": seed, "evaluation.every": 0, "evaluation.modes": ["x4"]}
    start = Run(f"pretrained-{seed}", {**shared, "train.steps": 0, "evaluation.tasks": 8})
    own = {"train.steps": steps, "evaluation.tasks": TASKS, "train.staleness": staleness, **LOSSES[loss]}
    return Run(f"quality-{staleness}-{loss}-{seed}", {**shared, **own}, start)


def timed_run(slow: bool, staleness: int, repeat: int) -> Run:
    options: dict[str, Any] = {
        "run.seed": 11,
        "train.steps": TIMED_UPDATES,
        "train.value_pretraining_steps": 0,
        "train.staleness": staleness,
        "evaluation.every": 0,
        "evaluation.modes": ["x4"],
        "evaluation.tasks": 1,
    }
    if slow:
        options["environment.tasks"] = "asynchronous:SlowNotes"
    return Run(f"time-{'slow' if slow else 'instant'}-{staleness}-{repeat}", options)


def ages(run: Run) -> dict[str, float]:
    """Over all updates of a run, from its rollout files: `mean` and `max` age, share of rollouts `spanning` versions."""
    found = [one for name, one in recorded_staleness(run.folder) if name.startswith("step")]
    assert len(found) == run.options["train.steps"]
    return {
        "mean": fmean(one["staleness/mean"] for one in found),
        "max": max(one["staleness/max"] for one in found),
        "spanning": fmean(one["staleness/spanning"] for one in found),
    }


def quality(run: Run) -> dict[str, Any]:
    last = run.lines[-1]
    updates = [line for line in run.lines if line["phase"] == "train"]
    acted_on = f"ratio/{run.options['train.policy_loss']}_fraction"
    return {
        "pass": last["eval/x4/pass_at_1"],
        "low": last["eval/x4/low"],
        "high": last["eval/x4/high"],
        "acted_on": fmean(line[acted_on] for line in updates),
        "kl": fmean(line["ratio/kl_to_sampler"] for line in updates),
        "cpu_minutes": sum(line["time/cpu"] for line in updates) / 60,
        "ages": ages(run),
    }


def times(run: Run) -> dict[str, Any]:
    """Seconds per update: in all, waiting for rollouts, updating, of that with rollouts in flight, and of the processor."""
    updates = [line for line in run.lines if line["phase"] == "train"]
    names = ("total", "collect", "update", "overlap", "cpu")
    return {name: fmean(line[f"time/{name}"] for line in updates) for name in names} | {"ages": ages(run)}


def page(found: Mapping[str, Any]) -> str:
    lines = [
        "# Asynchronous training",
        "",
        "With `train.staleness` s, rollouts run ahead of the updates, by at most s policy versions. Made by",
        "`benchmarks/asynchronous.py` from runs of `recipes/demo.toml`; all that ran is shown. In each row of tokens' ages,",
        "the figures are read from the versions in the rollout files: no trained token is older than s.",
        "",
        "## Quality",
        "",
        f"Pass@1 in % on {TASKS} held-out tasks in x4 after {found['steps']} updates, per seed and mean. All arms of a seed",
        "begin with the same value-pretrained critic. `acted on`: share of tokens that the loss clips, truncates or masks;",
        "`KL`: nats per token between the policy that is trained and those that sampled; `age`: policy versions.",
        "",
        *head(["s", "policy loss"], [*(f"seed {seed}" for seed in found["seeds"]), "mean", *QUALITY_COLUMNS]),
    ]
    for arm in found["quality"]:
        cells = arm["cells"]
        rates = [100 * cell["pass"] for cell in cells]
        columns = [
            *(f"{rate:.1f}" for rate in rates),
            f"**{fmean(rates):.1f}**",
            f"{fmean(c['acted_on'] for c in cells):.1%}",
            f"{fmean(c['kl'] for c in cells):.4f}",
            f"{fmean(c['ages']['mean'] for c in cells):.2f}",
            f"{max(c['ages']['max'] for c in cells):.0f}",
        ]
        lines.append(f"| {arm['staleness']} | {arm['loss']} | {' | '.join(columns)} |")
    widths = [100 * (cell["high"] - cell["low"]) / 2 for arm in found["quality"] for cell in arm["cells"]]
    lines += ["", f"A single figure's 95% interval is about ±{fmean(widths):.1f} from the choice of tasks alone."]
    if found["times"]:
        lines += time_table(found["times"])
    return "\n".join([*lines, ""])


def head(names: Sequence[str], numbers: Sequence[str]) -> list[str]:
    """The first two lines of a table: columns of names, then columns of numbers."""
    return [f"| {' | '.join([*names, *numbers])} |", f"|{'---|' * len(names)}{'---:|' * len(numbers)}"]


def time_table(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = [
        "",
        "## Wall time",
        "",
        f"Seconds per update, means over runs of {TIMED_UPDATES} updates, beginning and end included, each run repeated;",
        f"{os.cpu_count()} cores, one thread each for the update and for the event loop with the sampler. `waiting`: for",
        "rollouts; `overlap`: of the update, with rollouts in flight. `slow`: an environment in which a step takes 50 to",
        "200 ms, and one in thirty 2 s; `spanning`: rollouts with tokens of more than one version. Where an instant",
        "environment and s = 0 take more seconds than `processor`, the machine had other work, too.",
        "",
        *head(["environment", "s"], TIME_COLUMNS),
    ]
    for cell in cells:
        runs = cell["runs"]
        base = next(c for c in cells if c["environment"] == cell["environment"] and c["staleness"] == 0)
        mean = {name: fmean(run[name] for run in runs) for name in ("total", "collect", "update", "overlap", "cpu")}
        speed = fmean(run["total"] for run in base["runs"]) / mean["total"]
        columns = [
            f"**{mean['total']:.1f}**",
            ", ".join(f"{run['total']:.1f}" for run in runs),
            f"{speed:.2f}x",
            *(f"{mean[name]:.1f}" for name in ("collect", "update", "overlap", "cpu")),
            f"{fmean(run['ages']['mean'] for run in runs):.2f}",
            f"{max(run['ages']['max'] for run in runs):.0f}",
            f"{fmean(run['ages']['spanning'] for run in runs):.0%}",
        ]
        lines.append(f"| {cell['environment']} | {cell['staleness']} | {' | '.join(columns)} |")
    return lines


def measure(seeds: Sequence[int], steps: int, jobs: int, *, timed: bool) -> dict[str, Any]:
    grid = {arm: [quality_run(*arm, seed, steps) for seed in seeds] for arm in ARMS}
    runs = [run for cells in grid.values() for run in cells]
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(lambda run: run(), {run.name: run for run in (r.origin for r in runs) if run}.values()))
        list(pool.map(lambda run: run(), runs))
    clock = {(slow, s): [timed_run(slow, s, i) for i in range(REPEATS)] for slow in (False, True) for s in (0, 1, 2)}
    if timed:
        for repeat in range(REPEATS):
            for cells in clock.values():
                cells[repeat]()
    return {
        "steps": steps,
        "seeds": list(seeds),
        "quality": [
            {"staleness": s, "loss": loss, "cells": [quality(run) for run in cells]}
            for (s, loss), cells in grid.items()
        ],
        "times": [
            {"environment": "slow" if slow else "instant", "staleness": s, "runs": [times(run) for run in cells]}
            for (slow, s), cells in clock.items()
        ]
        if timed
        else [],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[11, 12, 13])
    parser.add_argument("--steps", type=int, default=15, help="updates of the runs that are compared for quality")
    parser.add_argument("--jobs", type=int, default=2, help="of these, runs side by side")
    parser.add_argument("--skip-times", action="store_true")
    parser.add_argument("--output", type=Path, default=ROOT / "docs", metavar="FOLDER")
    arguments = parser.parse_args()
    found = measure(arguments.seeds, arguments.steps, arguments.jobs, timed=not arguments.skip_times)
    (arguments.output / "asynchronous.json").write_text(json.dumps(found, indent=1, allow_nan=False) + "\n")
    (arguments.output / "asynchronous.md").write_text(page(found))
    print(page(found))


if __name__ == "__main__":
    main()
