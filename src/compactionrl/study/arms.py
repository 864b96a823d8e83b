"""The arms of a study as its tables show them: their titles, their finished cells, and means over these."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from compactionrl.study import claims
from compactionrl.study.bootstrap import Paired, interval, outcomes
from compactionrl.study.grid import PERFECT
from compactionrl.study.markdown import escape, percents

Ledger = Mapping[str, Any]
Cell = Mapping[str, Any]

UNEQUAL = (
    "Arms differ in their seeds: a mean is over an arm's own ones, a paired difference over those that both arms have, "
    "so it need not be the difference of two means."
)


def names(ledger: Ledger) -> list[str]:
    return [variant["name"] for variant in ledger["variants"]]


def trained(ledger: Ledger) -> list[str]:
    return [name for name in names(ledger) if name != "base"]


def title(ledger: Ledger, name: str) -> str:
    """The title of a variant; a summariser that is none goes by its name."""
    return escape(next((each["title"] for each in ledger["variants"] if each["name"] == name), name))


def cells_of(ledger: Ledger, setting: str, name: str) -> list[Cell]:
    """The finished cells, by seed."""
    found = [cell for cell in ledger["cells"].values() if (cell["setting"], cell["variant"]) == (setting, name)]
    return sorted(found, key=lambda cell: cell["seed"])


def seeds(ledger: Ledger, setting: str, name: str) -> str:
    return str(len(cells_of(ledger, setting, name)))


def all_seeds(ledger: Ledger, setting: str, among: Iterable[str]) -> list[int]:
    """Of all the named arms together."""
    return sorted({cell["seed"] for name in among for cell in cells_of(ledger, setting, name)})


def unequal(ledger: Ledger, setting: str) -> list[str]:
    """A note where finished arms differ in their seeds."""
    found = {tuple(cell["seed"] for cell in cells_of(ledger, setting, name)) for name in names(ledger)} - {()}
    return [UNEQUAL] if len(found) > 1 else []


def rate(ledger: Ledger, setting: str, name: str, mode: str) -> str:
    found = outcomes(ledger, setting, name, mode)
    return percents(interval(found.matrix) if found.seeds else None)


def to_full(ledger: Ledger, setting: str, name: str, mode: str = claims.XN) -> Paired | None:
    return claims.compare(ledger, setting, (name, mode), ("full", mode)) if name != "full" else None


def ceiling(ledger: Ledger, setting: str, mode: str) -> float | None:
    """Pass@1 of the perfect player: about the most that any policy can reach in this mode."""
    found = [cell["evaluation"].get(mode, {}).get("outcomes", "") for cell in cells_of(ledger, setting, PERFECT)]
    return average(int(outcome) for text in found for outcome in text if outcome != "-")


def updates(cells: Sequence[Cell], curve: str, start: int, stop: int | None = None) -> float | None:
    """Mean over seeds of a curve's mean over some updates; those without a value do not count."""
    return average(average(cell["curves"].get(curve, [])[start:stop]) for cell in cells)


def average(values: Iterable[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return fmean(found) if found else None
