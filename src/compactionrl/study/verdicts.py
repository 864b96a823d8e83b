"""The paper's orderings and the questions beyond it, as a study answers them, in Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import get_args

from compactionrl.study import claims
from compactionrl.study.arms import Ledger
from compactionrl.study.bootstrap import Interval, Paired
from compactionrl.study.claims import CLAIMS, Answer, Claim, Verdict
from compactionrl.study.markdown import escape, percents, points, seed_points, signed, table
from compactionrl.study.tables import DAGGER, PAIRED

CHANCE = (
    "Nothing is corrected for many comparisons. How often an interval decides where there is no difference depends on how "
    "much seeds differ: less often than one time in twenty when they differ little, more often when they differ much. The "
    "t interval over the seeds stands beside it."
)
EXCLUDED = (
    "‡ Undecided, but the interval excludes the paper's mean difference (which is one of other models and other tasks)."
)
COMMON = "Differences use the seeds that both arms have."
KINDS = {"In all of the paper's columns": True, "Mixed in the paper": False}
"""Claims by whether they are consistent, the paper's consistent ones first."""


def verdict_table(ledger: Ledger, setting: str) -> str:
    """Every ordering of the paper's tables, and whether it holds here: two tables, the consistent ones first."""
    head = ["ordering", "table", "paper", "here", "difference", "t interval", "seeds"]
    verdicts = [claims.judge(claim, ledger, setting) for claim in CLAIMS]

    def row(verdict: Verdict) -> list[str]:
        found = verdict.paired
        seeds = str(len(found.per_seed) if found else 0)
        return [*ordering(verdict.claim), word(verdict), points(found), seed_points(found), seeds]

    rows = {verdict.claim: row(verdict) for verdict in verdicts}
    return two_tables(head, rows, [f"{PAIRED} {CHANCE}", *footnotes(verdicts)])


def overview_table(ledger: Ledger, names: Sequence[str]) -> str:
    """Every ordering's verdict in each of the named settings: two tables, the consistent ones first."""
    verdicts = {claim: [claims.judge(claim, ledger, name) for name in names] for claim in CLAIMS}
    rows = {claim: [*ordering(claim), *map(word, row)] for claim, row in verdicts.items()}
    head = ["ordering", "table", "paper", *map(escape, names)]
    return two_tables(head, rows, footnotes([verdict for row in verdicts.values() for verdict in row]))


def two_tables(head: Sequence[str], rows: dict[Claim, list[str]], notes: Sequence[str]) -> str:
    """The orderings that all of the paper's columns agree on, and below them those that are mixed in the paper."""
    blocks = [
        f"**{kind}**\n\n" + table(head, [row for claim, row in rows.items() if claim.consistent == consistent], left=2)
        for kind, consistent in KINDS.items()
    ]
    return "\n".join([*blocks, *(f"{note}\n" for note in notes)])


def count_table(ledger: Ledger, setting: str) -> str:
    """How many of the orderings hold here: of those all of the paper's columns show, and of the mixed ones."""
    words = get_args(claims.Outcome)
    rows = []
    for kind, consistent in KINDS.items():
        among = [claim for claim in CLAIMS if claim.consistent == consistent]
        found = Counter(claims.judge(claim, ledger, setting).outcome for claim in among)
        rows.append([kind, *(str(found[word]) for word in words), str(found.total())])
    return table(["orderings", *words, "all"], rows)


def question_table(ledger: Ledger, setting: str) -> str:
    """The questions that go beyond the paper."""
    answers = claims.answers(ledger, setting)

    def row(answer: Answer) -> list[str]:
        found = answer.estimate if isinstance(answer.estimate, Paired) else None
        size = f"{percents(answer.estimate)} %" if isinstance(answer.estimate, Interval) else points(found)
        return [escape(answer.question), word(answer), size, seed_points(found)]

    head = ["question", "answer", "difference, or share", "t interval"]
    notes = [f"{PAIRED} {COMMON} {CHANCE}", *footnotes(answers)]
    return table(head, map(row, answers), left=2, notes=notes)


def word(found: Verdict | Answer) -> str:
    """What was found, with marks that the footnotes explain."""
    text = found.outcome if isinstance(found, Verdict) else found.result
    return text + " ‡" * excludes(found) + " †" * (not found.agrees)


def footnotes(found: Iterable[Verdict | Answer]) -> list[str]:
    found = [*found]
    notes = {EXCLUDED: any(map(excludes, found)), DAGGER: not all(each.agrees for each in found)}
    return [note for note, needed in notes.items() if needed]


def excludes(found: Verdict | Answer) -> bool:
    return isinstance(found, Verdict) and found.excludes_paper


def ordering(claim: Claim) -> list[str]:
    """Text, table, and the paper's mean difference with how many of its columns go this way."""
    return [escape(claim.text), claim.table, f"{signed(claim.gain)} ({claim.held} of {len(claim.paper)})"]
