"""E13 to E15 and the estimators beside them, against sums over Python lists and numbers worked out by hand."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from compactionrl.method import ESTIMATORS, SPANS, Estimate, Layout, estimate

from . import brute

VALUE_BASED = [name for name in ESTIMATORS if name != "group"]
EXACT = {"rtol": 1e-10, "atol": 1e-12}
seeds = st.integers(0, 2**31)
spans = st.sampled_from(SPANS)
fractions = st.sampled_from([0.0, 0.3, 0.9, 1.0]) | st.floats(0, 1)


def run(layout: Layout, values: Tensor, rewards: Tensor, estimator: str, **options: object) -> Estimate:
    if estimator == "group":
        options.setdefault("groups", torch.zeros(layout.n_rollouts, dtype=torch.long))
    return estimate(layout, values, rewards, estimator=estimator, **options)


def insert_masked(layout: Layout, values: Tensor, where: list[int], junk: list[float]) -> tuple[Layout, Tensor, Tensor]:
    """The batch with tokens that are not optimised put before the given positions, and where the old tokens went."""
    rows = [(s, v, True) for s, v in zip(layout.segment.tolist(), values.tolist(), strict=True)]
    for at, value in sorted(zip(where, junk, strict=True), key=lambda pair: pair[0], reverse=True):
        rows.insert(at % (len(layout.segment) + 1), (-1, value, False))
    longer = Layout(
        torch.tensor([s for s, _, _ in rows], dtype=torch.long),
        layout.rollout,
        layout.window,
        layout.is_summary,
        layout.n_rollouts,
    )
    old = torch.tensor([is_old for _, _, is_old in rows], dtype=torch.bool)
    return longer, torch.tensor([v for _, v, _ in rows], dtype=values.dtype), old


@pytest.mark.parametrize("estimator", VALUE_BASED)
@given(brute.layouts(), seeds, spans, fractions, fractions | st.just("policy"), st.sampled_from([0.4, 1.5, 8.0]))
@settings(max_examples=60, deadline=None)
def test_equals_brute_force(
    estimator: str, layout: Layout, seed: int, span: str, gamma: float, critic_lambda: float | str, alpha: float
) -> None:
    values, rewards = brute.numbers(layout, seed)
    found = run(
        layout, values, rewards, estimator, gamma=gamma, lambda_length=span, alpha=alpha, critic_lambda=critic_lambda
    )
    lams = brute.lambdas(layout, span, alpha)
    advantages, targets = brute.estimate(layout, values, rewards, estimator, gamma, lams, critic_lambda)
    assert_close(found.lambdas, torch.tensor(lams, dtype=torch.float64), **EXACT)
    assert_close(found.advantages, advantages, **EXACT)
    assert_close(found.targets, targets, **EXACT)


@given(brute.layouts(), seeds, fractions, fractions)
@settings(max_examples=60, deadline=None)
def test_e15_the_reward_is_discounted_by_the_distance_to_the_end_of_the_rollout(
    layout: Layout, seed: int, gamma: float, lam: float
) -> None:
    """With V = 0 and one lambda: (gamma lambda)^(distance to the end), by both estimators that see the whole rollout."""
    rewards = brute.numbers(layout, seed)[1]
    expected = torch.zeros(layout.segment.numel(), dtype=torch.float64)
    tokens = brute.positions(layout)
    for r in range(layout.n_rollouts):
        chain = [t for s, own in enumerate(tokens) if layout.rollout[s] == r for t in own]
        for distance, t in enumerate(reversed(chain)):
            expected[t] = (gamma * lam) ** distance * rewards[r]
    for estimator in ("cross_trajectory", "concatenated"):
        found = run(layout, torch.zeros_like(expected), rewards, estimator, gamma=gamma, lam=lam)
        assert_close(found.advantages, expected, **EXACT)


@given(brute.layouts(), seeds, spans)
@settings(max_examples=40, deadline=None)
def test_with_v_zero_and_adaptive_lambda(layout: Layout, seed: int, span: str) -> None:
    """One lambda per rollout: the two agree. `segment` sees each segment's own end only, whatever the span."""
    rewards = brute.numbers(layout, seed)[1]
    zero = torch.zeros(layout.segment.numel(), dtype=torch.float64)
    paper, exact = (run(layout, zero, rewards, name) for name in ("cross_trajectory", "concatenated"))
    assert_close(paper.advantages, exact.advantages, **EXACT)
    found, lams = run(layout, zero, rewards, "segment", lambda_length=span).advantages, brute.lambdas(layout, span, 1.5)
    for s, own in enumerate(brute.positions(layout)):
        for distance, t in enumerate(reversed(own)):
            assert float(found[t]) == pytest.approx(lams[s] ** distance * float(rewards[layout.rollout[s]]), rel=1e-10)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@given(
    brute.layouts(),
    seeds,
    spans,
    st.booleans(),
    st.lists(st.tuples(st.integers(0, 99), st.sampled_from([math.nan, math.inf, -math.inf, 1e300, 0.5])), max_size=9),
)
@settings(max_examples=40, deadline=None)
def test_masked_tokens_change_nothing(
    estimator: str, layout: Layout, seed: int, span: str, whiten: bool, junk: list[tuple[int, float]]
) -> None:
    values, rewards = brute.numbers(layout, seed)
    longer, more_values, old = insert_masked(layout, values, [at for at, _ in junk], [value for _, value in junk])
    before = run(layout, values, rewards, estimator, lambda_length=span, whiten=whiten)
    after = run(longer, more_values, rewards, estimator, lambda_length=span, whiten=whiten)
    for name in ("advantages", "targets"):
        assert torch.equal(getattr(after, name)[old], getattr(before, name))
        assert not getattr(after, name)[~old].any()
    assert torch.equal(after.lambdas, before.lambdas)
    assert torch.equal(after.factors, before.factors)


