"""Every benchmark, one after the other, and the page that shows them: docs/benchmarks.md and .json. Takes some fifteen minutes.

python benchmarks/run.py [--output docs]

Each script runs in a process of its own with one thread. Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
SCRIPTS = ("update", "sampler", "generic", "turn_overhead", "estimator", "logprob_memory")
FIGURES = {
    "update_vs_row_per_segment": "Update, a row per segment / ours: seconds",
    "update_vs_padded": "Update, padded rows / ours: seconds, lengths uniform in 64..512",
    "update_vs_padded_sorted": "Update, padded rows sorted by length / ours: seconds, the same lengths",
    "update_vs_padded_demo": "Update, padded rows / ours: seconds, rollouts of the demo",
    "sampler_vs_bare_loop_1": "Sampling, ours / bare decode loop: seconds, 1 row",
    "sampler_vs_bare_loop_16": "Sampling, ours / bare decode loop: seconds, 16 rows",
    "sampler_vs_bare_loop_64": "Sampling, ours / bare decode loop: seconds, 64 rows",
    "generic_sample_1": "Sampling, ours / transformers: tokens a second, 1 row",
    "generic_sample_16": "Sampling, ours / transformers: tokens a second, 16 rows",
    "generic_sample_64": "Sampling, ours / transformers: tokens a second, 64 rows",
    "generic_update": "Forward and backward, ours / transformers: tokens a second",
    "turn_overhead_turn_1": "Our Python per turn, 1 rollout at a time: milliseconds",
    "turn_overhead_turn_16": "Our Python per turn, 16 rollouts at a time: milliseconds",
    "turn_overhead_turn_64": "Our Python per turn, 64 rollouts at a time: milliseconds",
    "turn_overhead_turn_256": "Our Python per turn, 256 rollouts at a time: milliseconds",
    "turn_overhead_rollout_1": "Our Python per rollout, 1 at a time: milliseconds",
    "turn_overhead_rollout_16": "Our Python per rollout, 16 at a time: milliseconds",
    "turn_overhead_rollout_64": "Our Python per rollout, 64 at a time: milliseconds",
    "turn_overhead_rollout_256": "Our Python per rollout, 256 at a time: milliseconds",
    "turn_overhead_share_1": "Time outside of the tiny model, 1 rollout at a time: percent",
    "turn_overhead_share_16": "Time outside of the tiny model, 16 rollouts at a time: percent",
    "turn_overhead_share_64": "Time outside of the tiny model, 64 rollouts at a time: percent",
    "turn_overhead_share_256": "Time outside of the tiny model, 256 rollouts at a time: percent",
    "turn_overhead_long": "Our Python per turn, in windows of 65,536 tokens: milliseconds",
    "estimator_vs_loop": "Advantages, loop over tokens / ours: seconds",
    "logprob_memory_vs_naive": "Log-probabilities, naive / ours: peak memory, 2,048 tokens",
    "logprob_memory_8k_vs_2k": "Log-probabilities, 8,192 tokens / 2,048 tokens: peak memory of ours",
}
"""What each ratio compares, or which unit a figure has. Where ours is the divisor, more is better."""

Result = Mapping[str, Mapping[str, Any]]


def run_script(name: str) -> Result:
    """What a script measures. Raises CalledProcessError if it fails."""
    print(f"{name} ...", file=sys.stderr, flush=True)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE / f"{name}.py")]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout)


def figures(results: Sequence[Result]) -> dict[str, dict[str, Any]]:
    """Key -> median and spread, of all scripts' results. Raises KeyError if one of FIGURES was not measured."""
    merged = {key: value for result in results for key, value in result.items()}
    return {
        key: {"median": round(merged[key]["median"], 4), "spread": [round(x, 4) for x in merged[key]["spread"]]}
        for key in FIGURES
    }


def machine() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    cpu = models[0] if models else platform.processor() or platform.machine()
    return f"{os.cpu_count()} cores ({cpu}), Python {platform.python_version()}, torch {torch.__version__}"


def page(found: Mapping[str, Mapping[str, Any]], where: str, how: Mapping[str, str]) -> str:
    """The page in Markdown; `how`: script -> how it measures."""
    lines = [
        "# Benchmarks",
        "",
        f"Measured by `make bench` on {where}; one thread. Figures that name no unit are ratios, measured in one run: the median",
        "and the range of the repeats. Figures differ between machines.",
        "",
        "| what is compared | figure | lowest | highest | script |",
        "|---|---|---|---|---|",
    ]
    for key, value in found.items():
        low, high = value["spread"]
        script = next(name for name in SCRIPTS if key.startswith(name))
        lines.append(f"| {FIGURES[key]} | **{value['median']:.2f}** | {low:.2f} | {high:.2f} | `{script}.py` |")
    lines += ["", "## How", ""]
    for name, text in how.items():
        lines += [f"### `benchmarks/{name}.py`", "", text, ""]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=HERE.parent / "docs", metavar="FOLDER")
    output = parser.parse_args().output
    found = figures([run_script(name) for name in SCRIPTS])
    how = {name: ast.get_docstring(ast.parse((HERE / f"{name}.py").read_text())) or "" for name in SCRIPTS}
    (output / "benchmarks.json").write_text(json.dumps(found, indent=2, allow_nan=False) + "\n")
    (output / "benchmarks.md").write_text(page(found, machine(), how))


if __name__ == "__main__":
    main()
