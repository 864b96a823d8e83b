import pytest
from hypothesis import given
from hypothesis import strategies as st

from compactionrl.evaluation.statistics import pass_rate, wilson


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
