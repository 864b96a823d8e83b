"""One cell, in a process of its own: `python -m compactionrl.study.cell FOLDER`.

FOLDER/cell.json says what to run; FOLDER/result.json is there when it is done, complete. Whoever starts the process holds
its stdin open: when that ends, however the parent died, the run is stopped as by a signal, with a checkpoint.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console

from compactionrl import build
from compactionrl.base import make_base
from compactionrl.config import Config, parse_config
from compactionrl.evaluation.evaluate import evaluate
from compactionrl.evaluation.report import read_metrics
from compactionrl.measure import measure, open_policy
from compactionrl.samplers.protocol import Sampler
from compactionrl.study.runner import RESULT, SPEC
from compactionrl.training.atomic import MANIFEST, describe, write_file
from compactionrl.training.trainer import Trainer

Result = dict[str, Any]
STOPPED = 130
"""Exit code of a cell that was asked to stop; it goes on where it was when it is started again."""
LATEST = 10
"""Updates at the end over which the critic's figures are averaged: single batches are noisy."""

CURVES = {
    "reward": "rollout/reward",
    "summary_tokens": "rollout/summary_tokens",
    "response_tokens": "rollout/response_tokens",
    "compactions": "rollout/compactions",
    "tool_calls": "rollout/tool_calls",
    "compacted_pass": "rollout/compacted/pass_at_1",
    "entropy": "policy/entropy",
    "policy_kl": "ratio/kl_to_sampler",
    "summary_share": "credit/summary_share",
    "factor_summary": "factor/summary_mean",
    "factor_execution": "factor/execution_mean",
    "explained_variance": "explained_variance/all",
}
KEPT = ("compactions", "tool_calls", "turns", "summary_tokens", "response_tokens", "budget_exhausted", "errors")


def run_cell(folder: Path) -> Result:
    spec = json.loads((folder / SPEC).read_text())
    config = parse_config(spec["config"])
    policies = {name: Path(path) for name, path in spec["policies"].items()}
    base = policies.get("base", folder / "base")
    kinds = {
        "base": lambda: run_base(config, base),
        "train": lambda: run_training(config, folder),
        "swap": lambda: run_swap(config, policies),
        "perfect": lambda: run_perfect(config, base),
    }
    result = kinds[spec["kind"]]()
    return {"base": describe(base / "model.safetensors")["sha256"], **result}


def run_base(config: Config, base: Path) -> Result:
    """Warm-start a base and measure it."""
    with stopwatch() as seconds:
        if not (base / MANIFEST).exists():
            make_base(config, base)
        settings = config.evaluation
        results = measure(config, base, modes=settings.modes, n_tasks=settings.final_tasks)
    return {"evaluation": {mode: compress(result) for mode, result in results.items()}, "seconds": seconds}


def run_training(config: Config, folder: Path) -> Result:
    """Train, or go on with it; the evaluation behind the last update is the result."""
    measured = folder / "evaluation.json"

    async def evaluate_and_keep(*arguments: Any, **options: Any) -> dict[str, dict[str, Any]]:
        with stopwatch() as seconds:
            results = await evaluate(*arguments, **options)
        text = json.dumps({"results": results, "seconds": seconds})
        write_file(measured, lambda path: path.write_text(text))
        return results

    resumed = (folder / "config.toml").exists()
    trainer = Trainer(config, resume=resumed, evaluate=evaluate_and_keep, console=Console(stderr=True))
    if not trainer.run():
        raise SystemExit(STOPPED)
    last = json.loads(measured.read_text())
    metrics = read_metrics(trainer.log.path)
    updates = [line for line in metrics if line["phase"] == "train"]
    return {
        "evaluation": {mode: compress(result) for mode, result in last["results"].items()},
        "curves": {name: [rounded(line.get(key)) for line in updates] for name, key in CURVES.items()},
        "explained_variance": explained_variance(updates[-LATEST:]),
        "tokens": {
            "sampled": total(updates, "tokens/sampled"),
            "trained": total(updates, "tokens/trained"),
            "rollouts": config.train.rollouts_per_step * len(updates),
        },
        "seconds": {
            kind: round(last["seconds"][kind] + training_seconds(metrics, kind), 1) for kind in ("wall", "cpu")
        },
    }


