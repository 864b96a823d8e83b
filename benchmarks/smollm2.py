"""A real pretrained model through everything, on one core: docs/smollm2.md and .json. Takes about half an hour.

python benchmarks/smollm2.py [--model models/smollm2] [--runs runs/smollm2]

SmolLM2-135M-Instruct (a folder that `compactionrl fetch-demo-model` writes) on `recipes/smollm2.toml`: evaluated in one
window and in four, then trained for three steps with a critic, all weights and with adapters. Each is an ordinary command
in a process of its own with one thread. Afterwards every sampled token's log-probability is computed again by the trainer's
forward, with the weights of the version that sampled it. Nothing is claimed about learning: three steps teach nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from run import machine

from compactionrl.method import token_logprobs
from compactionrl.models import Transformer, load_policy
from compactionrl.models.lora import merged_state
from compactionrl.rollout.ledger import CONTEXT, Rollout
from compactionrl.training.records import read_rollouts

ROOT = Path(__file__).parents[1]
RECIPE = "recipes/smollm2.toml"
LORA = ["--lora.rank", "16", "--train.policy_lr", "1e-4", "--train.critic_lr", "1e-4"]
LOGBOOK = [
    "--environment.tasks", "compactionrl.environments:LogbookTasks", "--environment.options",
    '{ pages = [2, 3], goods = 1, chatter = 1, calls = "text" }', "--context.budget", "448", "--limits.turns", "6",
]  # fmt: skip
NOTES = [
    "--environment.tasks", "compactionrl.environments:NotesTasks", "--environment.options", "{}",
    "--context.budget", "256", "--context.summary_request", "Which facts have you found? Name them all.",
]  # fmt: skip
RUNS = {
    "eval": ["eval", RECIPE],
    "eval-notes": ["eval", RECIPE, "--limit", "4", *NOTES],
    "eval-logbook": ["eval", RECIPE, "--limit", "4", *LOGBOOK],
    "train": ["train", RECIPE],
    "train-lora": ["train", RECIPE, *LORA],
}
LOGGED = {
    "rollout/reward": "mean reward",
    "rollout/compactions": "compactions a rollout",
    "tokens/trained": "tokens trained",
    "policy/grad_norm": "policy: gradient norm",
    "critic/loss": "critic: loss",
    "critic/grad_norm": "critic: gradient norm",
    "ratio/kl_to_sampler": "KL to the sampler",
    "policy/skipped": "updates skipped",
}
TITLES = {
    "eval": "evaluate: deliveries, 8 tasks, x1 and x4",
    "eval-notes": "evaluate: notes (the demo's), 4 tasks, x1 and x4",
    "eval-logbook": "evaluate: logbook, 4 tasks, x1 and x4",
    "train": "train: all weights, 3 steps",
    "train-lora": "train: adapters of rank 16, 3 steps",
}


def run(name: str, model: Path, runs: Path) -> dict[str, Any]:
    """One command: how long it took, and the most memory that it held. Raises RuntimeError if it fails."""
    folder = runs / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    where = ["--output", str(folder / "eval")] if name.startswith("eval") else ["--run.folder", str(folder / "run")]
    arguments = [*RUNS[name], "--model.path", str(model), *where]
    print(f"{name} ...", file=sys.stderr, flush=True)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    began = time.perf_counter()
    with (folder / "log.txt").open("wb") as log:
        command = [sys.executable, "-m", "compactionrl.cli", *arguments]
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, env=environment)
        _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise RuntimeError(f"{name} failed, see {folder / 'log.txt'}")
    return {
        "command": " ".join(["compactionrl", *(f"'{part}'" if " " in part else part for part in RUNS[name])]),
        "minutes": (time.perf_counter() - began) / 60,
        "cpu_minutes": (usage.ru_utime + usage.ru_stime) / 60,
        "gib": usage.ru_maxrss / (2**20 if sys.platform == "linux" else 2**30),
    }


def evaluated(folder: Path) -> dict[str, Any]:
    results = json.loads((folder / "eval" / "results.json").read_text())["arms"]
    keys = ("n", "reward", "pass_at_1", "compactions", "summary_tokens", "sampled_tokens", "ends", "errors")
    return {"modes": {mode: {key: result[key] for key in keys} for mode, result in results.items()}}


def trained(run: Path, base: Path) -> dict[str, Any]:
    """What the run logged, how far the weights moved, and how far sampler and trainer are apart."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    log = (run.parent / "log.txt").read_text()
    stated = [re.search(rf"{line}\W+([\d.]+ \w+)", log) for line in ("needed", "with the process and .*, at most")]
    policy, begun = (
        merged_state(load_policy(folder)) for folder in (run / "checkpoints" / "step-000003" / "policy", base)
    )
    return {
        "steps": [{key: line[key] for key in LOGGED} for line in lines if line["phase"] == "train"],
        "stated": ", at most ".join(found[1] for found in stated if found),
        "weights_moved": max(float((policy[name] - begun[name]).abs().max()) for name in begun),
        "logprob_difference": max(differences(run, base)),
    }


