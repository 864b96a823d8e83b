"""What a reader must know before any figure: what was run, how, and what of it is finished."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from compactionrl.study.declaration import changes
from compactionrl.study.grid import PACKAGED, QUICK
from compactionrl.study.markdown import code, escape, number, table

Ledger = Mapping[str, Any]


def facts(ledger: Ledger) -> list[str]:
    """What this is and how it was made."""
    cells = ledger["cells"].values()
    sittings = ledger["sessions"]
    evaluated = [result for cell in cells for result in cell["evaluation"].values()]
    broken = sum(result["outcomes"].count("-") for result in evaluated)
    rollouts = sum(len(result["outcomes"]) for result in evaluated)
    wanted = planned(ledger)
    points = [
        f"Made by {code(command(ledger))}. Everything below is computed from `study.json` alone.",
        f"Finished: {len(wanted & ledger['cells'].keys())} of {len(wanted)} cells, one for each setting, arm and seed; "
        f"{duration(sittings)} in {len(sittings)} sitting{'s' * (len(sittings) != 1)}.",
        f"Repetitions: {repetitions(ledger)}. A seed repeats all of the training: the base from random weights, the critic, "
        "the order of the tasks, the sampling. All arms of a seed start from the same base.",
        "All arms of a setting share its data, the number of rollouts per update, the number of updates and every "
        "hyper-parameter but what an arm is named for; none is tuned for an arm. How a setting was chosen stands at its "
        f"head.{grouped(ledger)}",
        f"Measured are the policies behind the last update, not the best ones on the way, on {tasks(ledger)}, once in every "
        "mode. These tasks and the random streams they are played with are the same for all arms and all seeds, on purpose: "
        "that pairs the comparisons, and so no seed repeats them.",
        f"{broken:,} of {rollouts:,} measured rollouts broke down for reasons outside the policy and are left out.",
    ]
    return [ABOUT, "\n".join(f"- {point}" for point in points)]


def warnings(ledger: Ledger) -> list[str]:
    """What a reader must not miss: each a quoted paragraph."""
    found = []
    if is_quick(ledger):
        found.append("**A smoke run.** Everything was run and nothing was learned: no figure here says anything.")
    for name, header in ledger["settings"].items():
        changed = changes(header["toml"])
        if changed and not is_quick(ledger):
            keys = ", ".join(code(f"{key} = {json.dumps(value)}") for key, value in changed.items())
            found.append(f"**Changed.** The setting {escape(name)} ran with {keys}, unlike its declaration.")
    if missing := sorted(planned(ledger) - ledger["cells"].keys()):
        are = "cell is" if len(missing) == 1 else "cells are"
        found.append(f"**Incomplete.** {len(missing)} {are} missing: {'; '.join(by_arm(missing))}.")
    return [f"> {text}" for text in found]


def arms_table(ledger: Ledger) -> str:
    """What each arm changes, in every setting where these differ."""

    def listed(changes: Mapping[str, Any]) -> str:
        return ", ".join(code(f"{key} = {json.dumps(value)}") for key, value in changes.items())

    rows = (
        [
            escape(one["title"]),
            " or ".join(dict.fromkeys(map(listed, one["changes"].values()))),
            "beyond the paper" if one["extra"] else "the paper's",
        ]
        for one in ledger["variants"]
    )
    return table(["variant", "changes", ""], rows, left=3)


def grouped(ledger: Ledger) -> str:
    """Of the arms that play every task several times, and so do not share the others' data."""
    run = {key.rsplit("/", 2)[1] for key in planned(ledger)}
    found = {
        escape(one["title"]): size
        for one in ledger["variants"]
        for changes in one["changes"].values()
        if one["name"] in run and (size := changes.get("train.group_size"))
    }
    return "".join(
        f' Other data has "{title}": it plays every task {size} times, so fewer of them, and without a critic it has no '
        "value pretraining, so its tasks are not those that the rest trains on."
        for title, size in found.items()
    )


