from collections.abc import Mapping
from itertools import combinations
from typing import Any

import pytest
from study_ledgers import PAPER_ARMS, cell, ledger_of, synthetic_ledger

from compactionrl.study.bootstrap import Paired
from compactionrl.study.claims import (
    CLAIMS,
    PAPER,
    QUESTIONS,
    X1,
    XN,
    Answer,
    Claim,
    answers,
    criterion,
    judge,
)

TASKS = 40
SUMMARIES_PAY = Claim("2, 3", "training the summaries pays", ("full", XN), ("no-summary", XN))


def solved(n: int) -> str:
    return "1" * n + "0" * (TASKS - n)


def ledger(solved_by_seed: Mapping[str, list[int]], mode: str = "x4", setting: str = "plain") -> dict[str, Any]:
    """Each variant solves the first so many tasks, by seed."""
    cells = {
        f"{setting}/{variant}/{seed}": cell(setting, variant, seed, {mode: solved(n)})
        for variant, counts in solved_by_seed.items()
        for seed, n in enumerate(counts, start=1)
    }
    return ledger_of(cells, settings=(setting,), tasks=TASKS)


def test_every_ordering_of_the_papers_tables_is_a_claim_once() -> None:
    arms = {mode: [point for point in PAPER if point[1] == mode] for mode in (X1, XN)}
    assert {name for name, _ in arms[XN]} == set(PAPER_ARMS)
    within = [pair for points in arms.values() for pair in combinations(points, 2)]
    across = [((name, XN), (name, X1)) for name, _ in arms[X1]]
    swaps = [(("swap", f"{executor}/full"), ("swap", f"{executor}/base")) for executor in ("base", "full")]
    expected = [frozenset(pair) for pair in within + across + swaps]
    assert len(expected) == 10 + 21 + 5 + 2
    found = [frozenset((claim.better, claim.worse)) for claim in CLAIMS]
    assert len(found) == len(set(found))
    assert set(found) == set(expected)
    assert len({claim.text for claim in CLAIMS}) == len(CLAIMS)


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.text)
def test_a_claim_goes_the_way_of_most_columns_or_of_their_mean(claim: Claim) -> None:
    won, lost = (sum(sign * (better - worse) > 0 for better, worse in claim.paper) for sign in (1, -1))
    assert won == claim.held
    assert (won - lost, claim.gain) > (0, 0)
    assert claim.consistent == (lost == 0 and won == len(claim.paper))


def test_the_papers_mean_difference() -> None:
    assert SUMMARIES_PAY.gain == pytest.approx((1.5 + 7.8 + 2.3 + 3.0) / 4 / 100)
    assert SUMMARIES_PAY.consistent
    assert not Claim("2, 3", "", ("full", XN), ("rl-2c", XN)).consistent


@pytest.mark.parametrize(
    ("better", "worse", "paper", "held"),
    [
        (("full", XN), ("base", XN), [(56.0, 50.5), (20.2, 13.4), (66.8, 59.8), (24.5, 21.4)], 4),
        (("full", XN), ("rl-2c", XN), [(56.0, 52.5), (20.2, 23.6), (66.8, 64.5), (24.5, 23.0)], 3),
        (("rl-c", X1), ("full", X1), [(50.0, 43.7), (16.9, 16.9), (58.3, 57.3), (20.2, 21.4)], 2),
        (("no-summary", XN), ("no-summary", X1), [(54.5, 52.5), (12.4, 9.0), (64.5, 54.5), (21.5, 17.6)], 4),
        (("segment-gae", XN), ("segment-loss", XN), [(63.0, 60.0), (22.5, 21.3)], 2),
        (("swap", "base/full"), ("swap", "base/base"), [(55.5, 49.0)], 1),
    ],
)
def test_the_papers_figures(better: Any, worse: Any, paper: list[tuple[float, float]], held: int) -> None:
    (claim,) = (claim for claim in CLAIMS if (claim.better, claim.worse) == (better, worse))
    assert (claim.paper, claim.held) == (paper, held)


