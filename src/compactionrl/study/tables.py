"""The study's tables in Markdown: pure functions of the ledger and a setting. What is not finished yet is a dash."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any, get_args

from compactionrl.study import claims
from compactionrl.study.bootstrap import Interval, Paired, interval, outcomes
from compactionrl.study.claims import CLAIMS, XN, Claim, Ledger
from compactionrl.study.markdown import (
    DASH,
    change,
    escape,
    number,
    percent,
    percents,
    points,
    seed_points,
    signed,
    table,
)

Cell = dict[str, Any]

ENDS = 5
"""Updates that stand for the beginning and for the end of training."""
LATE = 10
"""Last updates over which credit is averaged, as the ledger's explained variance is."""

RATES = "Pass@1 in %: mean over seeds (95% interval, seeds and held-out tasks resampled)."
PAIRED = "Differences in points, paired by seed and task."
CHANCE = "Nothing is corrected for many comparisons: one in twenty without any difference would be decided by chance."
DAGGER = "† Here the t interval over the seeds, which takes the tasks as given, does not say the same."


def pass_table(ledger: Ledger, setting: str) -> str:
    """Tables 2 and 3 in kind: Pass@1 of every variant in every mode, and its distance from CompactionRL."""
    header = ledger["settings"][setting]
    trained_in = {variant["name"]: variant["trained_in"].get(setting) for variant in ledger["variants"]}
    head = ["variant", "trained in", *header["modes"], f"{header['compacting']}, to {title(ledger, 'full')}", "seeds"]
    rows = (
        [
            title(ledger, name),
            trained_in[name] or DASH,
            *(rate(ledger, setting, name, mode) for mode in header["modes"]),
            points(to_full(ledger, setting, name)),
            seeds(ledger, setting, name),
        ]
        for name in names(ledger)
    )
    return table(head, rows, notes=[f"{RATES} {PAIRED}"])


def seed_table(ledger: Ledger, setting: str) -> str:
    """Pass@1 of every seed."""
    numbers = sorted({cell["seed"] for cell in ledger["cells"].values() if cell["setting"] == setting})
    rows = []
    for name in names(ledger):
        for mode in ledger["settings"][setting]["modes"]:
            found = outcomes(ledger, setting, name, mode).per_seed
            rows.append([title(ledger, name), mode, *(percent(found.get(seed)) for seed in numbers)])
    return table(["variant", "mode", *(f"seed {seed}" for seed in numbers)], rows, left=2)


def ablation_table(ledger: Ledger, setting: str) -> str:
    """Table 4 in kind: CompactionRL without each of its two parts, in the compacting mode."""
    compacting = ledger["settings"][setting]["compacting"]
    rows = []
    for name in ("full", "segment-loss", "segment-gae"):
        found = to_full(ledger, setting, name)
        measured = rate(ledger, setting, name, compacting)
        rows.append([title(ledger, name), measured, points(found), seed_points(found), seeds(ledger, setting, name)])
    head = ["variant", compacting, f"to {title(ledger, 'full')}", "t interval", "seeds"]
    return table(head, rows, notes=[f"{RATES} {PAIRED}"])


def swap_table(ledger: Ledger, setting: str) -> str:
    """Table 1 in kind: Pass@1 of a policy that acts, by who writes its summaries."""
    cells = cells_of(ledger, setting, "swap")
    pairs = dict.fromkeys(pair for cell in cells for pair in cell["evaluation"])
    executors, summarisers = (dict.fromkeys(pair.split("/")[side] for pair in pairs) for side in (0, 1))
    rows = (
        [title(ledger, acts), *(rate(ledger, setting, "swap", f"{acts}/{writes}") for writes in summarisers)]
        for acts in executors
    )
    head = ["acts", *(f"summaries: {title(ledger, name)}" for name in summarisers)]
    return table(head, rows, notes=[f"{RATES} Seeds: {len(cells)}."])


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
    return table(head, map(row, names(ledger)), notes=["n: rollouts that compacted, of all seeds together."])


def training_table(ledger: Ledger, setting: str) -> str:
    """Figure 4 in kind: lengths and entropy in the first and in the last updates."""
    curves = {"summary_tokens": "tokens per summary", "response_tokens": "tokens per response", "entropy": "entropy"}

    def row(name: str) -> list[str]:
        cells = cells_of(ledger, setting, name)
        ends = [(updates(cells, key, 0, ENDS), updates(cells, key, -ENDS)) for key in curves]
        return [title(ledger, name), *(change(*pair) for pair in ends), str(len(cells))]

    note = f"Mean of the first {ENDS} → of the last {ENDS} updates."
    return table(["variant", *curves.values(), "seeds"], map(row, trained(ledger)), notes=[note])


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
    return table(head, map(row, runs), notes=[note])


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
    return table(head, map(row, names(ledger)))