@given(st.integers(1, 40), seeds, fractions, fractions, fractions)
@settings(max_examples=40, deadline=None)
def test_one_segment_gets_plain_gae_from_every_value_based_estimator(
    n: int, seed: int, gamma: float, lam: float, critic_lambda: float
) -> None:
    layout = brute.from_lengths([[n], [3, 2], [n]])
    values, rewards = brute.numbers(layout, seed)
    expected: dict[str, list[float]] = {"advantages": [], "targets": []}
    for name, decay in (("advantages", lam), ("targets", critic_lambda)):
        trace, following, reward = 0.0, 0.0, float(rewards[2])
        for value in reversed(values[-n:].tolist()):
            trace = reward + gamma * following - value + gamma * decay * trace
            following, reward = value, 0.0
            expected[name].insert(0, trace + (value if name == "targets" else 0.0))
    for estimator in VALUE_BASED:
        found = run(layout, values, rewards, estimator, gamma=gamma, lam=lam, critic_lambda=critic_lambda)
        for name, numbers in expected.items():
            assert_close(getattr(found, name)[-n:], torch.tensor(numbers, dtype=torch.float64), **EXACT)


def test_by_hand() -> None:
    """Two segments of two tokens, V = .5 .25 | .5 0, R = 1, gamma 1, lambda .5."""
    layout = brute.from_lengths([[2, 2]])
    values, rewards = torch.tensor([0.5, 0.25, 0.5, 0.0]), torch.tensor([1.0])
    expected = {
        # delta: -.25 .75 | -.5 1; E14: .5^2
        "segment": [0.125, 0.75, 0.0, 1.0],
        "cross_trajectory": [0.125 / 4, 0.75 / 4, 0.0, 1.0],
        # delta: -.25 .25 -.5 1
        "concatenated": [-0.125, 0.25, 0.0, 1.0],
    }
    for estimator, advantages in expected.items():
        found = run(layout, values, rewards, estimator, lam=0.5)
        assert found.advantages.tolist() == advantages
        assert found.targets.tolist() == [1.0] * 4  # critic lambda 1, gamma 1: the reward, whatever V


@given(brute.layouts(), seeds, st.sampled_from(SPANS))
@settings(max_examples=30, deadline=None)
def test_cross_trajectory_never_corrects_the_target(layout: Layout, seed: int, span: str) -> None:
    values, rewards = brute.numbers(layout, seed)
    paper, plain = (
        run(layout, values, rewards, name, lambda_length=span, critic_lambda=0.8, whiten=name != "segment")
        for name in ("cross_trajectory", "segment")
    )
    assert torch.equal(paper.targets, plain.targets)


