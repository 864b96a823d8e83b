"""The report of a study: study.md with its figures beside it, and study.html, which holds all of it in one file."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from compactionrl.study import tables
from compactionrl.study.claims import CLAIMS, judge
from compactionrl.study.figures import figures
from compactionrl.study.grid import SWAP
from compactionrl.study.markdown import escape, points, table
from compactionrl.study.page import anchor, demote, page
from compactionrl.study.preface import arms_table, declaration, facts, warnings
from compactionrl.study.variants import BASE, FULL
from compactionrl.training.atomic import write_file

Ledger = Mapping[str, Any]

NAME = "study"
DISCUSSION = f"{NAME}-discussion.md"
"""Written by a person, beside the report: why the results are as they are. Without it, the report has no such section."""
TITLE = "CompactionRL's comparisons, in kind"


class Part(NamedTuple):
    """A heading of a setting's section, and what stands under it."""

    title: str
    text: str
    table: Callable[[Ledger, str], str]
    figures: Mapping[str, str] = {}
    """Name -> caption."""
    about: str = "any"
    """The kind of cells without which it is left out, see `finished_kinds`."""


def write_report(ledger: Ledger, output: Path) -> list[Path]:
    """Write the report of a study, finished or not, into `output`; the paths of its files.

    The same ledger (and discussion) gives the same bytes. ValueError for a ledger whose cells cannot be compared.
    """
    output.mkdir(parents=True, exist_ok=True)
    images = {
        f"{NAME}-{slug}-{figure}.png": data
        for setting, slug in slugs(ledger["settings"]).items()
        for figure, data in figures(ledger, setting).items()
    }
    discussion = output / DISCUSSION
    text = report(ledger, images, discussion.read_text() if discussion.exists() else "")
    files = {**images, f"{NAME}.md": text.encode(), f"{NAME}.html": page(text, images, TITLE).encode()}
    return [write(output / name, data) for name, data in files.items()]


def write(path: Path, data: bytes) -> Path:
    write_file(path, lambda partial: partial.write_bytes(data))
    return path


def slugs(settings: Iterable[str]) -> dict[str, str]:
    """Each setting's name as it stands in names of files, all different even where case does not count."""
    found: dict[str, str] = {}
    for setting in settings:
        slug = re.sub(r"[^a-z0-9_-]+", "-", setting.lower())
        while slug in found.values():
            slug += "-"
        found[setting] = slug
    return found


def report(ledger: Ledger, images: Collection[str], discussion: str = "") -> str:
    """The whole report in Markdown. It refers to those of `images` that have a place in it."""
    settings = slugs(ledger["settings"])
    sections = {
        "Main result": main_result(ledger),
        "What of the paper holds": verdicts(ledger),
        "The arms": [arms_table(ledger)] if ledger["variants"] else [],
        **{f"Setting {escape(name)}": setting_section(ledger, name, slug, images) for name, slug in settings.items()},
        "Why we think so": [demote(discussion, 3)] if discussion.strip() else [],
        "How the intervals are made": [STATISTICS],
        "Limits": [LIMITS],
    }
    sections = {title: blocks for title, blocks in sections.items() if blocks}
    contents = " · ".join(f"[{title}](#{anchor(title)})" for title in sections)
    blocks = [f"# {TITLE}", *facts(ledger), *warnings(ledger), contents]
    for title, below in sections.items():
        blocks += [f"## {title}", *below]
    return "\n\n".join(block.strip("\n") for block in blocks if block) + "\n"


def main_result(ledger: Ledger) -> list[str]:
    """The paper's arms in the compacting mode of every setting."""
    modes = {name: header["compacting"] for name, header in ledger["settings"].items() if finished(ledger, name)}
    if not modes:
        return [
            "Nothing is finished yet, so nothing is compared. `compactionrl study` runs it, and goes on where it was."
        ]
    head = ["variant"]
    for name, mode in modes.items():
        head += [f"{escape(name)}, {mode}", f"to {tables.title(ledger, FULL)}"]
    rows = []
    for arm in (one["name"] for one in ledger["variants"] if not one["extra"]):
        row = [tables.title(ledger, arm)]
        for name, mode in modes.items():
            row += [tables.rate(ledger, name, arm, mode), points(tables.to_full(ledger, name, arm))]
        rows.append(row)
    return [table(head, rows, notes=[f"{tables.RATES} {tables.PAIRED}"])]


def verdicts(ledger: Ledger) -> list[str]:
    """The paper's orderings: counted in every setting, then one by one across settings."""
    names = [name for name in ledger["settings"] if finished(ledger, name)]
    if not names:
        return []
    counts = [f"**{escape(name)}**\n\n{tables.count_table(ledger, name)}" for name in names]
    return [VERDICTS, *counts, overview_table(ledger, names)]


def overview_table(ledger: Ledger, names: Sequence[str]) -> str:
    """Every ordering's verdict in each of the named settings."""
    found = [[judge(claim, ledger, name) for name in names] for claim in CLAIMS]
    rows = [
        [
            claim.table,
            escape(claim.text),
            tables.in_paper(claim),
            *(tables.marked(verdict.outcome, verdict.agrees) for verdict in row),
        ]
        for claim, row in zip(CLAIMS, found, strict=True)
    ]
    notes = [] if all(verdict.agrees for row in found for verdict in row) else [tables.DAGGER]
    return table(["table", "ordering", "paper", *map(escape, names)], rows, left=2, notes=notes)


