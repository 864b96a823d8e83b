"""The study that the repository reports: every figure in docs/study.md follows from docs/study.json."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from compactionrl.study.grid import Cell, grid, load_setting
from compactionrl.study.report import DISCUSSION, report
from compactionrl.study.variants import VARIANTS

DOCS = Path(__file__).parents[2] / "docs"
TITLES = {one.name: one.title for one in VARIANTS}


@pytest.fixture(scope="module")
def ledger() -> dict[str, Any]:
    return json.loads((DOCS / "study.json").read_text())


@pytest.fixture(scope="module")
def text() -> str:
    return (DOCS / "study.md").read_text()


def rows(text: str, setting: str, heading: str) -> Iterator[list[str]]:
    """Cells of the first table below a heading in a setting's section."""
    section = text.partition(f"## Setting {setting}\n")[2].partition(f"### {heading}")[2]
    table = section[section.index("| ") :].partition("\n\n")[0]
    for line in table.splitlines()[2:]:
        yield [cell.strip() for cell in line.strip("|").split(" | ")]


def test_the_report_is_what_its_record_says(ledger: dict[str, Any], text: str) -> None:
    images = [path.name for path in DOCS.glob("study-*.png")]
    discussion = DOCS / DISCUSSION
    assert report(ledger, images, discussion.read_text() if discussion.exists() else "") == text


def test_pass_rates_recomputed_by_hand(ledger: dict[str, Any], text: str) -> None:
    for setting, header in ledger["settings"].items():
        shown = {row[0]: row[2 : 2 + len(header["modes"])] for row in rows(text, setting, "Pass@1")}
        for variant in {
            cell["variant"] for cell in ledger["cells"].values() if cell["setting"] == setting
        } & TITLES.keys():
            cells = [c for c in ledger["cells"].values() if (c["setting"], c["variant"]) == (setting, variant)]
            for mode, found in zip(header["modes"], shown[TITLES[variant]], strict=True):
                outcomes = [cell["evaluation"][mode]["outcomes"] for cell in cells]
                assert {len(each) for each in outcomes} == {header["tasks"]}
                rate = fmean(each.count("1") / (len(each) - each.count("-")) for each in outcomes)
                assert found.split()[0] == f"{100 * rate:.1f}"


def test_the_record_is_of_the_declared_settings(ledger: dict[str, Any]) -> None:
    """Finished cells can be reused only by the declaration that made them."""
    settings = [load_setting(name, {}) for name in ledger["settings"]]
    declared: dict[str, Cell] = {cell.key: cell for cell in grid(settings, 5, extra=True)}
    assert ledger["cells"].keys() <= declared.keys()
    for key, cell in ledger["cells"].items():
        assert cell["fingerprint"] == declared[key].fingerprint
    assert all(ledger["settings"][s.name]["toml"] == s.toml for s in settings)
    assert all(header["tasks"] >= 512 for header in ledger["settings"].values())


def test_all_arms_of_a_seed_began_with_the_same_base(ledger: dict[str, Any]) -> None:
    bases: dict[tuple[str, int], set[str]] = {}
    for cell in ledger["cells"].values():
        bases.setdefault((cell["setting"], cell["seed"]), set()).add(cell["base"])
    assert all(len(found) == 1 for found in bases.values())
    assert len({next(iter(found)) for found in bases.values()}) == len(bases)