def differences(run: Path, base: Path) -> Iterator[float]:
    """By batch: the largest |trainer's - recorded log-probability| of a sampled token."""
    for version in range(3):
        stored = run / "checkpoints" / f"step-{version:06}" / "policy"
        policy = load_policy(stored if version else base)
        for rollout in read_rollouts(run / "rollouts" / f"step-{version + 1:06}.parquet"):
            yield difference(policy, rollout, version)


@torch.no_grad()
def difference(policy: Transformer, rollout: Rollout, version: int) -> float:
    found = 0.0
    for window in rollout.windows:
        ids = torch.tensor(window.token_ids)
        sampled = (torch.tensor(window.segment_ids) != CONTEXT).nonzero().squeeze(1)
        if {window.versions[i] for i in sampled.tolist()} - {version}:
            raise RuntimeError(f"{rollout.id} was not sampled from version {version}")
        hidden = policy(ids, [len(ids)])[sampled - 1]
        logprobs, _ = token_logprobs(hidden, policy.head_weight, ids[sampled])
        recorded = torch.tensor([window.logprobs[i] for i in sampled.tolist()])
        found = max(found, float((logprobs - recorded).abs().max()))
    return found


def page(found: dict[str, dict[str, Any]]) -> str:
    """The page in Markdown."""
    lines = [
        "# A real model: SmolLM2-135M-Instruct",
        "",
        f"Measured by `benchmarks/smollm2.py` on {machine()}, one thread. Other work may have run on the machine: CPU minutes",
        "say more than wall time. Memory held is the most that the process had at a time; stated is what the run",
        "needs, and at most holds, by its own words.",
        "",
        "| what | wall minutes | CPU minutes | memory held, GiB | memory stated before |",
        "|---|---|---|---|---|",
    ]
    for name, run in found.items():
        figures = " | ".join(f"{run[key]:.1f}" for key in ("minutes", "cpu_minutes", "gib"))
        lines.append(f"| {TITLES[name]} | {figures} | {run.get('stated', '')} |")
    lines += ["", "The commands, with the model in `models/smollm2`:", "", "```"]
    lines += ["compactionrl fetch-demo-model models/smollm2", *(run["command"] for run in found.values()), "```", ""]
    for name in (name for name in RUNS if name.startswith("eval")):
        lines += [
            "",
            f"## {TITLES[name].capitalize()}",
            "",
            "| mode | mean reward | Pass@1 | compactions | tokens sampled |",
        ]
        lines.append("|---|---|---|---|---|")
        for mode, r in found[name]["modes"].items():
            figures = [r["reward"], r["pass_at_1"], r["compactions"], r["sampled_tokens"]]
            lines.append(f"| {mode} | " + " | ".join(f"{figure:.2f}" for figure in figures) + " |")
    for name in ("train", "train-lora"):
        run = found[name]
        lines += [
            "",
            f"## {TITLES[name].capitalize()}",
            "",
            "| | " + " | ".join(["step 1", "step 2", "step 3"]) + " |",
        ]
        lines.append("|---|---|---|---|")
        for key, title in LOGGED.items():
            lines.append(f"| {title} | " + " | ".join(f"{step[key]:.3g}" for step in run["steps"]) + " |")
        lines += [
            "",
            f"Largest change of a weight: {run['weights_moved']:.1e}. Largest difference between the log-probability that the",
            f"sampler recorded and the trainer's, over all sampled tokens: **{run['logprob_difference']:.1e}**.",
        ]
    return "\n".join([*lines, "", "## How", "", (__doc__ or "").partition("\n\n")[2].partition("\n\n")[2].strip(), ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "smollm2", metavar="FOLDER")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "smollm2", metavar="FOLDER")
    parser.add_argument("--output", type=Path, default=ROOT / "docs", metavar="FOLDER")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, runs = options.model.absolute(), options.runs.absolute()
    # All runs before anything is loaded here: a new process counts the memory of the one that started it as its own peak.
    found = {name: run(name, model, runs) for name in RUNS}
    for name in RUNS:
        found[name] |= evaluated(runs / name) if name.startswith("eval") else trained(runs / name / "run", model)
    (options.output / "smollm2.json").write_text(json.dumps(found, indent=1, allow_nan=False) + "\n")
    (options.output / "smollm2.md").write_text(page(found))


if __name__ == "__main__":
    main()