@pytest.mark.parametrize(
    ("full", "untrained", "outcome", "agrees"),
    [
        ([30, 31, 32], [10, 11, 12], "holds", True),
        ([10, 11, 12], [30, 31, 32], "does not hold", True),
        ([20, 21, 22], [21, 20, 22], "undecided", True),
        ([20, 20], [20, 20], "undecided", True),
        # Two seeds so unequal that only the bootstrap dares to say so; one seed says nothing of seeds at all.
        ([40, 22], [0, 0], "holds", False),
        ([30], [0], "holds", False),
        # Too few tasks for the bootstrap, the seeds agree to the digit.
        ([21, 21], [20, 20], "undecided", False),
        ([], [0, 0], "not run", True),
    ],
)
def test_verdicts(full: list[int], untrained: list[int], outcome: str, agrees: bool) -> None:
    verdict = judge(SUMMARIES_PAY, ledger({"full": full, "no-summary": untrained}), "plain")
    assert (verdict.outcome, verdict.agrees) == (outcome, agrees)
    if verdict.paired:
        expected = sum(a - b for a, b in zip(full, untrained, strict=True)) / len(full) / TASKS
        assert verdict.paired.difference == pytest.approx(expected)


@pytest.mark.parametrize(
    ("full", "untrained", "outcome", "excludes"),
    [
        ([20, 20], [20, 20], "undecided", True),  # no difference at all: below the paper's 3.65 points
        ([21, 21], [20, 20], "undecided", False),  # 0 to 7.5 points
        ([10, 10], [30, 30], "does not hold", False),  # decided: no mark
        ([30, 30], [10, 10], "holds", False),
        ([], [10], "not run", False),
    ],
)
def test_undecided_can_still_exclude_what_the_paper_found(
    full: list[int], untrained: list[int], outcome: str, excludes: bool
) -> None:
    verdict = judge(SUMMARIES_PAY, ledger({"full": full, "no-summary": untrained}), "plain")
    assert (verdict.outcome, verdict.excludes_paper) == (outcome, excludes)


def test_only_seeds_that_both_have_are_compared() -> None:
    verdict = judge(SUMMARIES_PAY, ledger({"full": [30, 30, 0], "no-summary": [10, 10]}), "plain")
    assert verdict.paired is not None
    assert verdict.paired.per_seed == {1: 0.5, 2: 0.5}


def test_the_compacting_mode_is_the_settings_own() -> None:
    counts = {"full": [30, 30], "no-summary": [10, 10]}
    assert judge(SUMMARIES_PAY, ledger(counts, "x6", "hard"), "hard").outcome == "holds"
    assert judge(SUMMARIES_PAY, ledger(counts, "x4", "hard"), "hard").outcome == "not run"


def test_a_policy_against_itself_in_another_mode_and_with_other_summaries() -> None:
    outcomes = {"x1": solved(10), "x4": solved(35)}
    swapped = {"base/full": solved(30), "base/base": solved(5), "full/full": solved(3), "full/base": solved(33)}
    cells = {f"plain/full/{seed}": cell("plain", "full", seed, outcomes) for seed in (1, 2)}
    cells |= {f"plain/swap/{seed}": cell("plain", "swap", seed, swapped) for seed in (1, 2)}
    verdicts = {claim.text: judge(claim, ledger_of(cells, tasks=TASKS), "plain").outcome for claim in CLAIMS}
    assert verdicts["CompactionRL gains from compaction"] == "holds"
    assert verdicts["the base acts better with the trained policy's summaries"] == "holds"
    assert verdicts["the trained policy acts better with its own summaries"] == "does not hold"
    assert verdicts["CompactionRL beats the base"] == "not run"


def answer_about(word: str, study: dict[str, Any]) -> Answer:
    (found,) = (answer for answer in answers(study, "plain") if word in answer.question)
    return found


