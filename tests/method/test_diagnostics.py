import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compactionrl.method import (
    ESTIMATORS,
    Layout,
    clipped,
    credit_diagnostics,
    critic_diagnostics,
    estimate,
    kl_to_sampler,
    masked,
    policy_diagnostics,
    ratio,
    truncated,
)

from . import brute


def test_policy_numbers_by_hand() -> None:
    rho = torch.tensor([1.0, 2.0, 0.5, 2.0], dtype=torch.float64)
    behaviour = torch.full((4,), -1.0, dtype=torch.float64)
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0])
    found = policy_diagnostics(rho.log() - 1, behaviour, advantages)
    assert found["ratio/mean"] == pytest.approx(5.5 / 4)
    assert found["ratio/max"] == pytest.approx(2.0)
    assert found["ratio/clip_fraction"] == 0.5  # the last token moved the wrong way: it keeps its gradient
    assert found["ratio/kl_to_sampler"] == pytest.approx((2 * (1 - math.log(2)) + (-0.5 + math.log(2))) / 4)


def test_each_loss_tells_on_how_many_tokens_it_acts() -> None:
    """Ratios 0.7, 1, 1.25, 3: two or three of them outside (0.8, 1.3) or (0.8, 1.2), one above a cap of 2."""
    logprobs, zeros = torch.tensor([0.7, 1.0, 1.25, 3.0], dtype=torch.float64).log(), torch.zeros(4)

    def fractions(**options: Any) -> dict[str, float]:
        found = policy_diagnostics(logprobs, zeros.double(), -torch.ones(4), **options)
        return {key: value for key, value in found.items() if key.endswith("fraction")}

    assert fractions(clip_high=0.3) == {"ratio/clip_fraction": 0.25}
    assert fractions(kind="truncated", ratio_cap=2.0) == {"ratio/truncated_fraction": 0.25}
    assert fractions(kind="masked", clip_high=0.3) == {"ratio/masked_fraction": 0.5}
    assert fractions(kind="masked", clip_high=0.2) == {"ratio/masked_fraction": 0.75}


def test_the_edges_of_mask_and_cap() -> None:
    """The interval of the mask is open: its ends are outside. A ratio at the cap is not changed by it."""
    rho = torch.tensor([0.5, 0.75, 1.0, 1.25, 1.5])
    assert masked(rho, 0.25, 0.25).tolist() == [True, True, False, True, True]
    assert truncated(rho, 1.25).tolist() == [False, False, False, False, True]


def test_clipped_is_where_e12_gives_no_gradient() -> None:
    rho = torch.tensor([1.25, 1.35, 0.75, 0.85])
    one = torch.ones(4)
    assert clipped(rho, one, 0.2, 0.3).tolist() == [False, True, False, False]
    assert clipped(rho, -one, 0.2, 0.3).tolist() == [False, False, True, False]
    assert not clipped(rho, 0 * one).any()


def test_kl_to_sampler_averages_to_the_divergence() -> None:
    """Summed over the vocabulary with the sampler's probabilities it is the divergence itself."""
    sampler, policy = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.2, 0.5, 0.3]).double()
    k3 = kl_to_sampler(policy.log(), sampler.log())
    assert bool((k3 >= 0).all())
    assert float((sampler * k3).sum()) == pytest.approx(float((sampler * (sampler / policy).log()).sum()))
    assert ratio(policy.log(), sampler.log()).tolist() == pytest.approx([0.4, 5 / 3, 1.5])


def test_explained_variance_by_segment_place() -> None:
    layout = brute.from_lengths([[2, 2], [1, 1]])
    targets = torch.tensor([0.0, 1.0, 0.0, 2.0, 2.0, 1.0])
    values = torch.tensor([0.0, 1.0, 1.0, 1.0, 2.0, 1.0])
    found = critic_diagnostics(layout, values, targets)
    assert found["explained_variance/segment_0"] == pytest.approx(1.0)
    assert found["explained_variance/segment_1"] == pytest.approx(0.0)
    assert found["explained_variance/all"] == pytest.approx(1 - 2 / 4)
    assert found.keys() == {f"explained_variance/{name}" for name in ("all", "segment_0", "segment_1")}


def test_late_segments_share_a_bucket() -> None:
    layout = brute.from_lengths([[2] * 9])
    targets = torch.arange(18.0)
    found = critic_diagnostics(layout, targets.clone(), targets)
    assert set(found) == {"explained_variance/all", "explained_variance/segment_6+"} | {
        f"explained_variance/segment_{i}" for i in range(6)
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_targets_that_only_differ_by_rounding_have_no_explained_variance(dtype: torch.dtype) -> None:
    layout = brute.from_lengths([[50, 3, 40], [7]])
    values = brute.numbers(layout, 0)[0].to(dtype)
    found = estimate(layout, values, torch.full((2,), 0.1, dtype=dtype), critic_lambda=0.999999999)
    assert critic_diagnostics(layout, values, found.targets) == {}


def test_credit_by_hand() -> None:
    layout = brute.from_lengths([[2, 1, 1]])
    found = estimate(layout, torch.zeros(4), torch.tensor([-1.0]), lam=0.5)
    # -A: 1/8 1/4 | 1/2 | 1, the second segment is the summary.
    assert credit_diagnostics(layout, found) == pytest.approx(
        {
            "credit/summary_share": 0.5 / 1.875,
            "factor/execution_mean": (0.25 + 1) / 2,
            "factor/execution_min": 0.25,
            "factor/summary_mean": 0.5,
            "factor/summary_min": 0.5,
        }
    )


@given(brute.layouts(), st.integers(0, 999), st.sampled_from(ESTIMATORS), st.booleans())
@settings(max_examples=60, deadline=None)
def test_numbers_are_finite_or_absent(layout: Layout, seed: int, estimator: str, flat: bool) -> None:
    values, rewards = brute.numbers(layout, seed)
    if flat:
        values, rewards = values * 0, rewards * 0
    found = estimate(layout, values, rewards, estimator=estimator, groups=torch.zeros(layout.n_rollouts).long())
    logprobs = values[layout.positions]
    numbers = (
        policy_diagnostics(logprobs * 1e3, -logprobs * 1e3, found.advantages[layout.positions])
        | critic_diagnostics(layout, values, found.targets)
        | credit_diagnostics(layout, found)
    )
    assert all(isinstance(number, float) and math.isfinite(number) for number in numbers.values())