def setting_section(ledger: Ledger, setting: str, slug: str, images: Collection[str]) -> list[str]:
    """Everything about one setting. What nothing has run for is left out: parts, and arms beyond the paper."""
    blocks = declaration(ledger["settings"][setting])
    arms = finished(ledger, setting)
    if not arms:
        return [*blocks, "No cell of this setting is finished yet."]
    seen = {**ledger, "variants": [one for one in ledger["variants"] if not one["extra"] or one["name"] in arms]}
    kinds = finished_kinds(ledger, arms)
    for part in (part for part in PARTS if part.about in kinds):
        # The questions name arms that may not have run, and say so.
        found = part.table(ledger if part.about == "extra" else seen, setting)
        blocks += [f"### {part.title}", part.text, found]
        for figure, caption in part.figures.items():
            name = f"{NAME}-{slug}-{figure}.png"
            blocks += [f"![{caption}]({name})", f"*{caption}*"] if name in images else []
    return blocks


def finished(ledger: Ledger, setting: str) -> set[str]:
    """The arms (and "swap") of which some seed is finished."""
    return {cell["variant"] for cell in ledger["cells"].values() if cell["setting"] == setting}


def finished_kinds(ledger: Ledger, arms: Collection[str]) -> set[str]:
    """What can be reported of some finished arms."""
    beyond = {one["name"] for one in ledger["variants"] if one["extra"]}
    found = {"any": arms, "swap": {SWAP} & {*arms}, "trained": {*arms} - {BASE, SWAP}, "extra": beyond & {*arms}}
    return {kind for kind, members in found.items() if members}


ROWS = "Filled: mean over seeds. Rings: every seed. Diamonds: arms beyond the paper."
BAND = "Lines: mean over seeds. Bands: from the lowest to the highest seed."
PARTS = (
    Part("The paper's orderings", "The verdicts above with the differences behind them.", tables.verdict_table),
    Part(
        "Pass@1 (Tables 2 and 3 in kind)",
        "x1: one window of C, compaction off. xN: up to N - 1 compactions. 2C: one window of 2C, compaction off.",
        tables.pass_table,
        {
            "pass": f"Pass@1 in every mode. {ROWS} Bars: 95% intervals.",
            "differences": f"Paired differences to the full method, in the compacting mode. {ROWS} Bars: 95% intervals.",
        },
    ),
    Part(
        "Who writes the summaries (Table 1 in kind)",
        "A policy acts in the compacting mode, and another one writes its summaries. *perfect* and *empty* are scripted: "
        "all facts in view, or none.",
        tables.swap_table,
        about="swap",
    ),
    Part("The method's two parts (Table 4 in kind)", "In the compacting mode.", tables.ablation_table, about="trained"),
    Part(
        "What the rollouts do (Figure 3 in kind)",
        "Measured in the compacting mode, after training.",
        tables.behaviour_table,
        {"behaviour": f"Compactions, tool calls, and Pass@1 of the tasks that compacted. {ROWS}"},
    ),
    Part(
        "How training goes (Figure 4 in kind)",
        "From the batches that are trained on, each arm in the modes that it is trained in: compare heights with care.",
        tables.training_table,
        {
            "dynamics": f"Lengths and entropy over training. {BAND}",
            "reward": f"Reward over training. {BAND} Dashed: arms beyond the paper.",
        },
        about="trained",
    ),
    Part(
        "Credit and critic",
        "How much of the credit summaries get, and how well the critic knows each segment.",
        tables.credit_table,
        {"credit": f"Credit of the summaries and the critic's explained variance. {BAND}"},
        about="trained",
    ),
    Part("Beyond the paper", "Questions that the paper leaves open.", tables.question_table, about="extra"),
    Part("Every seed", "Pass@1 in %.", tables.seed_table),
    Part("What it costs", "Wall-clock time counts neighbours on the same machine.", tables.cost_table),
)
"""A setting's section."""

VERDICTS = (
    "Every ordering that the paper's tables show, with the paper's own mean difference in points and in how many of its "
    "columns (models and benchmarks) it goes this way. *holds*: the 95% interval of the paired difference lies above 0; "
    "*does not hold*: it lies below 0, so the opposite is seen here; *undecided*: it contains 0, which shows neither a "
    "difference nor that there is none. The differences stand in each setting's section."
)
STATISTICS = """\
Every policy of a setting meets the same held-out tasks, so policies are compared task by task and seed by seed: the
difference of two arms is the mean over seeds of the mean difference over tasks that both finished.

Seeds and tasks are both samples. The intervals come from the crossed bootstrap: seeds and tasks are resampled
independently of each other, 10,000 times, and the interval holds the middle 95% of what comes out. It counts the noise of
single rollouts more than once, so it tends to be too wide where that noise dominates; over a handful of seeds that differ
much it is too narrow, as any percentile bootstrap is. That is why a t interval over the seeds' own differences stands
beside it. It takes the tasks as given and needs no resampling; where the two disagree (†), the verdict is not safe.

No interval is corrected for multiple comparisons. Among many orderings some are decided by chance alone."""
LIMITS = """\
- The packaged tasks are generated and ask for remembering and little else. Real agents also search, write code and err in
  ways that are not possible here.
- The policies are tiny and were taught the tasks' format by a warm start. What a large model brings along, they lack, so
  sizes of effects do not carry over; orderings may not either.
- Seeds are few. An effect smaller than the intervals may exist and not be seen.
- Learning rates and the like are shared by all arms and not tuned for each. An arm might do better with its own."""
