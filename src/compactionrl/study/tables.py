"""What was measured on the held-out tasks, in Markdown: functions of the ledger and a setting.

What is not finished yet is a dash.
"""

from __future__ import annotations

from compactionrl.study.arms import (
    Ledger,
    all_seeds,
    average,
    ceiling,
    cells_of,
    names,
    rate,
    seeds,
    title,
    to_full,
    unequal,
)
from compactionrl.study.bootstrap import Paired, outcomes
from compactionrl.study.claims import agrees
from compactionrl.study.grid import SWAP
from compactionrl.study.markdown import DASH, escape, number, percent, points, seed_points, table

RATES = "Pass@1 in %: mean over seeds (95% interval, seeds and held-out tasks resampled)."
PAIRED = "Differences in points, paired by seed and task (95% interval)."
DAGGER = "† Here the t interval over the seeds, which takes the tasks as given, does not say the same."
PERFECT_PLAYER = "a perfect player (scripted)"


def pass_table(ledger: Ledger, setting: str) -> str:
    """Tables 2 and 3 in kind: Pass@1 of every variant in every mode, and its distance from CompactionRL.

    The last row is what a perfect player reaches, if it has played.
    """
    header = ledger["settings"][setting]
    modes = header["modes"]
    trained_in = {variant["name"]: variant["trained_in"].get(setting) for variant in ledger["variants"]}
    rows = [
        [
            title(ledger, name),
            escape(trained_in[name] or DASH),
            *(rate(ledger, setting, name, mode) for mode in modes),
            points(to_full(ledger, setting, name)),
            seeds(ledger, setting, name),
        ]
        for name in names(ledger)
    ]
    reached = [percent(ceiling(ledger, setting, mode)) for mode in modes]
    if any(text != DASH for text in reached):
        rows.append([PERFECT_PLAYER, DASH, *reached, DASH, DASH])
    head = ["variant", "trained in", *map(escape, modes), against_full(ledger, header["compacting"]), "seeds"]
    return table(head, rows, left=2, notes=[f"{RATES} {PAIRED}", *unequal(ledger, setting)])


def difference_table(ledger: Ledger, setting: str) -> str:
    """Every variant's distance from CompactionRL in every mode."""
    modes = ledger["settings"][setting]["modes"]
    found = {name: [to_full(ledger, setting, name, mode) for mode in modes] for name in names(ledger) if name != "full"}
    rows = ([title(ledger, name), *map(marked_points, row)] for name, row in found.items())
    open_ones = [pair for row in found.values() for pair in row if pair and not agrees(pair)]
    notes = [f"To {title(ledger, 'full')}. {PAIRED}", *unequal(ledger, setting), *([DAGGER] if open_ones else [])]
    return table(["variant", *map(escape, modes)], rows, notes=notes)


def marked_points(found: Paired | None) -> str:
    return points(found) if found is None or agrees(found) else f"{points(found)} †"


def seed_table(ledger: Ledger, setting: str) -> str:
    """Pass@1 of every seed."""
    modes = ledger["settings"][setting]["modes"]
    numbers = all_seeds(ledger, setting, names(ledger))
    rows = (
        [title(ledger, name), escape(mode), *each_seed(ledger, setting, name, mode, numbers)]
        for name in names(ledger)
        for mode in modes
    )
    return table(["variant", "mode", *by_seed(numbers)], rows, left=2)


def each_seed(ledger: Ledger, setting: str, name: str, mode: str, numbers: list[int]) -> list[str]:
    found = outcomes(ledger, setting, name, mode).per_seed
    return [percent(found.get(seed)) for seed in numbers]


def by_seed(numbers: list[int]) -> list[str]:
    return [f"seed {seed}" for seed in numbers]


def ablation_table(ledger: Ledger, setting: str) -> str:
    """Table 4 in kind: CompactionRL without each of its two parts, in the compacting mode."""
    compacting = ledger["settings"][setting]["compacting"]
    rows = []
    for name in ("full", "segment-loss", "segment-gae"):
        found = to_full(ledger, setting, name)
        measured = rate(ledger, setting, name, compacting)
        rows.append([title(ledger, name), measured, points(found), seed_points(found), seeds(ledger, setting, name)])
    head = ["variant", escape(compacting), f"to {title(ledger, 'full')}", "t interval", "seeds"]
    return table(head, rows, notes=[f"{RATES} {PAIRED}"])


def swap_table(ledger: Ledger, setting: str) -> str:
    """Table 1 in kind: Pass@1 of a policy that acts, by who writes its summaries."""
    executors, summarisers = swapped(ledger, setting)
    rows = (
        [title(ledger, acts), *(rate(ledger, setting, SWAP, f"{acts}/{writes}") for writes in summarisers)]
        for acts in executors
    )
    head = ["acts", *(f"summaries: {title(ledger, name)}" for name in summarisers)]
    return table(head, rows, notes=[f"{RATES} Seeds: {seeds(ledger, setting, SWAP)}."])


def swap_seed_table(ledger: Ledger, setting: str) -> str:
    """Every seed of Table 1 in kind."""
    executors, summarisers = swapped(ledger, setting)
    numbers = all_seeds(ledger, setting, [SWAP])
    rows = (
        [title(ledger, acts), title(ledger, writes), *each_seed(ledger, setting, SWAP, f"{acts}/{writes}", numbers)]
        for acts in executors
        for writes in summarisers
    )
    return table(["acts", "summaries", *by_seed(numbers)], rows, left=2, notes=["Pass@1 in % of every seed."])


def swapped(ledger: Ledger, setting: str) -> tuple[list[str], list[str]]:
    """Who acts, and who writes the summaries."""
    pairs = [pair.split("/") for cell in cells_of(ledger, setting, SWAP) for pair in cell["evaluation"]]
    return [*dict.fromkeys(acts for acts, _ in pairs)], [*dict.fromkeys(writes for _, writes in pairs)]


def behaviour_table(ledger: Ledger, setting: str) -> str:
    """Figure 3 in kind: what the rollouts do in the compacting mode."""
    compacting = ledger["settings"][setting]["compacting"]

    def row(name: str) -> list[str]:
        found = [cell["evaluation"][compacting] for cell in cells_of(ledger, setting, name)]
        compacted = [result["compacted"] for result in found if result["compacted"]["n"]]
        n = sum(each["n"] for each in compacted)
        solved = sum(each["n"] * each["pass_at_1"] for each in compacted)
        return [
            title(ledger, name),
            number(average(result["compactions"] for result in found)),
            number(average(result["tool_calls"] for result in found)),
            f"{percent(solved / n)} (n = {n})" if n else DASH,
            percent(average(result["budget_exhausted"] for result in found)),
            str(len(found)),
        ]

    head = ["per rollout", "compactions", "tool calls", "Pass@1 where it compacted, %", "out of budget, %", "seeds"]
    notes = ["n: rollouts that compacted, of all seeds together.", *unequal(ledger, setting)]
    return table(head, map(row, names(ledger)), notes=notes)


def against_full(ledger: Ledger, mode: str) -> str:
    return f"{escape(mode)}, to {title(ledger, 'full')}"
