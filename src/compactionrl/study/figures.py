"""The study's figures: what the paper's Figures 3 and 4 show and what its tables show, with every seed.

Every figure is a function of the ledger and of a setting's name. A variant without finished cells is left out; a figure
without any variant is not drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np

from compactionrl.study.arms import ceiling
from compactionrl.study.bootstrap import interval, outcomes, paired
from compactionrl.study.charts import Curve, Panel, Row, Variant, curves_chart, png, rows_chart
from compactionrl.study.variants import FULL

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Ledger = Mapping[str, Any]


def figures(ledger: Ledger, setting: str) -> dict[str, bytes]:
    """Name -> PNG, of the figures for which the setting has finished cells."""
    drawn = {name: draw(ledger, setting) for name, draw in FIGURES.items()}
    return {name: png(figure) for name, figure in drawn.items() if figure is not None}


def pass_figure(ledger: Ledger, setting: str) -> Figure | None:
    """Pass@1 in every mode, with what a perfect player reaches there."""
    panels: dict[str, list[Row]] = {}
    reached = {}
    for mode in ledger["settings"][setting]["modes"]:
        title = f"Pass@1, %: {mode}"
        rows = panels[title] = []
        reached[title] = scaled(ceiling(ledger, setting, mode))
        for one in ledger["variants"]:
            measured = outcomes(ledger, setting, one["name"], mode)
            if measured.seeds:
                found = interval(measured.matrix)
                ends = 100 * found.low, 100 * found.high
                rows.append(Row(one, 100 * found.mean, percent(measured.per_seed.values()), ends))
    return rows_chart(panels, same_scale=True, limits=reached)


def difference_figure(ledger: Ledger, setting: str) -> Figure | None:
    """Paired differences to the full method in the compacting mode."""
    mode = ledger["settings"][setting]["compacting"]
    full = outcomes(ledger, setting, FULL, mode)
    rows = []
    for one in ledger["variants"]:
        measured = outcomes(ledger, setting, one["name"], mode)
        if one["name"] != FULL and measured.minus(full).seeds:
            found = paired(measured, full)
            ends = 100 * found.low, 100 * found.high
            rows.append(Row(one, 100 * found.difference, percent(found.per_seed.values()), ends))
    title = next(one["title"] for one in ledger["variants"] if one["name"] == FULL)
    return rows_chart({f"Pass@1 in {mode}: difference to {title}, points": rows}, zero=True)


def behaviour_figure(ledger: Ledger, setting: str) -> Figure | None:
    """What the rollouts do in the compacting mode (the paper's Figure 3 in kind)."""
    mode = ledger["settings"][setting]["compacting"]
    shown: dict[str, Callable[[Mapping[str, Any]], float | None]] = {
        "compactions per rollout": lambda result: result["compactions"],
        "tool calls per rollout": lambda result: result["tool_calls"],
        "Pass@1 of compacted tasks, %": lambda result: scaled(result["compacted"]["pass_at_1"]),
    }
    panels: dict[str, list[Row]] = {}
    for title, value in shown.items():
        rows = panels[title] = []
        for one in ledger["variants"]:
            values = [value(cell["evaluation"][mode]) for cell in cells_of(ledger, setting, one)]
            if seeds := [value for value in values if value is not None]:
                rows.append(Row(one, fmean(seeds), seeds))
    return rows_chart(panels)


def dynamics_figure(ledger: Ledger, setting: str) -> Figure | None:
    """Summary length, response length and entropy over training (the paper's Figure 4 in kind)."""
    shown = {"summary_tokens": "tokens per summary", "response_tokens": "tokens per response", "entropy": "entropy"}
    return curves_chart([Panel(title, training(ledger, setting, key)) for key, title in shown.items()])


def reward_figure(ledger: Ledger, setting: str) -> Figure | None:
    """Reward over training, of each arm in the modes that it is trained in."""
    extras = [one for one in ledger["variants"] if one["extra"]]
    full = [one for one in ledger["variants"] if one["name"] == FULL]
    panels = [Panel("reward in training: the paper's arms", training(ledger, setting, "reward"))]
    if training(ledger, setting, "reward", extras):
        panels.append(Panel("reward in training: beyond the paper", training(ledger, setting, "reward", full + extras)))
    return curves_chart(panels)


def credit_figure(ledger: Ledger, setting: str) -> Figure | None:
    """Where the credit goes, and how well the critic knows each segment."""
    segments, names = by_segment(ledger, setting)
    return curves_chart(
        [
            Panel("credit share of summary tokens", training(ledger, setting, "summary_share")),
            Panel("critic's explained variance", training(ledger, setting, "explained_variance")),
            Panel("the same by segment, at the end", segments, "segment of the rollout", names),
        ]
    )


FIGURES: dict[str, Callable[[Ledger, str], Figure | None]] = {
    "pass": pass_figure,
    "differences": difference_figure,
    "behaviour": behaviour_figure,
    "dynamics": dynamics_figure,
    "reward": reward_figure,
    "credit": credit_figure,
}
"""Name -> what draws it."""


def training(ledger: Ledger, setting: str, key: str, arms: Iterable[Variant] | None = None) -> list[Curve]:
    """A curve over policy updates of every one of `arms` (default: the paper's) that has values of `key`."""
    curves = []
    for one in paper_arms(ledger) if arms is None else arms:
        values = stacked([cell.get("curves", {}).get(key, []) for cell in cells_of(ledger, setting, one)])
        if not np.isnan(values).all():
            curves.append(Curve(one, range(1, values.shape[1] + 1), values))
    return curves


def by_segment(ledger: Ledger, setting: str) -> tuple[list[Curve], dict[int, str]]:
    """Explained variance by the segment's index in its rollout, at the end of training; and the indices' names."""
    curves: list[Curve] = []
    names: dict[int, str] = {}
    for one in paper_arms(ledger):
        cells = [cell.get("explained_variance", {}) for cell in cells_of(ledger, setting, one)]
        segments = {int(key.removeprefix("segment_").rstrip("+")): key for cell in cells for key in cell}
        if segments:
            places = sorted(segments)
            values = stacked([[cell.get(segments[place]) for place in places] for cell in cells])
            curves.append(Curve(one, places, values))
            names |= {place: segments[place].removeprefix("segment_") for place in places}
    return curves, names


def cells_of(ledger: Ledger, setting: str, variant: Variant) -> list[Mapping[str, Any]]:
    """The finished cells, by seed."""
    cells = [
        cell for cell in ledger["cells"].values() if (cell["setting"], cell["variant"]) == (setting, variant["name"])
    ]
    return sorted(cells, key=lambda cell: cell["seed"])


def paper_arms(ledger: Ledger) -> list[Variant]:
    return [one for one in ledger["variants"] if not one["extra"]]


def stacked(rows: Sequence[Sequence[float | None]]) -> np.ndarray:
    """[rows, longest row]; NaN where a row has no value."""
    values = np.full((len(rows), max(map(len, rows), default=0)), np.nan)
    for target, row in zip(values, rows, strict=True):
        target[: len(row)] = [np.nan if value is None else value for value in row]
    return values


def percent(shares: Iterable[float]) -> list[float]:
    return [100 * share for share in shares]


def scaled(share: float | None) -> float | None:
    return None if share is None else 100 * share
