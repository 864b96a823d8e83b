import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compactionrl.evaluation.statistics import paired_difference, pass_rate, wilson


# Newcombe (1998), table I, method 3; 5 of 10 by hand: z^2 = 3.8415, (0.5 + 0.1921 -+ 0.3646) / 1.3841.
@pytest.mark.parametrize(
    ("solved", "n", "low", "high"),
    [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
        (5, 10, 0.2366, 0.7634),
    ],
)
def test_wilson_gives_the_published_intervals(solved: int, n: int, low: float, high: float) -> None:
    assert wilson(solved, n) == pytest.approx((low, high), abs=5e-5)


@given(st.integers(1, 2000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_solves_its_defining_equation(case: tuple[int, int]) -> None:
    """Both ends p satisfy |rate - p| = z sqrt(p (1 - p) / n), hold the rate between them and mirror with failures."""
    solved, n = case
    low, high = wilson(solved, n, z=2.0)
    assert 0 <= low <= solved / n <= high <= 1
    for end in (low, high):
        assert (solved / n - end) ** 2 == pytest.approx(4 * end * (1 - end) / n, abs=1e-12)
    assert wilson(n - solved, n, z=2.0) == pytest.approx((1 - high, 1 - low), abs=1e-12)


def test_nothing_measured_says_so() -> None:
    assert pass_rate([]) == {"pass_at_1": None, "low": 0.0, "high": 1.0, "n": 0}


def test_pass_rate_counts() -> None:
    assert pass_rate([[True]] * 5 + [[False]] * 5)["pass_at_1"] == 0.5


@pytest.mark.parametrize(("solved", "n"), [(3, 2), (-1, 2)])
def test_impossible_counts_are_refused(solved: int, n: int) -> None:
    with pytest.raises(ValueError, match="between 0 and n"):
        wilson(solved, n)


def tries(*tasks: str) -> list[list[bool]]:
    """Tasks by the outcomes of their tries: "10" is solved once, failed once."""
    return [[outcome == "1" for outcome in task] for task in tasks]


def test_tries_that_agree_count_once() -> None:
    """Two tries of each of ten tasks that always end alike say what one try says."""
    twice, once = pass_rate(tries(*["11"] * 4, *["00"] * 6)), pass_rate(tries(*"1111000000"))
    assert (twice["low"], twice["high"]) == pytest.approx((once["low"], once["high"]))
    assert (twice["pass_at_1"], twice["n"], once["n"]) == (0.4, 20, 10)
    for outcome in "01":
        alike = pass_rate(tries(*[3 * outcome] * 7))
        assert (alike["low"], alike["high"]) == pytest.approx(wilson(7 * int(outcome), 7))


def test_tries_that_differ_count_each() -> None:
    """All tasks are equally hard: their outcomes vary within tasks alone, so every try is a sample of its own."""
    assert pass_rate(tries(*["10"] * 10))["low"] == pytest.approx(wilson(10, 20)[0])


def test_effective_tries_by_hand() -> None:
    # rate 1/2 of 8; tasks are off by 1, 0, 0, -1 from their expected 1: variance (1 + 1) / 64, so 0.25 * 64 / 2 = 8 tries.
    assert pass_rate(tries("11", "10", "01", "00"))["low"] == pytest.approx(wilson(4, 8)[0])
    # Two tasks of four tries, off by 2 and -2: variance 8 / 64, so 0.25 * 64 / 8 = 2 tries.
    assert pass_rate(tries("1111", "0000"))["low"] == pytest.approx(wilson(1, 2)[0])


@settings(deadline=None)
@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=4), min_size=1, max_size=30))
def test_any_tries_give_an_interval_around_the_rate(tasks: list[list[bool]]) -> None:
    found = pass_rate(tasks)
    assert found["pass_at_1"] is not None
    assert 0 <= found["low"] <= found["pass_at_1"] + 1e-12
    assert found["pass_at_1"] - 1e-12 <= found["high"] <= 1


def test_paired_difference_by_hand() -> None:
    """Agresti and Min (2005): 0.5 in each of the four cells, so two tasks more and a sum of squares that is 1 larger."""
    found = paired_difference([1, 0, 0, -1, 1, 1, 0, 0])  # sum 2, squares 4: centre 0.2, variance 5/10 - 0.04 = 0.46
    assert found["difference"] == 0.25
    half = 1.959964 * (0.46 / 10) ** 0.5
    assert (found["low"], found["high"]) == pytest.approx((0.2 - half, 0.2 + half), abs=1e-6)
    assert found["tasks"] == 8


def test_where_no_task_differs_the_difference_is_still_uncertain() -> None:
    for n, half in ((8, 0.196), (98, 0.0196)):  # 1.96 sqrt(1 / (n + 2)) / sqrt(n + 2)
        found = paired_difference([0.0] * n)
        assert (found["difference"], found["low"], found["high"]) == pytest.approx((0, -half, half), abs=1e-4)
    assert paired_difference([]) == {"difference": None, "low": -1.0, "high": 1.0, "tasks": 0}


@pytest.mark.parametrize(("n", "runs"), [(8, 2), (20, 1), (100, 2)])
def test_intervals_hold_what_they_promise(n: int, runs: int) -> None:
    """Tasks of all kinds, from hopeless to easy; the second arm solves half of what the first does not."""
    rng, held, samples = np.random.default_rng(5), np.zeros(2), 400
    for _ in range(samples):
        chance = rng.beta(0.6, 1.4, n)  # mean 0.3
        first, second = (rng.random((runs, n)) < p for p in (chance, chance + (1 - chance) / 2))
        rate, gain = pass_rate(first.T.tolist()), paired_difference((second.mean(0) - first.mean(0)).tolist())
        held += [rate["low"] <= 0.3 <= rate["high"], gain["low"] <= 0.35 <= gain["high"]]
    # 0.95, less three standard errors of 400 samples, and what eight tasks cost the approximation.
    assert (held / samples > 0.9).all()


def test_a_few_tasks_tried_often_are_few_tasks() -> None:
    """Pooling eight tries of twelve tasks as if they were 96 would promise 95% and hold far less."""
    rng, held, pooled, samples = np.random.default_rng(6), 0, 0, 300
    for _ in range(samples):
        chance = rng.beta(0.3, 0.3, 12)
        outcomes = (rng.random((8, 12)) < chance).T.tolist()
        found = pass_rate(outcomes)
        low, high = wilson(sum(map(sum, outcomes)), 96)
        held, pooled = held + (found["low"] <= 0.5 <= found["high"]), pooled + (low <= 0.5 <= high)
    assert held / samples > 0.9
    assert pooled / samples < 0.75
