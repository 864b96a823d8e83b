import copy
import html
import random
import re
from typing import Any

import pytest
from study_ledgers import STEPS, TITLES, cell, ledger_of, synthetic_ledger

from compactionrl.study import tables, training_tables, verdicts
from compactionrl.study.arms import UNEQUAL, ceiling
from compactionrl.study.bootstrap import Interval, Paired
from compactionrl.study.claims import CLAIMS
from compactionrl.study.markdown import change, escape, number, percents, points, seed_points, table
from compactionrl.study.page import page
from compactionrl.study.parts import PARTS
from compactionrl.study.verdicts import count_table

TABLES = [count_table, *(make for part in PARTS for make in part.tables)]


TRAINING = [training_tables.training_table, training_tables.credit_table, training_tables.cost_table]


def rows(markdown: str) -> list[list[str]]:
    """The cells of a table, its head first."""
    lines = [line for line in markdown.splitlines() if line.startswith("|")]
    found = [[text.strip() for text in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    assert set("".join(found[1])) <= set("-:")
    return [row for row in found if not set("".join(row)) <= set("-:")]


def records(markdown: str, *key: str) -> dict[str, dict[str, str]]:
    """Each row by heading; by the given headings' text, or the first column's."""
    head, *body = rows(markdown)
    found = [dict(zip(head, row, strict=True)) for row in body]
    return {" ".join(record[name] for name in key or head[:1]): record for record in found}


def study(**variants: list[str]) -> dict[str, Any]:
    """x4 outcomes of each variant (underscores for hyphens), by seed."""
    cells = {
        f"plain/{name}/{seed}": cell("plain", name.replace("_", "-"), seed, {"x4": text})
        for name, texts in variants.items()
        for seed, text in enumerate(texts, start=1)
    }
    return ledger_of(cells)


@pytest.mark.parametrize("make", TABLES)
@pytest.mark.parametrize("kept", [1.0, 0.3, 0.0])
def test_every_table_of_a_whole_a_partial_and_an_empty_study(make: Any, kept: float) -> None:
    ledger = synthetic_ledger(tasks=16)
    keys = random.Random(0).sample(sorted(ledger["cells"]), round(kept * len(ledger["cells"])))
    ledger["cells"] = {key: ledger["cells"][key] for key in keys}
    before = copy.deepcopy(ledger)
    for setting in ledger["settings"]:
        text = make(ledger, setting)
        assert {len(row) for row in rows(text)} == {len(rows(text)[0])}
        assert not re.search(r"\b(nan|inf|None)\b", text)
    assert ledger == before


def test_a_title_stays_in_its_cell() -> None:
    text = tables.pass_table(ledger_of({}, titles={"full": "a | b", "base": "Warm"}), "plain")
    assert [row[0] for row in rows(text)] == ["variant", r"a \| b", "Warm"]
    assert rows(text)[0][-2] == r"x4, to a \| b"


def test_pass_rates_and_distances() -> None:
    ledger = study(full=["1111", "1111", "1111"], base=["0000", "0000"], no_summary=["1111"], segment_loss=["----"])
    found = records(tables.pass_table(ledger, "plain"))
    full, base = found["CompactionRL"], found["Warm start"]
    assert (full["x4"], full["seeds"], full["x4, to CompactionRL"]) == ("100.0 (100.0–100.0)", "3", "–")
    assert (base["x4"], base["seeds"], base["x4, to CompactionRL"]) == (
        "0.0 (0.0–0.0)",
        "2",
        "−100.0 (−100.0 to −100.0)",
    )
    assert found["CompactionRL, summaries not trained"]["x4, to CompactionRL"] == "+0.0 (+0.0 to +0.0)"
    assert (base["x1"], base["trained in"], full["trained in"]) == ("–", "–", "x4")
    assert found["RL without compaction, C"] == {
        "variant": "RL without compaction, C",
        "trained in": "x1",
        "x4, to CompactionRL": "–",
        "seeds": "0",
        **dict.fromkeys(["x1", "x4", "2C", "4C"], "–"),
    }
    # A cell all of whose tasks broke down is there, and says nothing.
    assert found["CompactionRL without token-level loss"]["x4"] == "–"


def test_a_perfect_player_stands_below_the_arms_and_counts_as_none() -> None:
    ledger = study(full=["1111", "1100"])
    before = tables.pass_table(ledger, "plain")
    assert tables.PERFECT_PLAYER not in before
    ledger["cells"]["plain/perfect/1"] = cell("plain", "perfect", 1, {"x1": "100-", "x4": "1111", "2C": "1110"})
    text = tables.pass_table(ledger, "plain")
    head, *body = rows(text)
    expected = [tables.PERFECT_PLAYER, "–", "33.3", "100.0", "75.0", "–", "–", "–"]
    assert body[-1] == expected
    assert [head, *body[:-1]] == rows(before)
    assert ceiling(ledger, "plain", "2C") == 3 / 4
    assert ceiling(study(full=["1111"]), "plain", "x4") is None
    for make in [make for make in TABLES if make is not tables.pass_table]:
        without = {**ledger, "cells": {key: it for key, it in ledger["cells"].items() if "perfect" not in key}}
        assert make(ledger, "plain") == make(without, "plain")


def test_differences_in_every_mode() -> None:
    cells = {
        f"plain/{name}/{seed}": cell("plain", name, seed, found)
        for name, found in {"full": {"x1": "1000", "x4": "1111"}, "base": {"x1": "1100", "x4": "0000"}}.items()
        for seed in (1, 2)
    }
    cells["plain/robust/1"] = cell("plain", "robust", 1, {"x4": "0000"})
    text = tables.difference_table(ledger_of(cells), "plain")
    found = records(text)
    assert "CompactionRL" not in found
    assert list(found[TITLES["base"]].values())[1:] == [
        "+25.0 (+0.0 to +75.0) †",
        *["−100.0 (−100.0 to −100.0)"],
        "–",
        "–",
    ]
    assert found[TITLES["robust"]]["x4"] == "−100.0 (−100.0 to −100.0) †"  # one seed has no t interval
    assert tables.DAGGER in text
    assert UNEQUAL in text


def test_unequal_seeds_are_said() -> None:
    equal = study(full=["1111", "1100"], base=["0000", "0000"])
    unequal = study(full=["1111", "1100"], group=["0000"])
    beside = [tables.pass_table, tables.difference_table, tables.behaviour_table, *TRAINING]
    for make in beside:
        assert UNEQUAL not in make(equal, "plain")
        assert UNEQUAL in make(unequal, "plain")


def test_means_are_over_finished_tasks_then_over_seeds() -> None:
    text = tables.pass_table(study(full=["1000", "11--"]), "plain")
    assert records(text)["CompactionRL"]["x4"].startswith("62.5 (")


def test_every_seeds_value() -> None:
    ledger = study(full=["1000", "11--"], base=["0000"])
    ledger["cells"]["plain/full/7"] = cell("plain", "full", 7, {"x1": "0110"})
    found = records(tables.seed_table(ledger, "plain"), "variant", "mode")
    assert list(found["CompactionRL x4"].values()) == ["CompactionRL", "x4", "25.0", "100.0", "–"]
    assert found["CompactionRL x1"]["seed 7"] == "50.0"
    assert found["Warm start x4"]["seed 1"] == "0.0"


def test_ablations() -> None:
    ledger = study(full=["1111", "1111"], segment_loss=["1010", "1010"], segment_gae=[])
    found = records(tables.ablation_table(ledger, "plain"))
    assert list(found) == [
        "CompactionRL",
        "CompactionRL without token-level loss",
        "CompactionRL without cross-trajectory GAE",
    ]
    loss = found["CompactionRL without token-level loss"]
    assert loss["to CompactionRL"].startswith("−50.0 (−")
    assert loss["t interval"] == "−50.0 to −50.0"
    assert found["CompactionRL without cross-trajectory GAE"]["seeds"] == "0"


def test_swaps_by_who_acts_and_who_writes() -> None:
    pairs = {"base/base": "0000", "base/full": "1111", "full/base": "1100", "full/full": "0111", "full/perfect": "1111"}
    text = tables.swap_table(ledger_of({"plain/swap/1": cell("plain", "swap", 1, pairs)}), "plain")
    found = records(text)
    assert found["Warm start"]["summaries: Warm start"].startswith("0.0 ")
    assert found["Warm start"]["summaries: CompactionRL"].startswith("100.0 ")
    assert found["CompactionRL"]["summaries: Warm start"].startswith("50.0 ")
    assert found["CompactionRL"]["summaries: CompactionRL"].startswith("75.0 ")
    assert found["Warm start"]["summaries: perfect"] == "–"
    assert "Seeds: 1." in text


def test_every_seed_of_the_swaps() -> None:
    pairs = [{"base/full": "1111", "full/full": "1100"}, {"base/full": "1000", "full/perfect": "1110"}]
    cells = {
        f"plain/swap/{seed}": cell("plain", "swap", seed, found) for seed, found in zip((4, 2), pairs, strict=True)
    }
    head, *body = rows(tables.swap_seed_table(ledger_of(cells), "plain"))
    assert head == ["acts", "summaries", "seed 2", "seed 4"]
    assert [TITLES["base"], "CompactionRL", "25.0", "100.0"] in body
    assert ["CompactionRL", "CompactionRL", "–", "50.0"] in body
    assert ["CompactionRL", "perfect", "75.0", "–"] in body


def test_behaviour_in_the_compacting_mode() -> None:
    ledger = study(full=["1111", "0000"], base=["0000"])
    first, second = (ledger["cells"][f"plain/full/{seed}"]["evaluation"]["x4"] for seed in (1, 2))
    first |= {"compactions": 1.0, "tool_calls": 5.0, "budget_exhausted": 0.1, "compacted": {"n": 3, "pass_at_1": 1.0}}
    second |= {"compactions": 2.0, "tool_calls": 8.0, "budget_exhausted": 0.4, "compacted": {"n": 1, "pass_at_1": 0.0}}
    ledger["cells"]["plain/base/1"]["evaluation"]["x4"]["compacted"] = {"n": 0, "pass_at_1": None}
    found = records(tables.behaviour_table(ledger, "plain"))
    assert list(found["CompactionRL"].values()) == ["CompactionRL", "1.50", "6.50", "75.0 (n = 4)", "25.0", "2"]
    assert found["Warm start"]["Pass@1 where it compacted, %"] == "–"


def test_first_and_last_updates() -> None:
    ledger = study(full=["1111", "1111"], base=["0000"])
    curves = [[1.0] * 5 + [100.0] * 10 + [3.0] * 5, [None, 2.0, 2.0, 2.0, 2.0] + [100.0] * 10 + [6.0] * 5]
    for seed, curve in enumerate(curves, start=1):
        assert len(curve) == STEPS
        ledger["cells"][f"plain/full/{seed}"]["curves"] = {"summary_tokens": curve, "entropy": [None] * STEPS}
    found = records(training_tables.training_table(ledger, "plain"))
    assert found["CompactionRL"]["tokens per summary"] == "1.50 → 4.50"
    assert found["CompactionRL"]["entropy"] == "–"
    assert "Warm start" not in found


def test_growth_of_summaries() -> None:
    def lengths(last: float) -> dict[str, list[float | None]]:
        return {"summary_tokens": [None, 4.0, 4.0, 4.0, 4.0, *[99.0] * 10, *[last] * 5]}

    ends = {
        "full": [5.0, 6.0, 7.0],
        "no-summary": [3.0, 2.0, 1.0],
        "segment-gae": [3.0, 5.0],
        "robust": [9.0],
        "rl-c": [],
    }
    cells = {
        f"plain/{name}/{seed}": cell("plain", name, seed, {"x4": "1111"}, curves=lengths(last))
        for name, found in ends.items()
        for seed, last in enumerate(found, start=1)
    }
    cells["plain/rl-c/1"] = cell("plain", "rl-c", 1, {"x4": "1111"}, curves={"summary_tokens": [None] * STEPS})
    found = {row[0]: row[1:] for row in rows(training_tables.growth_table(ledger_of(cells), "plain"))[1:]}
    # 1, 2 and 3 tokens more: 2 -+ 4.3027 / sqrt(3)
    assert found["CompactionRL"] == ["undecided", "+2.00", "−0.48 to +4.48", "+1.00", "+2.00", "+3.00"]
    assert found[TITLES["no-summary"]] == ["undecided", "−2.00", "−4.48 to +0.48", "−1.00", "−2.00", "−3.00"]
    assert found[TITLES["segment-gae"]] == ["undecided", "+0.00", "−12.71 to +12.71", "−1.00", "+1.00", "–"]
    assert found[TITLES["robust"].replace("|", r"\|")] == ["undecided", "+5.00", "–", "+5.00", "–", "–"]
    assert found[TITLES["rl-c"]] == ["–"] * 6
    for seed in (1, 2, 3):
        cells[f"plain/full/{seed}"]["curves"] = lengths(5 + seed / 10)
        cells[f"plain/no-summary/{seed}"]["curves"] = lengths(3 - seed / 10)
    found = {row[0]: row[1:] for row in rows(training_tables.growth_table(ledger_of(cells), "plain"))[1:]}
    assert (found["CompactionRL"][0], found[TITLES["no-summary"]][0]) == ("grows", "shrinks")


def test_credit_over_the_last_updates() -> None:
    curves = {"summary_share": [0.9] * 10 + [0.25] * 10, "factor_summary": [0.5] * 20, "factor_execution": [0.75] * 20}
    variance = [{"segment_0": 0.2, "segment_6+": -0.3}, {"segment_0": 0.4, "segment_2": 0.5}]
    cells = {
        f"plain/full/{seed}": cell("plain", "full", seed, {"x4": "1111"}, curves=curves, explained_variance=each)
        for seed, each in enumerate(variance, start=1)
    }
    cells["plain/group/1"] = cell("plain", "group", 1, {"x4": "1111"}, curves={})
    cells["plain/group/1"]["explained_variance"] = {}
    found = records(training_tables.credit_table(ledger_of(cells), "plain"))
    assert list(found["CompactionRL"].items()) == [
        ("variant", "CompactionRL"),
        ("credit, %", "25.0"),
        ("E14, summary", "0.50"),
        ("E14, execution", "0.75"),
        ("EV, segment 0", "0.30"),
        ("EV, segment 2", "0.50"),
        ("EV, segment 6+", "−0.30"),
        ("seeds", "2"),
    ]
    assert set(list(found[r"Group baseline \| no critic"].values())[1:-1]) == {"–"}


def test_costs_of_a_run() -> None:
    cells = {
        f"plain/full/{seed}": cell(
            "plain",
            "full",
            seed,
            {"x4": "1111"},
            tokens={"sampled": 1_000_000 * seed, "trained": 900_000, "rollouts": 2560},
            seconds={"wall": 60.0 * seed, "cpu": 30.0},
        )
        for seed in (1, 2)
    }
    cells["plain/base/1"] = cell("plain", "base", 1, {"x4": "1111"}, seconds={"wall": 6.0, "cpu": 3.0})
    found = records(training_tables.cost_table(ledger_of(cells), "plain"))
    assert list(found["CompactionRL"].values())[1:] == ["1.5", "0.5", "1,500,000", "900,000", "2,560", "2"]
    assert list(found["Warm start"].values())[1:] == ["0.1", "0.1", "–", "–", "–", "1"]


def test_verdicts_with_their_figures() -> None:
    ledger = study(full=["1111", "1111"], base=["0000", "0000"], no_summary=["0000"], rl_c=["1111", "1111"])
    text = verdicts.verdict_table(ledger, "plain")
    found = records(text, "ordering")
    assert list(found["CompactionRL beats the base"].values()) == [
        *["CompactionRL beats the base", "2, 3", "+5.6 (4 of 4)", "holds"],
        *["+100.0 (+100.0 to +100.0)", "+100.0 to +100.0", "2"],
    ]
    assert found["CompactionRL beats the base even with summaries untrained"]["paper"] == "+2.0 (3 of 4)"
    # No difference at all, in a paper with 5.2 points.
    assert found["CompactionRL beats RL in one window of C"]["here"] == "undecided ‡"
    assert "\n‡ " in text
    assert found["training the summaries pays"]["here"] == "holds †"
    assert found["training the summaries pays"]["t interval"] == "–"
    assert found["the token-level loss pays"]["here"] == "not run"
    assert text.count("†") > 1
    assert "\n† " in text
    plain = verdicts.verdict_table(study(full=["1111", "1111"], base=["0000", "0000"]), "plain")
    assert not {"†", "‡"} & set(plain)


def test_the_papers_consistent_orderings_stand_first_and_apart() -> None:
    ledger = study(full=["1111", "1111"], base=["0000", "0000"])
    for text in (verdicts.verdict_table(ledger, "plain"), verdicts.overview_table(ledger, ["plain"])):
        first, _, second = text.partition("**Mixed in the paper**")
        assert first.startswith("**In all of the paper's columns**\n\n|")
        for part, consistent in ((first, True), (second, False)):
            shown = [row[0] for row in rows(part)[1:]]
            assert shown == [claim.text for claim in CLAIMS if claim.consistent == consistent]


def test_counts_of_verdicts() -> None:
    ledger = study(full=["1111", "1111"], base=["0000", "0000"], rl_c=["1111", "1111"])
    found = records(verdicts.count_table(ledger, "plain"))
    everywhere, mixed = found["In all of the paper's columns"], found["Mixed in the paper"]
    assert int(everywhere["all"]) + int(mixed["all"]) == len(CLAIMS)
    assert everywhere["holds"] == "1"  # full > base
    assert everywhere["undecided"] == "1"  # full > rl-c
    assert mixed["holds"] == "1"  # rl-c > base
    assert mixed["does not hold"] == everywhere["does not hold"] == "0"


def test_questions() -> None:
    ledger = study(full=["1111", "1111"], base=["0000", "0000"], robust=["1111", "1111"], group=["0000", "0000"])
    found = records(verdicts.question_table(ledger, "plain"))
    group = found["group-relative without a critic, against CompactionRL"]
    assert (group["answer"], group["difference, or share"]) == ("lower", "−100.0 (−100.0 to −100.0)")
    share = found["compaction on or off at random: at least 90% of CompactionRL's gain over the base"]
    assert (share["answer"], share["difference, or share"]) == ("met", "100.0 (100.0–100.0) %")


def test_figures() -> None:
    assert number(-0.001, 1) == "0.0"
    assert number(1234567.8, 0) == "1,234,568"
    assert number(None) == "–"
    assert percents(Interval(0.712, 0.68, 0.741)) == "71.2 (68.0–74.1)"
    found = Paired(0.031, -0.0052, 0.067, float("-inf"), float("inf"), {1: 0.031})
    assert points(found) == "+3.1 (−0.5 to +6.7)"
    assert points(found._replace(difference=-0.0001)).startswith("+0.0 ")
    assert seed_points(found) == "–"
    assert (change(1.0, None), change(None, None)) == ("1.00 → –", "–")


@pytest.mark.parametrize(
    "text",
    [
        "a|b",
        "<img src=x>",
        "![a](b)",
        "[a](b)",
        "*a* **b**",
        "_a_",
        "`a`",
        "~~a~~",
        "a\\*b",
        "&lt;",
        "<http://a>",
        r"\|",
    ],
)
def test_escaped_text_is_shown_as_it_is(text: str) -> None:
    shown = page(f"| {escape(text)} |\n| --- |\n", {}, "").partition("<body>")[2]
    assert html.unescape(re.findall("<th>(.*)</th>", shown)[0]) == text


def test_escaped_text_is_one_line_and_no_formula() -> None:
    assert escape("a\nb\r\nc $x$") == r"a b  c \$x\$"
    assert escape("plain words, x1: 2C - 1 (of 2)!") == "plain words, x1: 2C - 1 (of 2)!"


def test_a_table() -> None:
    text = table(["a", "b"], [["x", "1"]], notes=["A note."])
    assert text == "| a | b |\n| --- | ---: |\n| x | 1 |\n\nA note.\n"
