"""What a reader must know before any figure: what was run, what of it is finished, and what every setting declares."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections.abc import Iterable, Mapping
from typing import Any

from compactionrl.config import EnvironmentConfig, put
from compactionrl.study.grid import PACKAGED, QUICK
from compactionrl.study.markdown import escape, table

Ledger = Mapping[str, Any]

CHANGED = "# Changed on the command line:\n"
"""Behind it, the text of a setting names what was changed, a key on each line."""
DIALS = ("context", "limits", "train", "warm_start")
"""Sections of a declaration that are shown; prompts and other texts in them are not."""


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
        f"Repetitions: {repetitions(ledger)}. A seed repeats everything: the base from random weights, the critic, the "
        "order of the tasks, the sampling. All arms of a seed start from the same base.",
        "All arms of a setting share its data, the number of rollouts per update, the number of updates and every "
        "hyper-parameter but what an arm is named for; none is tuned for an arm. How a setting was chosen stands at its head.",
        f"Measured are the policies behind the last update, not the best ones on the way, on {tasks(ledger)}; every "
        "policy meets the same ones, once in every mode.",
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
        found.append(f"**Incomplete.** {len(missing)} cells are missing: {'; '.join(by_arm(missing))}.")
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


def declaration(header: Mapping[str, Any]) -> list[str]:
    """A setting in one short table, with what its author says at the head of the file."""
    declared = tomllib.loads(header["toml"])
    for key, value in changes(header["toml"]).items():
        put(declared, key, value)
    environment, windows = declared.get("environment", {}), header["windows"]
    rows = {
        "window C": f"{header['budget']:,} tokens",
        "compacting mode": f"{header['compacting']}: up to {windows - 1} compactions, so {windows} windows of C",
        "modes measured": ", ".join(header["modes"]),
        "training": f"{header['steps']} policy updates of {header['rollouts_per_step']} rollouts",
        "held-out tasks": f"{header['tasks']:,}",
        "tasks": code(environment.get("tasks", EnvironmentConfig().tasks)),
        "their dials": dials(environment.get("options", {})),
        **{section.replace("_", " "): dials(declared.get(section, {})) for section in DIALS},
    }
    return [about(header["toml"]), table(["", ""], ([name, value] for name, value in rows.items() if value), left=2)]


def about(toml: str) -> str:
    """The comment at the head of a setting."""
    head = re.match(r"(?:#.*\n)*", toml)
    lines = head[0].splitlines() if head else []
    return "\n".join(escape(line.lstrip("# ")) for line in lines)


def dials(section: Mapping[str, Any]) -> str:
    shown = {key: value for key, value in section.items() if not isinstance(value, str | dict)}
    return ", ".join(code(f"{key} = {json.dumps(value)}") for key, value in shown.items())


def changes(toml: str) -> dict[str, Any]:
    """What was changed on the command line."""
    lines = (line.removeprefix("# ").partition(" = ") for line in toml.partition(CHANGED)[2].splitlines())
    return {key: json.loads(value) for key, _, value in lines}


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


def code(text: str) -> str:
    """A code span, whatever is in it, that also stands in a table."""
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    pad = " " * (len(fence) > 1)
    return f"{fence}{pad}{escape(text)}{pad}{fence}"


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
