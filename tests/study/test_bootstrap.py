import math
import random

import numpy as np
import pytest
from study_ledgers import cell, ledger_of, synthetic_ledger

from compactionrl.study import bootstrap
from compactionrl.study.bootstrap import Outcomes, interval, outcomes, paired, share, t_interval, t_quantile

NAN = math.nan


def of(rows: dict[int, list[float]]) -> Outcomes:
    return Outcomes(tuple(rows), np.array(list(rows.values()), dtype=float))


def test_outcomes_are_read_seed_by_seed() -> None:
    cells = {
        f"plain/full/{seed}": cell("plain", "full", seed, {"x4": text}) for seed, text in [(2, "01-1"), (1, "1100")]
    }
    found = outcomes(ledger_of(cells), "plain", "full", "x4")
    assert found.seeds == (1, 2)
    np.testing.assert_array_equal(found.matrix, [[1, 1, 0, 0], [0, 1, NAN, 1]])
    assert found.per_seed == {1: 1 / 2, 2: 2 / 3}
    assert outcomes(ledger_of(cells), "plain", "full", "x4", seeds=[2, 9]).seeds == (2,)
    assert outcomes(ledger_of(cells), "plain", "full", "2C").seeds == ()
    assert outcomes(ledger_of(cells), "plain", "base", "x4").matrix.shape == (0, 4)


def test_swaps_are_read_by_their_pair() -> None:
    ledger = ledger_of({"plain/swap/1": cell("plain", "swap", 1, {"base/full": "0111", "full/base": "0000"})})
    assert outcomes(ledger, "plain", "swap", "base/full").per_seed == {1: 3 / 4}


def test_a_seed_without_any_verdict_is_no_seed() -> None:
    cells = {
        f"plain/full/{seed}": cell("plain", "full", seed, {"x4": text}) for seed, text in [(1, "----"), (2, "1---")]
    }
    assert outcomes(ledger_of(cells), "plain", "full", "x4").per_seed == {2: 1}


@pytest.mark.parametrize(("setting", "variant"), [("plane", "full"), ("plain", "fool")])
def test_unknown_names_are_refused_with_the_known_ones(setting: str, variant: str) -> None:
    with pytest.raises(ValueError, match=f"{setting}/{variant}.*plain.*full"):
        outcomes(ledger_of({}), setting, variant, "x4")


@pytest.mark.parametrize("text", ["010", "01x1"])
def test_a_cell_that_does_not_fit_the_tasks_is_named(text: str) -> None:
    with pytest.raises(ValueError, match=r"plain/full/3 in x4: expected 4 outcomes.*run this cell again"):
        outcomes(ledger_of({"plain/full/3": cell("plain", "full", 3, {"x4": text})}), "plain", "full", "x4")


def test_the_mean_is_over_seeds_of_means_over_finished_tasks() -> None:
    matrix = np.array([[1, 0, 0, 0], [1, 1, NAN, NAN]])
    assert interval(matrix).mean == (1 / 4 + 1) / 2


def test_equal_numbers_in_another_shape_have_an_interval_of_their_own() -> None:
    matrix = np.random.default_rng(0).normal(size=(4, 15))
    found = interval(matrix)
    assert interval(matrix.reshape(15, 4))[1:] != found[1:]
    assert interval(np.asfortranarray(matrix)) == found  # whatever its order in memory


def test_replicates_equal_a_bootstrap_written_in_plain_python() -> None:
    matrix = np.array([[1, 0, NAN, 1], [0, NAN, NAN, 1], [0, 0, 1, 0]])
    seed_weights, task_weights = bootstrap.resamples(3, 0, 7), bootstrap.resamples(4, 1, 7)
    expected = []
    for of_seeds, of_tasks in zip(seed_weights, task_weights, strict=True):
        means = []
        for row, times in zip(matrix, of_seeds, strict=True):
            drawn = [x for x, n in zip(row, of_tasks, strict=True) for _ in range(int(n)) if not math.isnan(x)]
            means += [sum(drawn) / len(drawn)] * int(times) if drawn else []
        if means:
            expected.append(sum(means) / len(means))
    found = bootstrap.replicates(matrix, 7)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)
    assert interval(matrix, seed=7)[1:] == pytest.approx(np.quantile(expected, [0.025, 0.975]), abs=1e-12)


def test_resamples_draw_with_replacement_and_independently_for_seeds_and_tasks() -> None:
    seeds, tasks = bootstrap.resamples(5, 0, 0), bootstrap.resamples(5, 1, 0)
    assert (seeds.sum(axis=1) == 5).all()
    assert seeds.var() == pytest.approx(5 * 0.2 * 0.8, rel=0.05)
    assert abs(np.corrcoef(seeds[:, 0], tasks[:, 0])[0, 1]) < 0.04
    assert (bootstrap.resamples(5, 0, 1) != seeds).any()


def test_variance_of_the_replicates_is_owens() -> None:
    """Resampling rows and columns gives the sum of their sample variances and of that of the rest."""
    rng = np.random.default_rng(3)
    matrix = rng.normal(size=(6, 1)) + rng.normal(size=(1, 20)) + rng.normal(size=(6, 20))
    rows, columns = matrix.mean(axis=1), matrix.mean(axis=0)
    rest = matrix - rows[:, None] - columns[None, :] + matrix.mean()
    expected = rows.var() / 6 + columns.var() / 20 + rest.var() / (6 * 20)
    assert bootstrap.replicates(matrix, 0).var() == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize(
    ("df", "tabled"), [(1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764), (9, 2.2622), (30, 2.0423), (1000, 1.9623)]
)
def test_quantiles_of_students_t(df: int, tabled: float) -> None:
    assert t_quantile(df) == pytest.approx(tabled, abs=5e-5)