@given(st.lists(st.lists(st.integers(0, 3000), min_size=1, max_size=7), min_size=1, max_size=4))
@settings(max_examples=60, deadline=None)
def test_every_factor_is_above_one_half_with_one_lambda_per_rollout(rollouts: list[list[int]]) -> None:
    layout = brute.from_lengths(rollouts)
    found = run(layout, torch.zeros(layout.segment.numel()), torch.ones(layout.n_rollouts), "cross_trajectory")
    # A segment with tokens, before the last: N_{>s} <= l - 1, and (1 - 1/(1.5 l))^(l - 1) falls towards e^(-1/1.5) = .513.
    assert bool((found.factors[layout.lengths > 0] >= 0.51).all())


def test_a_short_summary_lives_by_the_rollouts_lambda_only() -> None:
    """300 summary tokens with 20,000 after them: 5e-20 by its own length, above one half by the rollout's."""
    layout = brute.from_lengths([[1000, 300, 20_000]])
    values, rewards = torch.zeros(21_300), torch.ones(1)
    own = run(layout, values, rewards, "cross_trajectory", lambda_length="segment")
    assert float(own.factors[1]) == pytest.approx((1 - 1 / 450) ** 20_000, rel=1e-9)
    assert float(own.factors[1]) < 1e-19
    assert float(run(layout, values, rewards, "cross_trajectory").factors[1]) > 0.51


@pytest.mark.parametrize("estimator", VALUE_BASED)
def test_gamma_zero_keeps_the_reward(estimator: str) -> None:
    """A rollout that ends in masked tokens, as in a cut observation, still has its reward at its last optimised token."""
    layout = brute.make_layout([[[(False, [True, False, True, False, False])]]])
    values = torch.tensor([0.25, math.nan, 0.5, math.nan, 9.0])
    found = run(layout, values, torch.tensor([1.0]), estimator, gamma=0.0)
    assert found.advantages.tolist() == [-0.25, 0, 0.5, 0, 0]
    assert found.targets.tolist() == [0, 0, 1, 0, 0]


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("whiten", [False, True])
def test_nothing_optimised_gives_zeros(estimator: str, whiten: bool) -> None:
    masked = brute.make_layout([[[(False, [False] * 3), (True, [False])]], []])
    for layout in (masked, brute.make_layout([[]])):
        values = torch.full((layout.segment.numel(),), math.nan)
        found = run(layout, values, torch.ones(layout.n_rollouts), estimator, whiten=whiten)
        assert not found.advantages.any()
        assert not found.targets.any()
        assert bool(found.lambdas.isfinite().all())
        assert bool(found.factors.isfinite().all())


def test_group_counts_a_rollout_once_however_many_segments_it_has() -> None:
    layout = brute.from_lengths([[2, 1, 1], [1]])
    found = run(layout, torch.zeros(5), torch.tensor([1.0, 0.5]), "group")
    assert found.advantages.tolist() == [0.25, 0.25, 0.25, 0.25, -0.25]


def test_groups_are_apart_and_a_rollout_that_is_not_trained_is_no_baseline() -> None:
    layout = brute.from_lengths([[1], [2], [1], [0], [1]])
    rewards = torch.tensor([1.0, 2.0, 0.0, -100.0, 1.0])
    found = run(layout, torch.zeros(5), rewards, "group", groups=torch.tensor([70, 3, 70, 70, 3]))
    assert found.advantages.tolist() == [0.5, 0.5, 0.5, -0.5, -0.5]


def test_every_optimised_token_carries_its_rollouts_group_advantage() -> None:
    """Segments with masks in different places: no token of an earlier one is left with nothing."""
    layout = brute.make_layout(
        [[[(False, [True, True, False]), (True, [True])], [(False, [False, False, True])]], [[(False, [True])]]]
    )
    found = run(layout, torch.zeros(8), torch.tensor([1.0, 0.0]), "group")
    assert found.advantages.tolist() == [0.5, 0.5, 0, 0.5, 0, 0, 0.5, -0.5]


