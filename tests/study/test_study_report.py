"""The report on disk: what it refers to is there, what it says is the ledger's, and no text in it becomes code."""

import base64
import copy
import json
import random
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from study_ledgers import TITLES, cell, ledger_of, synthetic_ledger

from compactionrl.config import parse_config
from compactionrl.study import preface
from compactionrl.study.claims import CLAIMS
from compactionrl.study.declaration import about, changes, declaration
from compactionrl.study.grid import QUICK
from compactionrl.study.markdown import code
from compactionrl.study.page import anchor, demote, page
from compactionrl.study.preface import by_arm, command, span
from compactionrl.study.report import DISCUSSION, report, slugs, write_report

PNG = b"\x89PNG\r\n\x1a\n"
HOSTILE = "<script>alert(1)</script> ![x](javascript:alert(1)) ![y](http://example.org/y.png) [z](javascript:z) | `$x"
SOME = ("base", "full", "rl-c", "swap", "robust")
OUTCOMES = {"x1": "0000", "x4": "1100", "2C": "0000", "4C": "1111"}


class Reader(HTMLParser):
    """Every tag with its attributes, and the text between them."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.open: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "img", "br", "hr"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.text += data

    def values(self, attribute: str) -> list[str]:
        return [found[attribute] or "" for _, found in self.tags if attribute in found]


def assert_self_contained(html: str) -> Reader:
    """Nothing is run and nothing is loaded."""
    reader = Reader(html)
    assert not {"script", "link", "iframe", "object", "embed", "base", "form"} & {tag for tag, _ in reader.tags}
    assert not [name for _, found in reader.tags for name in found if name.startswith("on")]
    for source in reader.values("src"):
        assert base64.b64decode(source.removeprefix("data:image/png;base64,"), validate=True).startswith(PNG)
    assert "srcset" not in str(reader.tags)
    assert not re.search(r"@import|url\(", html)
    ids = reader.values("id")
    assert len(ids) == len(set(ids))
    for target in reader.values("href"):
        assert target.removeprefix("#") in ids or target.startswith("https://")  # followed by a click, never loaded
    return reader


@pytest.fixture(scope="module")
def ledger() -> dict[str, Any]:
    return synthetic_ledger(seeds=2, extra_seeds=1, tasks=8)


@pytest.fixture(scope="module")
def written(ledger: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path]]:
    output = tmp_path_factory.mktemp("study") / "new"
    return output, write_report(ledger, output)


def test_every_image_that_is_shown_is_there_and_every_one_there_is_shown(written: tuple[Path, list[Path]]) -> None:
    output, paths = written
    assert sorted(paths) == sorted(output.iterdir())  # nothing partial is left
    shown = re.findall(r"!\[.+?\]\((.+?)\)", (output / "study.md").read_text())
    assert sorted(shown) == sorted(path.name for path in paths if path.suffix == ".png")
    assert len(shown) == len(set(shown)) == 12
    assert all((output / name).read_bytes().startswith(PNG) for name in shown)


def test_the_page_holds_all_of_it(written: tuple[Path, list[Path]]) -> None:
    output, _ = written
    text = (output / "study.md").read_text()
    reader = assert_self_contained((output / "study.html").read_text())
    embedded = [base64.b64decode(source.partition(",")[2]) for source in reader.values("src")]
    assert embedded == [(output / name).read_bytes() for name in re.findall(r"!\[.+?\]\((.+?)\)", text)]
    tags = [tag for tag, _ in reader.tags]
    assert tags.count("tr") == len(re.findall(r"^\|(?! ---)", text, re.M))
    assert tags.count("h2") == len(re.findall(r"^## ", text, re.M))
    assert len([target for target in reader.values("href") if target.startswith("#")]) == tags.count("h2")
    assert "**" not in reader.text


def test_what_the_report_says_of_a_whole_study(ledger: dict[str, Any], written: tuple[Path, list[Path]]) -> None:
    text = (written[0] / "study.md").read_text()
    assert f"Made by `{command(ledger)}`" in text
    assert f"Finished: {len(ledger['cells'])} of {len(ledger['cells'])} cells" in text
    assert "the paper's arms on seeds 1 to 2; those beyond the paper on seed 1." in text
    assert "8 held-out tasks of plain and 8 held-out tasks of hard" in text
    assert not re.search(r"^>", text, re.M)  # no warning
    assert "## Why we think so" not in text
    for title in TITLES.values():
        assert title.replace("|", r"\|") in text
    for setting, mode in (("plain", "x4: up to 3"), ("hard", "x6: up to 5")):
        section = text.split(f"## Setting {setting}\n")[1].split("\n## ")[0]
        assert f'the setting "{setting}"' in section  # the comment at its head
        assert mode in section
        titles = re.findall(r"^### (.+)", section, re.M)
        assert [f"Table{'s' * (n == '2')} {n}" in " ".join(titles) for n in "124"] == [True] * 3
        assert "Beyond the paper" in titles


def test_the_command_that_makes_the_same_study(
    ledger: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "plain.toml").touch()
    monkeypatch.setattr(preface, "PACKAGED", tmp_path)
    assert (
        command(ledger) == "compactionrl study --setting plain --setting hard.toml --seeds 2 --extra"
    )  # one's own file


def test_broken_rollouts_are_counted() -> None:
    cells = {"plain/full/1": cell("plain", "full", 1, OUTCOMES | {"x4": "1-0-"})}
    assert "2 of 16 measured rollouts broke down" in report(ledger_of(cells), [])


def test_the_main_result_is_the_compacting_mode() -> None:
    cells = {f"plain/{name}/1": cell("plain", name, 1, OUTCOMES) for name in ("full", "base")}
    cells["plain/base/1"]["evaluation"]["x4"]["outcomes"] = "1000"
    text = report(ledger_of(cells), ["study-plain-pass.png"])
    assert re.findall(r"\]\((.+?\.png)\)", text) == ["study-plain-pass.png"]  # what was not drawn is not shown
    section = text.split("## Main result")[1].split("\n## ")[0]
    rows = {
        line.split(" | ")[0].removeprefix("| "): line.split(" | ")[1:] for line in section.splitlines() if "|" in line
    }
    assert rows["CompactionRL"][0].startswith("50.0 (")
    assert rows[TITLES["base"]][0].startswith("25.0 (")
    assert rows[TITLES["base"]][1].startswith("−25.0 (")
    assert rows[TITLES["rl-c"]] == ["–", "– |"]
    assert TITLES["robust"].replace("|", r"\|") not in rows


def test_the_overview_says_what_each_setting_says(ledger: dict[str, Any], written: tuple[Path, list[Path]]) -> None:
    text = (written[0] / "study.md").read_text()
    overview = verdict_rows(text.split("## What of the paper holds")[1].split("\n## ")[0])
    for place, setting in ((3, "plain"), (4, "hard")):
        detail = text.split(f"## Setting {setting}\n")[1].split("### The paper's orderings")[1].split("### ")[0]
        assert [(row[0], row[place]) for row in overview] == [(row[0], row[3]) for row in verdict_rows(detail)]
        assert len(overview) == len(CLAIMS)


def verdict_rows(text: str) -> list[list[str]]:
    """Of the tables of orderings, the consistent ones and the mixed ones."""
    return [
        line.strip("| ").split(" | ") for line in text.splitlines() if re.match(r"\| [^|]+ \| (1|2, 3|4) \| [+−]", line)
    ]


def test_an_unfinished_study_says_what_is_missing(ledger: dict[str, Any], tmp_path: Path) -> None:
    partial = copy.deepcopy(ledger) | {"planned": [key for key in ledger["cells"] if "robust" not in key]}
    kept = ("plain/base/1", "plain/base/2", "plain/full/1", "plain/full/2", "plain/rl-c/1")
    partial["cells"] = {key: partial["cells"][key] for key in kept}
    write_report(partial, tmp_path)
    text = (tmp_path / "study.md").read_text()
    assert f"> **Incomplete.** {len(partial['planned']) - 5} cells are missing: " in text
    assert "plain/rl-c on seed 2; " in text
    assert "hard/full on seeds 1 to 2; " in text
    assert "robust" not in text.partition("## Main")[0]
    plain, hard = (text.split(f"## Setting {name}\n")[1].split("\n## ")[0] for name in ("plain", "hard"))
    assert "No arm of this setting is finished yet." in hard
    assert "](study-hard-" not in text
    assert "Who writes the summaries" not in plain
    assert "Beyond the paper" not in plain
    assert all((tmp_path / name).exists() for name in re.findall(r"\]\((.+?\.png)\)", text))
    assert_self_contained((tmp_path / "study.html").read_text())


def test_an_empty_study_says_so(tmp_path: Path) -> None:
    paths = write_report(ledger_of({}), tmp_path)
    assert [path.name for path in paths] == ["study.md", "study.html"]
    text = (tmp_path / "study.md").read_text()
    assert "Nothing is finished yet" in text
    assert "Finished: 0 of 0 cells" in text
    assert "What of the paper holds" not in text
    assert_self_contained((tmp_path / "study.html").read_text())


def test_what_was_planned_is_missing_until_it_is_there() -> None:
    cells = {"plain/full/1": cell("plain", "full", 1, OUTCOMES)}
    plan = {"planned": ["plain/full/1", "plain/full/2", "plain/robust/1"]}
    text = report(ledger_of(cells) | plan, [])
    assert "Finished: 1 of 3 cells" in text
    assert "> **Incomplete.** 2 cells are missing: plain/full on seed 2; plain/robust on seed 1." in text
    assert "--seeds 2 --extra`" in text
    assert "Incomplete" not in report(ledger_of(cells), [])
    assert "> **Incomplete.** 1 cell is missing: a/b on seed 1." in report(
        ledger_of(cells) | {"planned": ["a/b/1"]}, []
    )


def test_a_perfect_player_alone_is_no_arm() -> None:
    alone = ledger_of({"plain/perfect/1": cell("plain", "perfect", 1, OUTCOMES)})
    text = report(alone, [])
    assert "Nothing is finished yet" in text
    assert "No arm of this setting is finished yet." in text
    assert "Repetitions: none yet." in text
    assert "Finished: 1 of 1 cells" in text
    assert "1 cell is missing: plain/perfect on seed 1." in report(ledger_of({}) | {"planned": ["plain/perfect/1"]}, [])


def test_sittings_by_setting() -> None:
    ledger = ledger_of({})
    ledger["sessions"] = [
        {"started": "2026-11-30T01:00:00Z", "seconds": 2531.5, "jobs": 2, "cells": ["plain/full/1", "plain/base/1"]},
        {"started": "2026-11-30T02:00:00Z", "seconds": 29.0, "jobs": 1, "cells": ["a_b/full/1", "plain/full/2"]},
    ]
    text = report(ledger, [])
    assert "| 2026-11-30T01:00:00Z | 2 of plain | 42 | 2 |" in text
    assert r"| 2026-11-30T02:00:00Z | 1 of a\_b, 1 of plain | 0 | 1 |" in text
    assert "43 minutes in 2 sittings" in text
    assert "How long it took" not in report(ledger | {"sessions": []}, [])


def test_an_arm_that_plays_every_task_several_times_has_other_data() -> None:
    cells = {f"plain/{name}/1": cell("plain", name, 1, OUTCOMES) for name in ("full", "group")}
    ledger = ledger_of(cells)
    assert "Other data" not in report(ledger, [])
    (group,) = (one for one in ledger["variants"] if one["name"] == "group")
    group["changes"] = {"plain": {"train.estimator": "group", "train.group_size": 8}}
    assert r'Other data has "Group baseline \| no critic": it plays every task 8 times' in report(ledger, [])
    del ledger["cells"]["plain/group/1"]
    assert "Other data" not in report(ledger, [])  # it is no part of this study


def test_a_smoke_run_warns() -> None:
    cells = {"plain/full/1": cell("plain", "full", 1, OUTCOMES)}
    smoke = ledger_of(cells)
    lines = "".join(f"# {key} = {json.dumps(value)}\n" for key, value in QUICK.items())
    smoke["settings"]["plain"]["toml"] += f"\n# Changed on the command line:\n{lines}"
    text = report(smoke, [])
    assert "> **A smoke run.**" in text
    assert "--quick`" in text
    assert f"`steps = {QUICK['train.steps']}`" in text  # the declaration shows what ran
    smoke["settings"]["plain"]["toml"] += "# run.threads = 2\n"
    assert command(smoke).endswith("--quick --run.threads 2")


def test_a_changed_setting_warns() -> None:
    changed = ledger_of({"plain/full/1": cell("plain", "full", 1, OUTCOMES)})
    changed["settings"]["plain"]["toml"] += '\n# Changed on the command line:\n# context.budget = 96\n# a.b = "c d"\n'
    assert changes(changed["settings"]["plain"]["toml"]) == {"context.budget": 96, "a.b": "c d"}
    text = report(changed, [])
    assert '> **Changed.** The setting plain ran with `context.budget = 96`, `a.b = "c d"`' in text
    assert "smoke" not in text
    assert "`budget = 96`, `max_compactions = 3`" in text
    assert command(changed).endswith("--context.budget 96 --a.b 'c d'")


def test_the_declaration_shows_numbers_and_no_prompts() -> None:
    header = ledger_of({})["settings"]["plain"]
    header["toml"] = (
        '# Chosen on seeds 101 to 103,\n# which no report uses.\n\n# not this\n[context]\nbudget = 128\nsummary_request = "x"\n'
        '[environment]\ntasks = "mine:Tasks"\noptions = { notes = [5, 22], chain = true }\n[train]\npolicy_lr = 5e-4\n'
    )
    text, dials = declaration(header)
    assert text == "Chosen on seeds 101 to 103,\nwhich no report uses."
    assert "| context | `budget = 128` |" in dials
    assert "| tasks | `mine:Tasks` |" in dials
    assert "| their dials | `notes = [5, 22]`, `chain = true` |" in dials
    assert "| train | `policy_lr = 0.0005` |" in dials
    assert about("[context]\n# inside") == ""


def test_the_declaration_shows_the_resolved_configuration_where_it_is_known() -> None:
    header = ledger_of({})["settings"]["plain"]
    config = parse_config({"model": {"path": "warm-start"}, "context": {"budget": 70000, "threshold": 20000}})
    header["config"] = config.model_dump(mode="json")
    _, dials = declaration(header)
    (context,), (train,), (warm,) = (
        re.findall(rf"^\| {name} \| (.*) \|$", dials, re.M) for name in ("context", "train", "warm start")
    )
    assert "`budget = 70000`, `threshold = 20000`" in context
    assert f"`tail_steps = {config.context.tail_steps}`" in context  # a default
    assert '`estimator = "cross_trajectory"`' in train  # a choice
    assert "`gamma = 1.0`" in train
    assert "`value_clip = null`" in train
    assert "`weight_decay = 0.01`" in warm
    for left_out in ("summary_request", "demonstrator", "seed =", "modes ="):  # texts, and what a study sets itself
        assert left_out not in dials
    assert "`temperature = 1.0`" in dials
    assert "`turns = 250`" in dials
    del header["config"]
    assert "gamma" not in declaration(header)[1]


def test_the_head_of_a_setting_is_plain_text() -> None:
    lines = [
        "- no list",
        "# no *heading*",
        "> no quotation",
        "1. no list",
        "text",
        "---",
        "===",
        "2.5 points and 12 more",
    ]
    reader = Reader(page(about("".join(f"# {line}\n" for line in lines)), {}, ""))
    assert [tag for tag, _ in reader.tags if tag in ("ul", "ol", "h1", "h2", "em", "blockquote", "hr")] == []
    assert "- no list\nno *heading*\n> no quotation\n1. no list\ntext\n---\n===\n2.5 points and 12 more" in reader.text


def test_any_setting_can_be_reported(tmp_path: Path) -> None:
    ledger = synthetic_ledger(seeds=1, extra_seeds=1, tasks=4, settings=["hard"])
    name = "My setting <b>|../../x"
    ledger["settings"] = {name: ledger["settings"]["hard"] | {"toml": "[context]\nbudget = 128\n"}}
    cells = [found | {"setting": name} for found in ledger["cells"].values() if found["variant"] in SOME]
    ledger["cells"] = {f"{name}/{found['variant']}/{found['seed']}": found for found in cells}
    ledger["sessions"][0]["cells"] = [*ledger["cells"]]
    for variant in ledger["variants"]:
        variant["trained_in"] = {name: variant["trained_in"]["hard"]}
    paths = write_report(ledger, tmp_path)
    assert {path.parent for path in paths} == {tmp_path}
    assert (tmp_path / "study-my-setting-b-x-pass.png").exists()
    reader = assert_self_contained((tmp_path / "study.html").read_text())
    assert len(reader.values("src")) == 6
    assert name in reader.text
    assert not {"plain", "hard"} & set(re.findall(r"\w+", (tmp_path / "study.md").read_text()))


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    cells = {f"plain/{name}/1": cell("plain", name, 1, OUTCOMES) for name in ("full", "base", "robust")}
    ledger = ledger_of(cells, titles=dict.fromkeys(TITLES, HOSTILE))
    ledger["variants"][1]["changes"] = {"plain": {HOSTILE: HOSTILE}}
    ledger["settings"]["plain"]["toml"] = f"# {HOSTILE}\n[environment]\ntasks = {json.dumps(HOSTILE)}\n"
    (tmp_path / DISCUSSION).write_text(
        f"<img src=x onerror=alert(1)>\n\n{HOSTILE}\n\n<!-- -->\n\n[good](https://example.org)\n"
    )
    write_report(ledger, tmp_path)
    reader = assert_self_contained((tmp_path / "study.html").read_text())
    assert "<script>alert(1)</script>" in reader.text
    assert "<img src=x onerror=alert(1)>" in reader.text
    assert "[image: y]" in reader.text  # of the discussion: not loaded, and said
    assert reader.text.count("![y](http://example.org/y.png)") > 20  # of titles: text
    assert [target for target in reader.values("href") if not target.startswith("#")] == ["https://example.org"]
    bare = report(ledger, [])
    # Nor in study.md, wherever it is shown: HTML passes, everything is on.
    everything = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"]).parse(bare)
    inline = [token for block in everything for token in [block, *(block.children or [])]]
    assert not {"html_block", "html_inline", "image", "s_open"} & {token.type for token in inline}
    assert all(token.attrs["href"].startswith("#") for token in inline if token.type == "link_open")
    for block in bare.split("\n\n"):
        widths = {len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines() if line.startswith("|")}
        assert len(widths) <= 1  # no title breaks out of its cell


def test_the_discussion_is_included_and_fits() -> None:
    ledger = ledger_of({})
    discussion = "# Why\n\nBecause *of* this.\n\n## Details\n\n```\n# a comment\n```\n"
    text = report(ledger, [], discussion)
    section = text.split("## Why we think so\n\n")[1].split("\n## ")[0].strip()
    assert section == "### Why\n\nBecause *of* this.\n\n#### Details\n\n```\n# a comment\n```"
    assert "Why we think so" not in report(ledger, [], " \n")


@pytest.mark.parametrize(
    ("given", "demoted"),
    [
        ("no heading\n", "no heading\n"),
        ("# a\n## b\n", "### a\n#### b\n"),
        ("## a ##\n\n#### b\n", "### a ##\n\n##### b\n"),
        ("a\nb\n===\ntext\n\nc\n---\n", "### a b\ntext\n\n#### c\n"),
        ("#### deep\n", "### deep\n"),
        ("# a\n##### b\n###### c\n", "### a\n###### b\n###### c\n"),
        ("# a\n\n    # code\n\n> # quoted\n", "### a\n\n    # code\n\n> # quoted\n"),
        ("# \n\n# b", "### \n\n### b\n"),
    ],
)
def test_headings_are_demoted(given: str, demoted: str) -> None:
    assert [line.rstrip() for line in demote(given, 3).splitlines()] == [line.rstrip() for line in demoted.splitlines()]


def test_the_same_ledger_gives_the_same_bytes(ledger: dict[str, Any], written: tuple[Path, list[Path]]) -> None:
    output, paths = written
    items = [*ledger["cells"].items()]
    random.Random(0).shuffle(items)
    text = report({**ledger, "cells": dict(items)}, {path.name for path in paths})
    assert text == (output / "study.md").read_text()


def test_a_report_replaces_the_earlier_one(tmp_path: Path) -> None:
    write_report(ledger_of({}), tmp_path)
    write_report(ledger_of({"plain/full/1": cell("plain", "full", 1, OUTCOMES)}), tmp_path)
    assert "Finished: 1 of 1 cells" in (tmp_path / "study.md").read_text()
    assert not list(tmp_path.glob(".*"))


@given(st.lists(st.text(min_size=1), unique=True))
def test_slugs_are_safe_and_different(names: list[str]) -> None:
    found = slugs(names)
    assert list(found) == names
    assert len(set(found.values())) == len(names)
    assert all(re.fullmatch(r"[a-z0-9_-]+", slug) for slug in found.values())


@given(
    st.text(st.characters(exclude_categories=["C", "Z"]) | st.sampled_from("` |<&*_![]()\\"), min_size=1).map(str.strip)
)
def test_code_is_shown_as_it_is(text: str) -> None:
    shown = Reader(page(f"| {code(text)} |\n| --- |\n", {}, "")).text if text else ""
    assert text.replace(" ", "") in shown.replace(" ", "")


@given(st.text(), st.text())
def test_no_text_is_ever_code(text: str, title: str) -> None:
    assert_self_contained(page(text, {}, title))


def test_words_for_seeds() -> None:
    assert [span(numbers) for numbers in ([1], [1, 2, 3], [1, 3])] == ["seed 1", "seeds 1 to 3", "seeds 1, 3"]
    assert by_arm(["a/x/10", "a/x/9", "a/b/1"]) == ["a/b on seed 1", "a/x on seeds 9 to 10"]


def test_an_anchor_is_formed_as_code_hosts_do() -> None:
    assert anchor("What of the paper holds") == "what-of-the-paper-holds"
    assert anchor("Tables 2, 3 (in kind)") == "tables-2-3-in-kind"


def test_an_arm_that_depends_on_the_setting_shows_each_of_its_changes_once() -> None:
    ledger = synthetic_ledger(seeds=1, extra_seeds=1, tasks=4)
    robust = next(one for one in ledger["variants"] if one["name"] == "robust")
    robust["changes"] = {"plain": {"train.modes": ["x1", "x4"]}, "hard": {"train.modes": ["x1", "x8"]}}
    row = next(line for line in report(ledger, []).splitlines() if line.startswith(f"| {robust['title']} | `train"))
    assert '`train.modes = ["x1", "x4"]` or `train.modes = ["x1", "x8"]`' in row
    full = next(line for line in report(ledger, []).splitlines() if "| the paper's |" in line and "segment" in line)
    assert " or " not in full