def run_swap(config: Config, policies: Mapping[str, Path]) -> Result:
    """The same executing policy with other summarisers (the paper's Table 1), in the compacting mode."""
    mode = f"x{config.context.max_compactions + 1}"
    tasks = build.build_tasks(config)
    found = {}
    with stopwatch() as seconds:
        for executor in ("base", "full"):
            chat, sampler = open_policy(config, policies[executor])
            summarisers: dict[str, Sampler] = {name: open_policy(config, path)[1] for name, path in policies.items()}
            for name, forget in (("perfect", 0.0), ("empty", 1.0)):
                summarisers[name] = scripted(config, tasks, chat.tokenizer.base, forget)
            for name, summariser in summarisers.items():
                work = evaluate(
                    tasks,
                    sampler,
                    chat,
                    config,
                    modes=[mode],
                    n_tasks=config.evaluation.final_tasks,
                    seed=config.evaluation.seed,
                    summariser=summariser,
                )
                found[f"{executor}/{name}"] = compress(asyncio.run(work)[mode])
    return {"evaluation": found, "seconds": seconds}


def run_perfect(config: Config, base: Path) -> Result:
    """A scripted player that forgets nothing, in every mode. `base` lends its tokenizer alone."""
    tasks, chat = build.build_tasks(config), build.build_chat(config, base)
    settings = config.evaluation
    with stopwatch() as seconds:
        work = evaluate(
            tasks,
            scripted(config, tasks, chat.tokenizer.base, 0.0),
            chat,
            config,
            modes=settings.modes,
            n_tasks=settings.final_tasks,
            seed=settings.seed,
        )
        results = asyncio.run(work)
    return {"evaluation": {mode: compress(result) for mode, result in results.items()}, "seconds": seconds}


def scripted(config: Config, tasks: Any, tokenizer: Any, forget: float) -> Sampler:
    """The demonstrator as a summariser: forget = 0 writes down every fact in view, 1 none."""
    requests = (config.context.summary_request, config.context.retry_request)
    options = {"forget": forget, "seed": 0, "summary_requests": requests}
    path = config.warm_start.demonstrator
    return build.create("warm_start.demonstrator", path, "warm_start", options, tasks, tokenizer)


def compress(result: Mapping[str, Any]) -> Result:
    """What the report needs of an evaluation."""
    compacted = {key: result["compacted"][key] for key in ("n", "pass_at_1")}
    return {"outcomes": result["outcomes"], **{key: rounded(result[key]) for key in KEPT}, "compacted": compacted}


def explained_variance(lines: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """By segment index, mean over the given updates."""
    prefix = "explained_variance/segment_"
    keys = sorted({key for line in lines for key in line if key.startswith(prefix)})
    return {
        key.partition("/")[2]: round(fmean(line[key] for line in lines if line.get(key) is not None), 4) for key in keys
    }


def training_seconds(metrics: Sequence[Mapping[str, Any]], kind: str) -> float:
    """Of all batches, those of value pretraining too."""
    key = {"wall": "time/total", "cpu": "time/cpu"}[kind]
    return sum(line.get(key, line.get(f"pretraining/{key}", 0.0)) for line in metrics)


def total(lines: Sequence[Mapping[str, Any]], key: str) -> int:
    return round(sum(line[key] for line in lines))


def rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


@contextmanager
def stopwatch() -> Iterator[dict[str, float]]:
    """Seconds by the clock and of this process, filled in at the end."""
    wall, cpu = time.perf_counter(), time.process_time()
    seconds: dict[str, float] = {}
    yield seconds
    seconds |= {"wall": round(time.perf_counter() - wall, 1), "cpu": round(time.process_time() - cpu, 1)}


def stop_with_parent() -> None:
    """Ask this process to stop as soon as its stdin ends."""

    def watch() -> None:
        while os.read(0, 1024):  # not sys.stdin, whose lock a thread must not hold when the interpreter ends
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    folder = Path(sys.argv[1])
    stop_with_parent()
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until a run that an earlier, killed study has left here has stopped
        text = json.dumps(run_cell(folder), allow_nan=False)
        write_file(folder / RESULT, lambda path: path.write_text(text))


if __name__ == "__main__":
    main()
