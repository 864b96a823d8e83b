"""What happened in training, in Markdown: functions of the ledger and a setting. What is not finished yet is a dash."""

from __future__ import annotations

import math

import numpy as np

from compactionrl.study.arms import (
    Ledger,
    all_seeds,
    average,
    cells_of,
    names,
    title,
    trained,
    unequal,
    updates,
)
from compactionrl.study.bootstrap import t_interval
from compactionrl.study.claims import side
from compactionrl.study.markdown import DASH, change, number, percent, table

ENDS = 5
"""Updates that stand for the beginning and for the end of training."""
LATE = 10
"""Last updates over which credit is averaged, as the ledger's explained variance is."""


def training_table(ledger: Ledger, setting: str) -> str:
    """Figure 4 in kind: lengths and entropy in the first and in the last updates."""
    curves = {"summary_tokens": "tokens per summary", "response_tokens": "tokens per response", "entropy": "entropy"}

    def row(name: str) -> list[str]:
        cells = cells_of(ledger, setting, name)
        ends = [(updates(cells, key, 0, ENDS), updates(cells, key, -ENDS)) for key in curves]
        return [title(ledger, name), *(change(*pair) for pair in ends), str(len(cells))]

    note = (
        f"Mean of the first {ENDS} → of the last {ENDS} updates. Entropy is that of the optimised tokens: an arm that does "
        "not train summaries leaves theirs out, so its level cannot be compared with that of the others."
    )
    notes = [note, *unequal(ledger, setting)]
    return table(["variant", *curves.values(), "seeds"], map(row, trained(ledger)), notes=notes)


def growth_table(ledger: Ledger, setting: str) -> str:
    """Whether summaries get longer in training, by arm and seed."""
    words = {1: "grows", -1: "shrinks", 0: "undecided"}
    arms = trained(ledger)
    numbers = all_seeds(ledger, setting, arms)

    def row(name: str) -> list[str]:
        found = growth(ledger, setting, name)
        each = [signed(found.get(seed)) for seed in numbers]
        if not found:
            return [title(ledger, name), DASH, DASH, DASH, *each]
        values = np.array([*found.values()])
        low, high = t_interval(values)
        interval = DASH if math.isinf(low) else f"{signed(low)} to {signed(high)}"
        return [title(ledger, name), words[side(low, high)], signed(values.mean()), interval, *each]

    head = ["variant", "a summary's length", "tokens", "t interval", *(f"seed {seed}" for seed in numbers)]
    note = (
        f"Tokens per summary: mean of the last {ENDS} updates minus that of the first {ENDS}; over seeds, with the 95% t "
        "interval over them. Undecided: it contains 0, or there is one seed only."
    )
    return table(head, map(row, arms), left=2, notes=[note])


def growth(ledger: Ledger, setting: str, name: str) -> dict[int, float]:
    """By how many tokens summaries got longer, of every seed that has any."""
    found = {}
    for cell in cells_of(ledger, setting, name):
        first, last = (updates([cell], "summary_tokens", *ends) for ends in ((0, ENDS), (-ENDS, None)))
        if first is not None and last is not None:
            found[cell["seed"]] = last - first
    return found


def signed(tokens: float | None) -> str:
    return DASH if tokens is None else ("+" if round(tokens, 2) >= 0 else "") + number(tokens)


def credit_table(ledger: Ledger, setting: str) -> str:
    """Where the credit goes: the summaries' share of it, E14's factor, and what the critic explains by segment."""
    runs = {name: cells_of(ledger, setting, name) for name in trained(ledger)}
    segments = {key for cells in runs.values() for cell in cells for key in cell["explained_variance"]}
    order = sorted(segments, key=lambda key: int(key.removeprefix("segment_").rstrip("+")))

    def row(name: str) -> list[str]:
        cells = runs[name]
        factors = [updates(cells, f"factor_{kind}", -LATE) for kind in ("summary", "execution")]
        explained = [average(cell["explained_variance"].get(key) for cell in cells) for key in order]
        figures = [percent(updates(cells, "summary_share", -LATE)), *map(number, [*factors, *explained])]
        return [title(ledger, name), *figures, str(len(cells))]

    by_segment = [f"EV, {key.replace('_', ' ')}" for key in order]
    head = ["variant", "credit, %", "E14, summary", "E14, execution", *by_segment, "seeds"]
    note = (
        f"Means over the last {LATE} updates. Credit: the summaries' share of the sum of absolute advantages. "
        "E14: its mean factor. EV: the share of its targets' variance that the critic explains."
    )
    return table(head, map(row, runs), notes=[note, *unequal(ledger, setting)])


def cost_table(ledger: Ledger, setting: str) -> str:
    """What a run costs: its time, its tokens, its rollouts."""

    def row(name: str) -> list[str]:
        cells = cells_of(ledger, setting, name)
        minutes = [average(cell["seconds"][kind] / 60 for cell in cells) for kind in ("wall", "cpu")]
        kinds = ("sampled", "trained", "rollouts")
        counts = [average(cell.get("tokens", {}).get(kind) for cell in cells) for kind in kinds]
        figures = [*(number(value, 1) for value in minutes), *(number(value, 0) for value in counts)]
        return [title(ledger, name), *figures, str(len(cells))]

    head = ["mean per run", "minutes", "CPU minutes", "tokens sampled", "tokens optimised", "rollouts", "seeds"]
    note = (
        "Minutes are those of everything: value pretraining, the policy updates and the final evaluation. Tokens and "
        "rollouts are those of the policy updates alone."
    )
    return table(head, map(row, names(ledger)), notes=[note, *unequal(ledger, setting)])
