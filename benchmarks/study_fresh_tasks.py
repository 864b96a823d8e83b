"""The study's policies on held-out tasks that no pilot run has seen: docs/study-fresh.md and .json.

python benchmarks/study_fresh_tasks.py [--setting plain hard] [--runs runs/study]

The pilots that fixed the study's settings were measured on the very tasks that the study reports. Here every policy of the
paper's arms plays, in the compacting mode, as many tasks of another seed with other random streams.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import fmean
from typing import Any

from compactionrl.config import parse_config, put
from compactionrl.measure import measure
from compactionrl.study.grid import PERFECT, SWAP, Cell, grid, load_setting
from compactionrl.study.variants import VARIANTS

DOCS = Path(__file__).parents[1] / "docs"
SEED = 90210
"""Of the fresh tasks and of their random streams."""


def fresh(cell: Cell, runs: Path) -> str:
    """Outcomes of the cell's policy, task by task."""
    data = cell.config(runs).model_dump()
    put(data, "environment.options.seed", SEED)
    put(data, "evaluation.seed", SEED)
    config = parse_config(data)
    mode, n = f"x{cell.setting.windows}", config.evaluation.final_tasks
    return measure(config, cell.policy_folder(runs, cell.name), modes=[mode], n_tasks=n, label=cell.key)[mode][
        "outcomes"
    ]


def page(ledger: dict[str, Any], found: dict[str, str]) -> str:
    lines = [
        "# The study's policies on fresh tasks",
        "",
        "Pass@1 in % in the compacting mode, mean over seeds: on the tasks that the study reports, and on as many tasks of",
        "another seed, which no pilot run was measured on. Made by `benchmarks/study_fresh_tasks.py` from the study's runs.",
    ]
    for setting, header in ledger["settings"].items():
        lines += [
            "",
            f"## {setting}, {header['compacting']}",
            "",
            "| arm | reported | fresh | seeds, reported | seeds, fresh |",
        ]
        lines += ["|---|---:|---:|---|---|"]
        for one in VARIANTS:
            keys = sorted(key for key in found if key.startswith(f"{setting}/{one.name}/"))
            if keys:
                reported = [ledger["cells"][key]["evaluation"][header["compacting"]]["outcomes"] for key in keys]
                columns = [[100 * rate(outcomes) for outcomes in reported], [100 * rate(found[key]) for key in keys]]
                means = " | ".join(f"{fmean(column):.1f}" for column in columns)
                each = " | ".join(", ".join(f"{value:.1f}" for value in column) for column in columns)
                lines.append(f"| {one.title} | {means} | {each} |")
    return "\n".join([*lines, ""])


def rate(outcomes: str) -> float:
    return outcomes.count("1") / (len(outcomes) - outcomes.count("-"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setting", nargs="+", default=["plain", "hard"])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--runs", type=Path, default=Path("runs/study"))
    arguments = parser.parse_args()
    ledger = json.loads((DOCS / "study.json").read_text())
    record = DOCS / "study-fresh.json"
    found: dict[str, str] = json.loads(record.read_text()) if record.exists() else {}
    for cell in grid([load_setting(name, {}) for name in arguments.setting], arguments.seeds, extra=False):
        if cell.name not in (SWAP, PERFECT) and cell.key in ledger["cells"] and cell.key not in found:
            found[cell.key] = fresh(cell, arguments.runs)
            record.write_text(json.dumps(found, indent=0, sort_keys=True) + "\n")
    (DOCS / "study-fresh.md").write_text(page(ledger, found))
    print(page(ledger, found))


if __name__ == "__main__":
    main()
