"""The whole method in one command: measure the base, train it, measure what came out, and show both."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from compactionrl.config import Config
from compactionrl.evaluation.report import behaviour_table, curves, pass_table, read_metrics
from compactionrl.measure import measure
from compactionrl.training.atomic import write_file
from compactionrl.training.trainer import Trainer

SUMMARY, CURVES = "summary.json", "curves.png"
PANELS = {
    "reward per rollout": {"train": "rollout/reward"},
    "held-out Pass@1": {mode: f"eval/{mode}/pass_at_1" for mode in ("x1", "x4", "long")},
    "tokens per summary": {"train": "rollout/summary_tokens"},
}


def demo(config: Config, console: Console) -> bool:
    """Write `summary.json` and `curves.png` into the run folder and print the tables; False if a signal stopped it.

    The trained policy is the last one, not the best one: nothing is chosen on the tasks that it is measured on. A run that
    was stopped is gone on with; one that is complete is only shown.
    """
    folder = Path(config.run.folder)
    resumed = (folder / "config.toml").exists()
    started = time.perf_counter()
    trainer = Trainer(config, resume=resumed, console=console)
    if trainer.finished and (folder / SUMMARY).exists():
        console.print(
            f"{folder} holds this run, complete; remove it or choose another run.folder to train anew", markup=False
        )
    else:
        options: dict[str, Any] = {"modes": config.evaluation.modes, "n_tasks": config.evaluation.final_tasks}
        base = measure(config, trainer.base, label="base", **options)
        console.print(pass_table({"base": base}))
        if not trainer.run():
            return False
        trained = measure(config, trainer.checkpoints.folder / trainer.state.name, label="trained", **options)
        minutes = (time.perf_counter() - started) / 60
        summary = {"base": base, "trained": trained, "minutes": round(minutes, 2), "resumed": resumed}
        text = json.dumps(summary, indent=1, allow_nan=False) + "\n"
        write_file(folder / SUMMARY, lambda path: path.write_text(text))
        curves(read_metrics(trainer.log.path), PANELS, folder / CURVES)
    report(folder, console)
    return True


def report(folder: Path, console: Console) -> None:
    summary = json.loads((folder / SUMMARY).read_text())
    policies = {name: summary[name] for name in ("base", "trained")}
    console.print(pass_table(policies))
    console.print(behaviour_table(policies))
    console.print(f"{summary['minutes']} minutes; {folder / SUMMARY}, {folder / CURVES}", markup=False)
