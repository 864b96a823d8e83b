"""The demo on several seeds, summaries trained and not, and the page that shows them: docs/demo.md, .json and .png.

python benchmarks/demo_seeds.py [--seeds 11 12 13 14] [--jobs 2]

Every cell is an ordinary `compactionrl demo` run in its own process, kept in runs/demo-seeds; one that is complete is not run
again. All seeds are reported as they fall.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean
from typing import Any

ROOT = Path(__file__).parents[1]
RUNS = ROOT / "runs" / "demo-seeds"
ARMS = {"trained summaries": [], "untrained summaries": ["--train.summaries", "false"]}
CURVES = {
    "reward": "rollout/reward",
    "held-out x4": "eval/x4/pass_at_1",
    "tokens per summary": "rollout/summary_tokens",
}


def folder(arm: str, seed: int) -> Path:
    return RUNS / f"{arm.split()[0]}-{seed}"


def run(arm: str, seed: int) -> None:
    """One cell; raises CalledProcessError if it fails."""
    where = folder(arm, seed)
    command = [sys.executable, "-m", "compactionrl.cli", "demo", str(ROOT / "recipes" / "demo.toml")]
    options = ["--run.seed", str(seed), "--run.folder", str(where), *ARMS[arm]]
    if not (where / "summary.json").exists():
        print(f"{arm}, seed {seed} ...", flush=True)
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        subprocess.run([*command, *options], check=True, stdout=subprocess.DEVNULL, env=environment)
    print(f"{arm}, seed {seed}: done", flush=True)


def curve(arm: str, seed: int, key: str) -> dict[str, float]:
    """Step -> value, of what the run logged after its value pretraining."""
    lines = (folder(arm, seed) / "metrics.jsonl").read_text().splitlines()
    entries = [json.loads(line) for line in lines]
    return {str(entry["step"]): entry[key] for entry in entries if entry["phase"] != "value" and key in entry}


def cell(arm: str, seed: int) -> dict[str, Any]:
    summary = json.loads((folder(arm, seed) / "summary.json").read_text())
    rates = {
        policy: {
            mode: {k: result[k] for k in ("pass_at_1", "low", "high", "n")} for mode, result in summary[policy].items()
        }
        for policy in ("base", "trained")
    }
    curves = {name: curve(arm, seed, key) for name, key in CURVES.items()}
    return {"arm": arm, "seed": seed, **rates, "minutes": summary["minutes"], "curves": curves}


def page(cells: Sequence[dict[str, Any]]) -> str:
    lines = [
        "# The demo, seed by seed",
        "",
        "Pass@1 in % on held-out tasks, with 95% intervals. Made by `python benchmarks/demo_seeds.py`: each line is an",
        "ordinary run of `compactionrl demo recipes/demo.toml` with that `run.seed`, two runs side by side. The settings were",
        "fixed on other seeds; no seed is left out.",
    ]
    for arm in ARMS:
        mine = [cell for cell in cells if cell["arm"] == arm]
        lines += [
            "",
            f"## {arm[0].upper()}{arm[1:]}",
            "",
            "| seed | policy | x1 | x4 | long | minutes |",
            "|---|---|---|---|---|---|",
        ]
        for entry in mine:
            for policy in ("base", "trained"):
                rates = " | ".join(rate(entry[policy][mode]) for mode in ("x1", "x4", "long"))
                minutes = f"{entry['minutes']:.1f}" if policy == "trained" else ""
                lines.append(f"| {entry['seed']} | {policy} | {rates} | {minutes} |")
        means = [100 * fmean(c["trained"][m]["pass_at_1"] for c in mine) for m in ("x1", "x4", "long")]
        lines.append(
            f"| mean | trained | {means[0]:.1f} | {means[1]:.1f} | {means[2]:.1f} | {fmean(c['minutes'] for c in mine):.1f} |"
        )
        lines += [
            "",
            "Tokens per summary in sampled rollouts, first and last step: " + "; ".join(lengths(c) for c in mine) + ".",
        ]
    return "\n".join([*lines, "", "![Curves of all seeds](demo.png)", ""])


def rate(result: dict[str, Any]) -> str:
    low, value, high = (f"{100 * result[key]:.1f}" for key in ("low", "pass_at_1", "high"))
    return f"{value} ({low} to {high})"


def lengths(entry: dict[str, Any]) -> str:
    values = list(entry["curves"]["tokens per summary"].values())
    return f"seed {entry['seed']}: {values[0]:.2f} and {values[-1]:.2f}"


def plot(cells: Sequence[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(CURVES), figsize=(4.2 * len(CURVES), 3.2), layout="constrained")
    for axis, name in zip(axes, CURVES, strict=True):
        for entry in cells:
            points = entry["curves"][name]
            colour = "tab:green" if entry["arm"] == "trained summaries" else "tab:red"
            label = entry["arm"] if entry["seed"] == cells[0]["seed"] else None
            axis.plot([int(step) for step in points], list(points.values()), color=colour, alpha=0.7, label=label)
        axis.set(title=name, xlabel="step")
    axes[0].legend(frameon=False)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[11, 12, 13, 14])
    parser.add_argument("--jobs", type=int, default=2, help="runs side by side, one thread each")
    arguments = parser.parse_args()
    grid = [(arm, seed) for arm in ARMS for seed in arguments.seeds]
    with ThreadPoolExecutor(arguments.jobs) as pool:
        list(pool.map(lambda pair: run(*pair), grid))
    cells = [cell(arm, seed) for arm, seed in grid]
    (ROOT / "docs" / "demo.json").write_text(json.dumps(cells, indent=1) + "\n")
    (ROOT / "docs" / "demo.md").write_text(page(cells))
    plot(cells, ROOT / "docs" / "demo.png")
    print(page(cells))


if __name__ == "__main__":
    main()
