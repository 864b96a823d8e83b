"""The report of a study: study.md with its figures beside it, and study.html, which holds all of it in one file."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from pathlib import Path

from compactionrl.study.arms import Ledger, rate, title, to_full
from compactionrl.study.declaration import declaration
from compactionrl.study.figures import figures
from compactionrl.study.grid import PERFECT, SWAP
from compactionrl.study.markdown import escape, points, table
from compactionrl.study.page import anchor, demote, page
from compactionrl.study.parts import LIMITS, PARTS, STATISTICS, VERDICTS
from compactionrl.study.preface import arms_table, facts, sittings_table, warnings
from compactionrl.study.tables import PAIRED, RATES
from compactionrl.study.variants import BASE, FULL
from compactionrl.study.verdicts import count_table, overview_table
from compactionrl.training.atomic import write_file

NAME = "study"
DISCUSSION = f"{NAME}-discussion.md"
"""Written by a person, beside the report: why the results are as they are. Without it, the report has no such section."""
TITLE = "CompactionRL's comparisons, in kind"


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
        "How long it took": [sittings_table(ledger)] if ledger["sessions"] else [],
    }
    sections = {heading: blocks for heading, blocks in sections.items() if blocks}
    contents = " · ".join(f"[{heading}](#{anchor(heading)})" for heading in sections)
    blocks = [f"# {TITLE}", *facts(ledger), *warnings(ledger), contents]
    for heading, below in sections.items():
        blocks += [f"## {heading}", *below]
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
        head += [escape(f"{name}, {mode}"), f"to {title(ledger, FULL)}"]
    rows = []
    for arm in (one["name"] for one in ledger["variants"] if not one["extra"]):
        row = [title(ledger, arm)]
        for name, mode in modes.items():
            row += [rate(ledger, name, arm, mode), points(to_full(ledger, name, arm))]
        rows.append(row)
    return [table(head, rows, notes=[f"{RATES} {PAIRED}"])]


def verdicts(ledger: Ledger) -> list[str]:
    """The orderings in the paper's tables: counted in every setting, then one by one across settings."""
    found = [name for name in ledger["settings"] if finished(ledger, name)]
    if not found:
        return []
    counts = [f"**{escape(name)}**\n\n{count_table(ledger, name)}" for name in found]
    return [VERDICTS, *counts, overview_table(ledger, found)]


def setting_section(ledger: Ledger, setting: str, slug: str, images: Collection[str]) -> list[str]:
    """Everything about one setting. What nothing has run for is left out: parts, and arms beyond the paper."""
    blocks = declaration(ledger["settings"][setting])
    arms = finished(ledger, setting)
    if not arms:
        return [*blocks, "No arm of this setting is finished yet."]
    seen = {**ledger, "variants": [one for one in ledger["variants"] if not one["extra"] or one["name"] in arms]}
    kinds = finished_kinds(ledger, arms)
    for part in (part for part in PARTS if part.about in kinds):
        # The questions name arms that may not have run, and say so.
        shown = ledger if part.about == "extra" else seen
        blocks += [f"### {part.title}", part.text, *(make(shown, setting) for make in part.tables)]
        for figure, caption in part.figures.items():
            name = f"{NAME}-{slug}-{figure}.png"
            blocks += [f"![{caption}]({name})", f"*{caption}*"] if name in images else []
    return blocks


def finished(ledger: Ledger, setting: str) -> set[str]:
    """The arms (and "swap") of which some seed is finished."""
    return {cell["variant"] for cell in ledger["cells"].values() if cell["setting"] == setting} - {PERFECT}


def finished_kinds(ledger: Ledger, arms: Collection[str]) -> set[str]:
    """What can be reported of some finished arms."""
    beyond = {one["name"] for one in ledger["variants"] if one["extra"]}
    found = {"any": arms, "swap": {SWAP} & {*arms}, "trained": {*arms} - {BASE, SWAP}, "extra": beyond & {*arms}}
    return {kind for kind, members in found.items() if members}