def verdict_table(ledger: Ledger, setting: str) -> str:
    """Every ordering of the paper's tables, and whether it holds here."""
    verdicts = [claims.judge(claim, ledger, setting) for claim in CLAIMS]
    rows = (
        [
            verdict.claim.table,
            escape(verdict.claim.text),
            in_paper(verdict.claim),
            marked(verdict.outcome, verdict.agrees),
            points(verdict.paired),
            seed_points(verdict.paired),
            str(len(verdict.paired.per_seed) if verdict.paired else 0),
        ]
        for verdict in verdicts
    )
    head = ["table", "claim", "paper", "here", "difference", "t interval", "seeds"]
    return table(head, rows, left=2, notes=footnotes(verdicts))


def count_table(ledger: Ledger, setting: str) -> str:
    """How many of the paper's orderings hold here: of those all of its columns show, and of the mixed ones."""
    words = get_args(claims.Outcome)
    counts = {"in all of the paper's columns": Counter[str](), "mixed in the paper": Counter[str]()}
    consistent, mixed = counts.values()
    for claim in CLAIMS:
        kind = consistent if claim.held == len(claim.paper) else mixed
        kind[claims.judge(claim, ledger, setting).outcome] += 1
    rows = ([kind, *(str(found[word]) for word in words), str(found.total())] for kind, found in counts.items())
    return table(["orderings", *words, "all"], rows)


def question_table(ledger: Ledger, setting: str) -> str:
    """The questions that go beyond the paper."""
    answers = claims.answers(ledger, setting)

    def row(answer: claims.Answer) -> list[str]:
        found = answer.estimate if isinstance(answer.estimate, Paired) else None
        size = f"{percents(answer.estimate)} %" if isinstance(answer.estimate, Interval) else points(found)
        return [escape(answer.question), marked(answer.result, answer.agrees), size, seed_points(found)]

    head = ["question", "answer", "difference, or share", "t interval"]
    return table(head, map(row, answers), left=2, notes=footnotes(answers))


def footnotes(found: Sequence[claims.Verdict | claims.Answer]) -> list[str]:
    return [f"{PAIRED} {CHANCE}", *([] if all(each.agrees for each in found) else [DAGGER])]


def marked(word: str, agrees: bool) -> str:
    return word if agrees else f"{word} †"


def in_paper(claim: Claim) -> str:
    """The paper's mean difference, and in how many of its columns it goes this way."""
    gain = fmean(better - worse for better, worse in claim.paper) / 100
    mixed = "" if claim.held == len(claim.paper) else "mixed, "
    return f"{signed(gain)} ({mixed}{claim.held} of {len(claim.paper)})"


def names(ledger: Ledger) -> list[str]:
    return [variant["name"] for variant in ledger["variants"]]


def trained(ledger: Ledger) -> list[str]:
    return [name for name in names(ledger) if name != "base"]


def title(ledger: Ledger, name: str) -> str:
    """The title of a variant; a summariser that is none goes by its name."""
    return escape(next((each["title"] for each in ledger["variants"] if each["name"] == name), name))


def cells_of(ledger: Ledger, setting: str, name: str) -> list[Cell]:
    return [cell for cell in ledger["cells"].values() if (cell["setting"], cell["variant"]) == (setting, name)]


def seeds(ledger: Ledger, setting: str, name: str) -> str:
    return str(len(cells_of(ledger, setting, name)))


def rate(ledger: Ledger, setting: str, name: str, mode: str) -> str:
    found = outcomes(ledger, setting, name, mode)
    return percents(interval(found.matrix) if found.seeds else None)


def to_full(ledger: Ledger, setting: str, name: str) -> Paired | None:
    return claims.compare(ledger, setting, (name, XN), ("full", XN)) if name != "full" else None


def updates(cells: Sequence[Cell], curve: str, start: int, stop: int | None = None) -> float | None:
    """Mean over seeds of a curve's mean over some updates; those without a value do not count."""
    return average(average(cell["curves"].get(curve, [])[start:stop]) for cell in cells)


def average(values: Iterable[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return fmean(found) if found else None
