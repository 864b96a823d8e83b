"""Ledgers of made-up studies: the shape of study.json, with figures that look like a study's or are set by hand."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

STEPS = 20
WINDOWS = {"plain": 4, "hard": 6}
"""Windows of each setting; they differ, so that nothing can take "x4" for granted."""

TITLES = {
    "base": "Warm start",
    "rl-c": "RL without compaction, C",
    "rl-2c": "RL without compaction, 2C",
    "no-summary": "CompactionRL, summaries not trained",
    "segment-loss": "CompactionRL without token-level loss",
    "segment-gae": "CompactionRL without cross-trajectory GAE",
    "full": "CompactionRL",
    "rl-total": "RL without compaction, whole length",
    "concatenated": "GAE over the concatenated rollout",
    "lambda-segment": "Lambda from the segment's length",
    "lambda-window": "Lambda from the window's length",
    "coupled-lambda": "Critic with the actor's lambda",
    "group": "Group baseline | no critic",
    "robust": "CompactionRL, x1 mixed in",
}
PAPER_ARMS = list(TITLES)[:7]
TRAINED_IN = {"base": "", "rl-c": "x1", "rl-2c": "2C", "rl-total": "{n}C", "robust": "x1 or x{n}"}

SOLVED = {
    "base": 0.3,
    "rl-c": 0.4,
    "rl-2c": 0.45,
    "no-summary": 0.6,
    "segment-loss": 0.6,
    "segment-gae": 0.65,
    "full": 0.7,
}
"""Chance to solve a task of middling difficulty in the compacting mode; the extras solve as much as `full`."""

REACHED = {"x1": 1 / 4, "2C": 3 / 4}
"""Share of the tasks that a perfect player solves in a mode; all in the others."""

EXECUTORS = ("base", "full")
SUMMARISERS = {"base": 0.4, "full": 0.6, "no-summary": 0.5, "perfect": 0.8, "empty": 0.1}

CURVES = {
    "reward": (0.3, 0.7),
    "summary_tokens": (10.0, 16.0),
    "response_tokens": (8.0, 9.0),
    "entropy": (0.9, 0.3),
    "compactions": (2.0, 1.8),
    "tool_calls": (6.0, 7.0),
    "summary_share": (0.3, 0.35),
    "factor_summary": (0.7, 0.75),
    "factor_execution": (0.85, 0.9),
    "compacted_pass": (0.25, 0.65),
    "explained_variance": (0.0, 0.6),
    "policy_kl": (0.001, 0.002),
}
"""First and last value of each curve."""


def synthetic_ledger(
    *,
    seeds: int = 5,
    extra_seeds: int = 3,
    tasks: int = 64,
    settings: Sequence[str] = ("plain", "hard"),
    seed: int = 0,
) -> dict[str, Any]:
    """A finished study: every variant, `seeds` of the paper's arms and of the swaps, `extra_seeds` of the extras, and
    in every setting one perfect player.

    Tasks differ in difficulty, the same for all cells of a setting; seeds of a variant differ a little.
    """
    rng = np.random.default_rng(seed)
    cells = {}
    for name in settings:
        difficulty = rng.normal(0, 0.15, tasks)
        modes = setting_of(name)["modes"]
        for variant in TITLES:
            for number in range(1, 1 + (seeds if variant in PAPER_ARMS else extra_seeds)):
                luck = rng.normal(0, 0.04)
                chance = SOLVED.get(variant, SOLVED["full"])
                chances = {mode: chance + luck - difficulty - (0.15 if mode == "x1" else 0) for mode in modes}
                outcomes = {mode: drawn(rng, chances[mode]) for mode in modes}
                cells[f"{name}/{variant}/{number}"] = cell(name, variant, number, outcomes, curves=noisy_curves(rng))
        for number in range(1, 1 + seeds):
            pairs = {
                f"{executor}/{summariser}": drawn(rng, chance - difficulty + 0.05 * (executor == "full"))
                for executor in EXECUTORS
                for summariser, chance in SUMMARISERS.items()
            }
            cells[f"{name}/swap/{number}"] = cell(name, "swap", number, pairs)
        solved = {mode: round(tasks * REACHED.get(mode, 1)) for mode in modes}
        perfect = {mode: "1" * n + "0" * (tasks - n) for mode, n in solved.items()}
        cells[f"{name}/perfect/1"] = cell(name, "perfect", 1, perfect)
    return ledger_of(cells, settings=settings, tasks=tasks)


def ledger_of(
    cells: Mapping[str, Any],
    *,
    settings: Sequence[str] = ("plain",),
    tasks: int = 4,
    titles: Mapping[str, str] = TITLES,
) -> dict[str, Any]:
    """The ledger around some cells, by key "setting/variant/seed"."""
    return {
        "format": 1,
        "settings": {name: setting_of(name, tasks) for name in settings},
        "variants": [variant_of(name, title, settings) for name, title in titles.items()],
        "sessions": [{"started": "2026-11-30T02:00:00Z", "seconds": 1234.5, "jobs": 2, "cells": list(cells)}],
        "cells": dict(cells),
    }


def setting_of(name: str, tasks: int = 4) -> dict[str, Any]:
    windows = WINDOWS[name]
    return {
        "modes": ["x1", f"x{windows}", "2C", f"{windows}C"],
        "compacting": f"x{windows}",
        "long": f"{windows}C",
        "windows": windows,
        "budget": 128,
        "tasks": tasks,
        "rollouts_per_step": 64,
        "steps": STEPS,
        "toml": f'# the setting "{name}"\n[context]\nbudget = 128\nmax_compactions = {windows - 1}\n',
    }


def variant_of(name: str, title: str, settings: Sequence[str]) -> dict[str, Any]:
    return {
        "name": name,
        "title": title,
        "extra": name not in PAPER_ARMS,
        "trained_in": {setting: TRAINED_IN.get(name, "x{n}").format(n=WINDOWS[setting]) for setting in settings},
        "changes": {
            setting: {} if name in ("base", "full") else {f"train.{name.replace('-', '_')}": True}
            for setting in settings
        },
    }


def cell(
    setting: str,
    variant: str,
    seed: int,
    outcomes: Mapping[str, str],
    *,
    curves: Mapping[str, list[float | None]] | None = None,
    explained_variance: Mapping[str, float] | None = None,
    tokens: Mapping[str, int] | None = None,
    seconds: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """A finished cell with the given outcomes by mode (by "executor/summariser" when it is a swap)."""
    in_one_window = {"x1", "2C", f"{WINDOWS[setting]}C"}
    evaluations = {mode: evaluation(text, compacting=mode not in in_one_window) for mode, text in outcomes.items()}
    finished = {
        "setting": setting,
        "variant": variant,
        "seed": seed,
        "fingerprint": "f" * 16,
        "base": "b" * 64,
        "evaluation": evaluations,
        "seconds": dict(seconds or {"wall": 300.0, "cpu": 280.0}),
    }
    if variant in ("base", "swap", "perfect"):
        return finished
    return {
        **finished,
        "curves": dict(curves or {}),
        "explained_variance": dict(explained_variance or {"segment_0": 0.1, "segment_1": 0.4}),
        "tokens": dict(tokens or {"sampled": 200_000, "trained": 180_000, "rollouts": 64 * STEPS}),
    }


def evaluation(outcomes: str, *, compacting: bool = True) -> dict[str, Any]:
    """The result of one mode; its other figures follow from the outcomes in a plain way."""
    finished = [outcome for outcome in outcomes if outcome != "-"]
    compacted = finished[len(finished) // 4 :] if compacting else []
    return {
        "outcomes": outcomes,
        "compactions": 1.5 if compacting else 0.0,
        "tool_calls": 6.25,
        "turns": 7.0,
        "summary_tokens": 12.0 if compacting else None,
        "response_tokens": 8.5,
        "budget_exhausted": 0.125 if compacting else 0.5,
        "errors": outcomes.count("-"),
        "compacted": {"n": len(compacted), "pass_at_1": compacted.count("1") / len(compacted) if compacted else None},
    }


def drawn(rng: np.random.Generator, chance: np.ndarray) -> str:
    """One outcome per task; one task in a hundred broke down."""
    solved = np.where(rng.random(len(chance)) < chance, "1", "0")
    return "".join(np.where(rng.random(len(chance)) < 0.01, "-", solved))


def noisy_curves(rng: np.random.Generator) -> dict[str, list[float | None]]:
    """Every curve from its first to its last value with some noise; the first update of one has no value."""
    curves = {
        key: (np.linspace(first, last, STEPS) + rng.normal(0, 0.03 * (abs(first) + abs(last)), STEPS)).tolist()
        for key, (first, last) in CURVES.items()
    }
    return {**curves, "compacted_pass": [None, *curves["compacted_pass"][1:]]}