@pytest.mark.parametrize(
    ("group", "result"), [([30, 31], "higher"), ([1, 2], "lower"), ([15, 17], "undecided"), ([], "not run")]
)
def test_answers_to_open_questions(group: list[int], result: str) -> None:
    answer = answer_about("group-relative", ledger({"full": [16, 16], "group": group}))
    assert answer.result == result
    assert isinstance(answer.estimate, Paired) == (result != "not run")


def test_a_window_as_long_as_all_is_also_asked_in_its_own_mode() -> None:
    cells = {
        f"plain/rl-total/{seed}": cell("plain", "rl-total", seed, {"x4": solved(1), "4C": solved(39)})
        for seed in (1, 2)
    }
    cells |= {f"plain/full/{seed}": cell("plain", "full", seed, {"x4": solved(20)}) for seed in (1, 2)}
    study = ledger_of(cells, tasks=TASKS)
    assert answer_about("then compacting", study).result == "lower"
    assert answer_about("never compacting", study).result == "higher"


def test_robust_training_is_also_compared_with_compactionrl() -> None:
    modes = {"full": {"x1": solved(10), "x4": solved(30)}, "robust": {"x1": solved(30), "x4": solved(10)}}
    cells = {
        f"plain/{name}/{seed}": cell("plain", name, seed, found) for name, found in modes.items() for seed in (1, 2)
    }
    study = ledger_of(cells, tasks=TASKS)
    assert answer_about("at random, against CompactionRL", study).result == "lower"
    assert answer_about("at random, x1, against CompactionRL", study).result == "higher"


@pytest.mark.parametrize(
    ("robust", "result", "agrees"),
    [
        ([30, 30], "met", True),
        ([20, 20], "met", True),  # no difference at all
        ([0, 0], "not met", True),
        ([19, 19], "not met by the mean, interval open", False),  # 2.5 points below, in each seed
        ([19, 20], "met by the mean, interval open", True),  # 1.25 points below
        ([], "not run", True),
    ],
)
def test_robust_training_in_one_window(robust: list[int], result: str, agrees: bool) -> None:
    answer = answer_about("at most 2 points", ledger({"rl-c": [20, 20], "robust": robust}, mode="x1"))
    assert (answer.result, answer.agrees) == (result, agrees)


@pytest.mark.parametrize(
    ("robust", "full", "result", "mean"),
    [
        ([30, 30], [30, 30], "met", 1),
        ([12, 12], [30, 30], "not met", 2 / 20),
        ([29, 29], [30, 30], "met by the mean, interval open", 19 / 20),
        ([27, 27], [30, 30], "not met by the mean, interval open", 17 / 20),
        ([12, 12], [10, 10], "CompactionRL has no sure gain", None),
        ([], [30, 30], "not run", None),
    ],
)
def test_robust_training_keeps_a_share_of_the_gain(
    robust: list[int], full: list[int], result: str, mean: float | None
) -> None:
    answer = answer_about("at least 90%", ledger({"base": [10, 10], "full": full, "robust": robust}))
    assert answer.result == result
    assert (answer.estimate and answer.estimate[0]) == pytest.approx(mean)


def test_criterion() -> None:
    assert criterion(0.0, -0.01, 0.01, least=-0.02) == "met"
    assert criterion(-0.05, -0.06, -0.03, least=-0.02) == "not met"
    assert criterion(0.0, -0.03, 0.03, least=-0.02).startswith("met by the mean")
    assert criterion(-0.03, -0.05, 0.03, least=-0.02).startswith("not met by the mean")


def test_a_whole_study_is_judged_and_an_empty_one_is_not() -> None:
    study = synthetic_ledger(tasks=16)
    for setting in study["settings"]:
        assert all(judge(claim, study, setting).paired for claim in CLAIMS)
        assert all(answer.result != "not run" for answer in answers(study, setting))
        assert len(answers(study, setting)) == len(QUESTIONS) + 2
    empty = {**study, "cells": {}}
    assert {judge(claim, empty, "plain").outcome for claim in CLAIMS} == {"not run"}
    assert {answer.result for answer in answers(empty, "plain")} == {"not run"}
