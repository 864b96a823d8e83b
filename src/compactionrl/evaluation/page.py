"""The report of an evaluation, in Markdown: functions of its record alone (`results.json`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from compactionrl.evaluation.report import BEHAVIOUR
from compactionrl.markdown import DASH, code, number, percent, signed, table
from compactionrl.markdown import escape as plain
from compactionrl.show import escape as printable

Record = Mapping[str, Any]


def page(record: Record) -> str:
    """Pass@1 of every arm, paired differences, behaviour, tokens, and what was measured how."""
    parts = [head, passes, differences, behaviour, tokens, troubles]
    return "\n".join(text for part in parts if (text := part(record)))


def head(record: Record) -> str:
    about = record["about"]
    lines = [
        f"# {escape(about['agent'])}",
        "",
        f"{about['n_tasks']} held-out tasks of {code(about['tasks'])}, {about['runs']} "
        f"run{'s' * (about['runs'] > 1)} each; C = {about['budget']:,} tokens; {escape(about['sampler'])}.",
    ]
    if not about["exact"]:
        lines += ["", "**Budgets are approximate**: this endpoint speaks text, so tokens are estimated, not counted."]
    for name, described in about["summarisers"].items():
        if not any(arm.endswith(f"+{name}") for arm in record["arms"]):
            continue  # of an earlier command in the same folder
        lines += ["", f"Summaries by {code(printable(name))}: {escape(described)}."]
    if record["missing"]:
        lines += ["", f"**Not complete**: {record['missing']} rollouts are missing. The same command goes on."]
    return "\n".join(lines) + "\n"


def passes(record: Record) -> str:
    runs = range(record["about"]["runs"]) if record["about"]["runs"] > 1 else ()
    header = ["", "Pass@1, % (95% interval)", *(f"run {run + 1}" for run in runs), "rollouts", "broke down"]
    rows = []
    for name, result in record["arms"].items():
        each = result["outcomes"].split()
        per_run = [percent(share(each[run])) if run < len(each) else DASH for run in runs]
        rows.append([escape(name), rate(result), *per_run, str(result["n"]), str(result["errors"])])
    return "## Pass@1\n\n" + table(header, rows)


def differences(record: Record) -> str:
    rows = [
        [title(found), points(found), str(found["tasks"])]
        for found in record["differences"]
        if found["difference"] is not None
    ]
    if not rows:
        return ""
    return "## Differences\n\nTask by task.\n\n" + table(["", "points (95% interval)", "tasks"], rows)


def title(found: Mapping[str, Any]) -> str:
    over = " (tasks that compacted)" if found["compacted"] else ""
    return f"{escape(found['arm'])} − {escape(found['minus'])}{over}"


def behaviour(record: Record) -> str:
    arms = record["arms"]
    rows = [[label, *(show(result) for result in arms.values())] for label, show in BEHAVIOUR.items()]
    return "## Behaviour\n\nPer rollout.\n\n" + table(["", *map(escape, arms)], rows)


def tokens(record: Record) -> str:
    columns: dict[str, Callable[[Mapping[str, int], Mapping[str, int]], str]] = {
        "requests": lambda r, s: f"{r['requests'] + s['requests']:,}",
        "prompt tokens": lambda r, s: f"{r['prompt'] + s['prompt']:,}",
        "of them new": lambda r, s: f"{r['new'] + s['new']:,}",
        "sampled": lambda r, s: f"{r['sampled'] + s['sampled']:,}",
        "of them summaries": lambda r, s: f"{s['sampled']:,}",
    }
    priced = any(result["cost"] is not None for result in record["arms"].values())
    rows = []
    for name, result in record["arms"].items():
        spent = result["tokens"]
        cells = [show(spent["responses"], spent["summaries"]) for show in columns.values()]
        rows.append([escape(name), *cells, *([number(result["cost"])] if priced else [])])
    notes = [
        "New: what no earlier request of the same window held; a server with a prefix cache computes those, or fewer."
    ]
    if priced:
        notes.append("Cost: all prompt tokens at one price, cached or not; another summariser's tokens are not in it.")
    return "## Tokens\n\n" + table(["", *columns, *(["cost"] if priced else [])], rows, notes=notes)


def troubles(record: Record) -> str:
    lines = [
        f"- {escape(name)}: {count} × {escape(cause)}"
        for name, result in record["arms"].items()
        for cause, count in result["error_causes"].items()
    ]
    return "\n".join(["## Broke down, not in the figures", "", *lines]) + "\n" if lines else ""


def escape(text: str) -> str:
    """Whatever servers and environments call themselves, and say, is text."""
    return plain(printable(text))


def share(outcomes: str) -> float | None:
    """Solved, of those that did not break down."""
    finished = [outcome for outcome in outcomes if outcome != "-"]
    return finished.count("1") / len(finished) if finished else None


def rate(result: Mapping[str, Any]) -> str:
    if result["pass_at_1"] is None:
        return DASH
    return f"{percent(result['pass_at_1'])} ({percent(result['low'])}–{percent(result['high'])})"


def points(found: Mapping[str, Any]) -> str:
    return f"{signed(found['difference'])} ({signed(found['low'])} to {signed(found['high'])})"