@pytest.mark.parametrize("estimator", VALUE_BASED)
@given(brute.layouts(), seeds, spans)
@settings(max_examples=30, deadline=None)
def test_whitening_scales_before_e14_and_does_not_shift(estimator: str, layout: Layout, seed: int, span: str) -> None:
    values, rewards = brute.numbers(layout, seed)
    plain = run(layout, values, rewards, estimator, lambda_length=span)
    white = run(layout, values, rewards, estimator, lambda_length=span, whiten=True)
    local = run(layout, values, rewards, "segment" if estimator != "concatenated" else estimator, lambda_length=span)
    chosen = local.advantages[layout.mask]
    scale = math.sqrt(sum(a * a for a in chosen.tolist()) / len(chosen)) if len(chosen) else 1.0
    assert_close(white.advantages, plain.advantages / (scale + 1e-8), **EXACT)
    assert torch.equal(white.targets, plain.targets)


def test_whitening_leaves_rounding_noise_alone() -> None:
    layout = brute.from_lengths([[2]] * 3)
    found = run(layout, torch.zeros(6), torch.tensor([0.1, 0.1, 0.1]), "group", whiten=True)
    assert bool((found.advantages.abs() < 1e-6).all())


@pytest.mark.parametrize("estimator", VALUE_BASED)
def test_64k_tokens_at_lambda_09_in_float32(estimator: str) -> None:
    layout = brute.from_lengths([[30_000, 5_536, 30_000]])
    values, rewards = (x.float() for x in brute.numbers(layout, 3))
    found = run(layout, values, rewards, estimator, lam=0.9, critic_lambda=0.9)
    assert found.advantages.dtype == torch.float32
    ends = {65_535} if estimator == "concatenated" else {29_999, 35_535, 65_535}
    later = {"cross_trajectory": [(29_999, 35_536), (35_535, 30_000)]}.get(estimator, [])
    trace, expected, v = 0.0, [0.0] * 65_536, values.double().tolist()
    for t in reversed(range(65_536)):
        trace = float(rewards[0]) - v[t] if t in ends else v[t + 1] - v[t] + 0.9 * trace
        expected[t] = trace
    targets = torch.tensor(expected, dtype=torch.float64) + values.double()
    for end, n in later:
        start = 0 if end == 29_999 else 30_000
        expected[start : end + 1] = [0.9**n * x for x in expected[start : end + 1]]
    assert_close(found.advantages, torch.tensor(expected), rtol=1e-6, atol=1e-7)
    assert_close(found.targets, targets.float(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("estimator", VALUE_BASED)
@pytest.mark.parametrize("lam", [1e-3, 0.5, 1.0, None])
def test_long_rollouts_stay_finite(estimator: str, lam: float | None) -> None:
    layout = brute.from_lengths([[300_000, 10, 300_000], [5]])
    values, rewards = (x.float() for x in brute.numbers(layout, 4))
    found = run(layout, values, rewards, estimator, lam=lam)
    for numbers in (found.advantages, found.targets, found.lambdas, found.factors):
        assert bool(numbers.isfinite().all())
    if lam == 1.0 and estimator == "concatenated":
        # The sum telescopes to R - V.
        assert_close(found.advantages[:600_010], rewards[0] - values[:600_010], rtol=1e-5, atol=1e-5)


def test_the_adaptive_lambda_of_a_long_rollout_is_exact() -> None:
    """In float32 this lambda, and all the more its 64,000th power, would be off in the third digit."""
    layout = brute.from_lengths([[64_000]])
    values, rewards = torch.zeros(64_000), torch.ones(1)
    first = float(run(layout, values, rewards, "cross_trajectory").advantages[0])
    assert first == pytest.approx((1 - 1 / 96_000) ** 63_999, rel=1e-6)


def test_bad_input_is_refused() -> None:
    layout = brute.from_lengths([[2, 1], [1]])
    values, rewards = torch.zeros(4), torch.zeros(2)
    bad = {
        "unknown estimator": {"estimator": "gae"},
        "unknown span": {"lambda_length": "turn"},
        "gamma is": {"gamma": 1.1},
        "lam is": {"lam": -0.1},
        "critic_lambda is 2.0": {"critic_lambda": 2.0},
        "critic_lambda is 'actor'.*'policy'": {"critic_lambda": "actor"},
        "alpha is": {"alpha": 0.0},
        "needs groups": {"estimator": "group"},
    }
    for message, options in bad.items():
        with pytest.raises(ValueError, match=message):
            estimate(layout, values, rewards, **options)
    with pytest.raises(ValueError, match="4 tokens"):
        estimate(layout, values[:3], rewards)
    with pytest.raises(ValueError, match="2 rollouts"):
        estimate(layout, values, torch.zeros(4))
