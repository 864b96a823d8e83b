"""Results as a table for the terminal and as curves over training."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

Results = Mapping[str, Mapping[str, Any]]
"""Mode -> result, as `evaluate` returns it."""


def pass_table(policies: Mapping[str, Results]) -> Table:
    """Pass@1 in % with its 95% interval: one row per policy, one column per mode."""
    modes = list(dict.fromkeys(mode for results in policies.values() for mode in results))
    table = Table(title="Pass@1, % (95% interval)", title_justify="left")
    table.add_column("policy")
    for mode in modes:
        table.add_column(mode, justify="right")
    for name, results in policies.items():
        table.add_row(escape(name), *(rate(results[mode]) if mode in results else "" for mode in modes))
    return table


def behaviour_table(policies: Mapping[str, Results]) -> Table:
    """What the rollouts did: one column per policy and mode."""
    columns = [
        (f"{escape(name)}\n{mode}", result) for name, results in policies.items() for mode, result in results.items()
    ]
    table = Table("per rollout", title="Behaviour", title_justify="left")
    for heading, _ in columns:
        table.add_column(heading, justify="right")
    for label, show in BEHAVIOUR.items():
        table.add_row(label, *(show(result) for _, result in columns))
    return table


def rate(result: Mapping[str, Any]) -> str:
    if result["pass_at_1"] is None:
        return "–"
    return f"{100 * result['pass_at_1']:.1f} ({100 * result['low']:.1f}–{100 * result['high']:.1f})"


def number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f}%"


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def curves(metrics: Sequence[Mapping[str, Any]], panels: Mapping[str, Mapping[str, str]], path: Path) -> None:
    """A PNG with one panel per title, over `step`; a panel maps the label of a curve to its key in the metrics.

    Lines without a key, or with null in it, leave no point. The figure says nothing that the metrics do not hold.
    """
    from matplotlib.figure import Figure  # without pyplot: no display, no global state

    figure = Figure(figsize=(4.2 * len(panels), 3.4), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, (title, keys) in zip(axes, panels.items(), strict=True):
        for label, key in keys.items():
            points = [(line["step"], line[key]) for line in metrics if line.get(key) is not None]
            if points:
                axis.plot(*zip(*points, strict=True), label=label, marker="." if len(points) < 30 else "")
        axis.set(title=title, xlabel="policy updates")
        axis.grid(alpha=0.3)
        if len(keys) > 1 and axis.lines:
            axis.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


BEHAVIOUR: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "rollouts": lambda result: str(result["n"]),
    "errors (left out)": lambda result: str(result["errors"]),
    "reward": lambda result: number(result["reward"]),
    "turns": lambda result: number(result["turns"]),
    "tool calls": lambda result: number(result["tool_calls"]),
    "tokens per turn": lambda result: number(result["response_tokens"]),
    "of them thinking": lambda result: number(result["thinking_tokens"]),
    "compactions": lambda result: number(result["compactions"]),
    "compacted at all": lambda result: str(result["compacted"]["n"]),
    "Pass@1 of those": lambda result: percent(result["compacted"]["pass_at_1"]),
    "tokens per summary": lambda result: number(result["summary_tokens"]),
    "rejected summaries": lambda result: str(sum(result["rejected_summaries"].values())),
    "out of budget": lambda result: percent(result["budget_exhausted"]),
}
"""The rows of the behaviour table."""