def sittings_table(ledger: Ledger) -> str:
    """How long which part of the study took."""

    def row(sitting: Mapping[str, Any]) -> list[str]:
        counts = Counter(key.rsplit("/", 2)[0] for key in sitting["cells"])
        parts = ", ".join(f"{n} of {escape(name)}" for name, n in counts.items())
        return [escape(sitting["started"]), parts, number(sitting["seconds"] / 60, 0), str(sitting["jobs"])]

    return table(["began", "cells", "minutes", "side by side"], map(row, ledger["sessions"]), left=2)


def is_quick(ledger: Ledger) -> bool:
    return any(changes(header["toml"]).keys() >= QUICK.keys() for header in ledger["settings"].values())


def planned(ledger: Ledger) -> set[str]:
    """Keys of the cells that the study consists of, finished or not."""
    return {*ledger.get("planned", ()), *ledger["cells"]}


def seeds(ledger: Ledger, *, extra: bool) -> list[int]:
    """Seeds of the paper's arms, or of the extra ones."""
    arms = {one["name"] for one in ledger["variants"] if one["extra"] == extra}
    keys = [key.rsplit("/", 2) for key in planned(ledger)]
    return sorted({int(seed) for _, arm, seed in keys if arm in arms})


def by_arm(keys: Iterable[str]) -> list[str]:
    """Cells as "setting/arm on seeds 1 to 3"."""
    found: dict[str, list[int]] = {}
    for key in keys:
        arm, _, seed = key.rpartition("/")
        found.setdefault(arm, []).append(int(seed))
    return [f"{escape(arm)} on {span(sorted(numbers))}" for arm, numbers in sorted(found.items())]


def span(numbers: list[int]) -> str:
    """Seeds in words."""
    if len(numbers) == 1:
        return f"seed {numbers[0]}"
    if numbers == [*range(numbers[0], numbers[-1] + 1)]:
        return f"seeds {numbers[0]} to {numbers[-1]}"
    return f"seeds {', '.join(map(str, numbers))}"


def command(ledger: Ledger) -> str:
    """What has to be typed to make the same study."""
    extra, quick = seeds(ledger, extra=True), is_quick(ledger)
    changed = {key: value for header in ledger["settings"].values() for key, value in changes(header["toml"]).items()}
    words = ["compactionrl", "study"]
    for name in ledger["settings"]:
        words += ["--setting", name if (PACKAGED / f"{name}.toml").is_file() else f"{name}.toml"]
    words += ["--seeds", str(len(seeds(ledger, extra=False)))] + ["--extra"] * bool(extra) + ["--quick"] * quick
    for key, value in changed.items():
        if not (quick and QUICK.get(key) == value):
            words += [f"--{key}", value if isinstance(value, str) else json.dumps(value)]
    return shlex.join(words)


def duration(sittings: Iterable[Mapping[str, Any]]) -> str:
    """Of all sittings together, in words."""
    minutes = sum(sitting["seconds"] for sitting in sittings) / 60
    return f"{minutes / 60:.1f} hours" if minutes >= 120 else f"{minutes:.0f} minutes"


def tasks(ledger: Ledger) -> str:
    settings = ledger["settings"].items()
    return " and ".join(f"{header['tasks']:,} held-out tasks of {escape(name)}" for name, header in settings)


def repetitions(ledger: Ledger) -> str:
    """The seeds of the paper's arms and of the others."""
    found = {"the paper's arms": seeds(ledger, extra=False), "those beyond the paper": seeds(ledger, extra=True)}
    return "; ".join(f"{kind} on {span(numbers)}" for kind, numbers in found.items() if numbers) or "none yet"


ABOUT = (
    "The CompactionRL paper (arXiv 2607.05378) compares reinforcement learning with and without trained context compaction, "
    "on large models and software tasks. This report makes the same comparisons in kind, on tasks that one machine plays by "
    "the thousand and with policies small enough to train from nothing. It asks which of the paper's orderings hold here. "
    "Absolute figures are not comparable: they belong to other models and other tasks."
)