def test_t_interval_by_hand() -> None:
    # mean 2, standard deviation 1, three values: 2 -+ 4.3027 / sqrt(3)
    assert t_interval(np.array([1.0, 2.0, 3.0])) == pytest.approx((2 - 2.48414, 2 + 2.48414), abs=1e-4)


def test_paired_difference_by_hand() -> None:
    a = of({1: [1, 1, 1, 0], 2: [1, 1, NAN, 0], 5: [1, 1, 1, 1]})
    b = of({1: [1, 0, 0, 0], 2: [0, NAN, 1, 0], 9: [0, 0, 0, 0]})
    found = paired(a, b)
    assert found.per_seed == {1: 2 / 4, 2: 1 / 2}
    assert found.difference == 1 / 2
    assert (found.t_low, found.t_high) == (1 / 2, 1 / 2)
    assert found.low < 1 / 2 < found.high
    opposite = paired(b, a)
    assert opposite.difference == -1 / 2
    assert (opposite.low, opposite.high) == pytest.approx((-found.high, -found.low), abs=1e-12)


def test_pairing_removes_what_the_tasks_have_in_common() -> None:
    rng = np.random.default_rng(0)
    hard = (rng.random(60) < 0.5).astype(float)
    a, b = of({1: hard, 2: hard}), of({1: hard, 2: hard})
    assert paired(a, b)[:5] == (0, 0, 0, 0, 0)
    unpaired = interval(a.matrix)
    assert unpaired.high - unpaired.low > 0.2


def test_nothing_in_common_says_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"seeds \[1\] and \[2\].*compactionrl study"):
        paired(of({1: [1, 0]}), of({2: [1, 0]}))
    with pytest.raises(ValueError, match="nothing to compare"):
        paired(of({1: [1, NAN]}), of({1: [NAN, 0]}))


def test_one_seed_has_an_interval_over_tasks_and_none_over_seeds() -> None:
    found = paired(of({1: [1, 1, 0, 1]}), of({1: [0, 0, 0, 1]}))
    assert found.difference == 1 / 2
    assert 0 <= found.low < 1 / 2 < found.high <= 1
    assert (found.t_low, found.t_high) == (-math.inf, math.inf)


def test_equal_outcomes_leave_no_doubt() -> None:
    assert interval(np.ones((3, 4))) == (1, 1, 1)
    assert interval(np.zeros((1, 1))) == (0, 0, 0)


def test_share_of_a_gain() -> None:
    base = of({1: [0] * 40, 2: [0] * 40, 3: [0] * 40})
    whole = of({1: [1] * 40, 2: [1] * 40})
    half = of({1: [1] * 20 + [0] * 20, 2: [1] * 20 + [0] * 20, 3: [0] * 40})
    found = share(half, whole, base)
    assert found is not None
    assert found.mean == 1 / 2
    # whole - base is 1 whatever is drawn, so the share varies as the half of the tasks does
    assert (found.low, found.high) == pytest.approx(interval(half.on([1, 2]).matrix)[1:])
    assert share(whole, whole, base) == (1, 1, 1)


def test_no_share_of_a_gain_that_is_not_there() -> None:
    base, better = of({1: [0, 1] * 20}), of({1: [1, 1] * 20})
    assert share(better, base, base) is None
    assert share(better, better, of({2: [0, 1] * 20})) is None


def test_the_seed_picks_the_resamples() -> None:
    matrix = outcomes(synthetic_ledger(), "plain", "full", "x4").matrix
    assert interval(matrix) == interval(matrix)
    assert interval(matrix, seed=1) != interval(matrix)
    assert interval(matrix, seed=1)[1:] == pytest.approx(interval(matrix)[1:], abs=0.01)


@pytest.mark.parametrize(("spread", "least", "most"), [(0.0, 0.97, 1.0), (0.5, 0.75, 0.93)])
def test_coverage_is_as_the_module_says(spread: float, least: float, most: float) -> None:
    """Too wide when only single outcomes vary, too narrow when five seeds differ much; t holds its level in both."""
    rng, trials = np.random.default_rng(1), 200
    held = {"bootstrap": 0, "t": 0}
    for _ in range(trials):
        chance = rng.uniform(0.5 - spread, 0.5 + spread, (5, 1))
        matrix = (rng.random((5, 60)) < chance).astype(float)
        low, high = interval(matrix)[1:]
        t_low, t_high = t_interval(matrix.mean(axis=1))
        held["bootstrap"] += low <= 0.5 <= high
        held["t"] += t_low <= 0.5 <= t_high
    assert least <= held["bootstrap"] / trials <= most
    assert held["t"] / trials >= 0.9


def test_random_brute_force_of_the_mean() -> None:
    rng = random.Random(0)
    for _ in range(50):
        rows = [[rng.choice([0.0, 1.0, NAN]) for _ in range(5)] + [1.0] for _ in range(rng.randint(1, 4))]
        finished = [[x for x in row if not math.isnan(x)] for row in rows]
        expected = sum(sum(row) / len(row) for row in finished) / len(rows)
        assert bootstrap.mean(np.array(rows)) == pytest.approx(expected)
