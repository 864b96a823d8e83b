"""Losses and their gradients against plain loops; the same whatever the micro-batches."""

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from compactionrl.method import (
    NORMALISATIONS,
    POLICY_LOSSES,
    Layout,
    entropy_bonus,
    estimate,
    policy_loss,
    token_logprobs,
    token_weights,
    value_loss,
    weight_total,
)

from . import brute

DIM, VOCABULARY = 5, 11
seeds = st.integers(0, 2**31)


class Batch:
    """Random tokens for a layout and a model of three linear maps: hidden states, vocabulary, value."""

    def __init__(self, layout: Layout, seed: int) -> None:
        n, generator = layout.segment.numel(), torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        self.layout = layout
        self.inputs, self.behaviour = normal(n, DIM), -normal(n).abs() - 1
        self.targets = torch.randint(VOCABULARY, (n,), generator=generator)
        self.trunk, self.head, self.critic = normal(DIM, DIM), normal(VOCABULARY, DIM), normal(DIM)
        self.parameters = [self.trunk, self.head, self.critic]
        for parameter in self.parameters:
            parameter.requires_grad_()
        self.old_values = (self.inputs @ self.critic).detach() + 0.1 * normal(n)
        self.estimate = estimate(layout, self.old_values, normal(layout.n_rollouts))

    def loss(self, weights: Tensor, chosen: Tensor) -> Tensor:
        """Of the given tokens, all terms together."""
        logprobs, entropy = token_logprobs(self.inputs[chosen] @ self.trunk, self.head, self.targets[chosen], chunk=4)
        values, w = self.inputs[chosen] @ self.critic, weights[chosen]
        policy = policy_loss(logprobs, self.behaviour[chosen], self.estimate.advantages[chosen], w, 0.2, 0.3)
        value = value_loss(values, self.estimate.targets[chosen], w, self.old_values[chosen], clip=0.05)
        return policy + 0.5 * value - 0.01 * entropy_bonus(entropy, w)

    def naive(self, normalisation: str) -> Tensor:
        """The same, token by token and segment by segment."""
        segments = []
        for own in brute.positions(self.layout):
            terms = []
            for t in own:
                logp = torch.log_softmax(self.inputs[t] @ self.trunk @ self.head.t(), 0)
                rho = torch.exp(logp[self.targets[t]] - self.behaviour[t])
                a = self.estimate.advantages[t]
                surrogate = torch.min(rho * a, torch.clip(rho, 0.8, 1.3) * a)
                v, old, target = self.inputs[t] @ self.critic, self.old_values[t], self.estimate.targets[t]
                held = old + torch.clip(v - old, -0.05, 0.05)
                value = 0.5 * torch.max((v - target) ** 2, (held - target) ** 2)
                terms.append(-surrogate + 0.5 * value - 0.01 * -(logp.exp() * logp).sum())
            if terms:
                segments.append(terms)
        if not segments:
            return torch.zeros((), dtype=torch.float64)
        if normalisation == "segment":
            return sum(sum(terms) / len(terms) for terms in segments) / len(segments)
        tokens = [term for terms in segments for term in terms]
        return sum(tokens) / len(tokens)

    def gradient(self, losses: Iterator[Tensor]) -> tuple[float, Tensor]:
        """The sum of the losses and its gradient, one backward pass for each."""
        total = 0.0
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter)
        for loss in losses:
            total += loss.item()
            if loss.requires_grad:
                loss.backward()
        return total, torch.cat([parameter.grad.flatten() for parameter in self.parameters])


def assert_same(found: tuple[float, Tensor], expected: tuple[float, Tensor]) -> None:
    assert found[0] == pytest.approx(expected[0], rel=1e-9, abs=1e-15)
    assert float((found[1] - expected[1]).norm()) <= 1e-9 * float(expected[1].norm())


@pytest.mark.parametrize("normalisation", NORMALISATIONS)
@given(brute.layouts(), seeds)
@settings(max_examples=25, deadline=None)
def test_loss_and_gradient_equal_a_plain_loop(normalisation: str, layout: Layout, seed: int) -> None:
    batch = Batch(layout, seed)
    weights = token_weights(layout, normalisation)
    expected = batch.gradient(iter([batch.naive(normalisation)]))
    assert_same(batch.gradient(iter([batch.loss(weights, layout.positions)])), expected)


@pytest.mark.parametrize("normalisation", NORMALISATIONS)
def test_micro_batches_and_order_change_nothing(normalisation: str) -> None:
    """Six windows of very different lengths as 1, 2, 3 and 6 micro-batches, forwards and backwards."""
    windows = [[(False, [True, False] * n), (True, [True] * m)] for n, m in [(1, 1), (9, 0), (4, 2), (20, 5), (0, 3)]]
    layout = brute.make_layout([windows[:2], windows[2:4], windows[4:], [[(False, [False] * 6)]]])
    batch, weights = Batch(layout, 5), token_weights(layout, normalisation)
    rows = [layout.positions[layout.window[layout.of_token] == w] for w in range(6)]
    expected = batch.gradient(iter([batch.loss(weights, layout.positions)]))
    assert float(expected[1].norm()) > 0.1
    for micro_batches in (1, 2, 3, 6):
        for order in (rows, rows[::-1]):
            size = 6 // micro_batches
            parts = [torch.cat(order[i : i + size]) for i in range(0, 6, size)]
            assert_same(batch.gradient(batch.loss(weights, part) for part in parts), expected)


def test_every_token_weighs_the_same_in_e12() -> None:
    """1000 tokens with loss 0 and 10 with loss 1: 10/1010, not the .5 that a mean of means gives."""
    layout = brute.from_lengths([[1000], [10]])
    per_token = torch.cat([torch.zeros(1000), torch.ones(10)]).double()
    zeros = torch.zeros_like(per_token)

    def loss(weights: Tensor, part: slice) -> float:
        return float(policy_loss(zeros[part], zeros[part], -per_token[part], weights[part]))

    parts = [slice(0, 1000), slice(1000, 1010)]
    token, segment = (token_weights(layout, name) for name in ("token", "segment"))
    assert loss(token, slice(None)) == pytest.approx(10 / 1010, rel=1e-12)
    assert sum(loss(token, part) for part in parts) == pytest.approx(10 / 1010, rel=1e-12)
    assert sum(loss(segment, part) for part in parts) == pytest.approx(0.5, rel=1e-12)


@given(brute.layouts())
@settings(max_examples=30, deadline=None)
def test_weights_sum_to_one_and_skip_what_is_not_optimised(layout: Layout) -> None:
    for normalisation in NORMALISATIONS:
        weights = token_weights(layout, normalisation)
        assert float(weights.sum()) == pytest.approx(1.0 if layout.count else 0.0)
        assert torch.equal(weights > 0, layout.mask)
        doubled = token_weights(layout, normalisation, total=2 * weight_total(layout, normalisation))
        assert_close(doubled, weights / 2)


def test_segment_weights_skip_empty_segments() -> None:
    layout = brute.from_lengths([[2, 0, 1]])
    assert token_weights(layout, "segment").tolist() == [0.25, 0.25, 0.5]
    assert (weight_total(layout, "token"), weight_total(layout, "segment")) == (3, 2)


def test_nothing_optimised_gives_zero_loss_and_gradient() -> None:
    layout = brute.make_layout([[[(False, [False] * 4), (True, [False])]]])
    batch = Batch(layout, 0)
    for normalisation in NORMALISATIONS:
        loss = batch.loss(token_weights(layout, normalisation), layout.positions)
        assert loss.item() == 0
        loss.backward()
        assert all(not parameter.grad.any() for parameter in batch.parameters)


@pytest.mark.parametrize(
    ("rho", "advantage", "loss", "slope"),
    [
        (1.0, 2.0, -2.0, -2.0),
        (1.1, 2.0, -2.2, -2.0),
        (1.5, 2.0, -2.6, 0.0),  # held at 1 + .3
        (0.5, 2.0, -1.0, -2.0),  # a good token that became rarer is not held
        (0.5, -2.0, 1.6, 0.0),  # held at 1 - .2
        (1.5, -2.0, 3.0, 2.0),  # a bad token that became likelier is not held
    ],
)
def test_clipping(rho: float, advantage: float, loss: float, slope: float) -> None:
    """The policy term by hand, clip_low .2 and clip_high .3; `slope` is its derivative by rho."""
    logprob = torch.tensor([math.log(rho) - 3], dtype=torch.float64, requires_grad=True)
    behaviour, one = torch.tensor([-3.0], dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    found = policy_loss(logprob, behaviour, advantage * one, one, clip_low=0.2, clip_high=0.3)
    found.backward()
    assert found.item() == pytest.approx(loss)
    assert logprob.grad.item() == pytest.approx(slope * rho)


@pytest.mark.parametrize(
    ("kind", "rho", "advantage", "weight"),
    [
        ("truncated", 0.1, 2.0, 0.1),
        ("truncated", 1.4, -2.0, 1.4),
        ("truncated", 1.5, 2.0, 1.5),
        ("truncated", 9.0, 2.0, 1.5),  # held at the cap: it still has a gradient,
        ("truncated", 9.0, -2.0, 1.5),  # whatever the sign
        ("masked", 0.81, 2.0, 0.81),
        ("masked", 1.29, -2.0, 1.29),
        ("masked", 0.79, 2.0, 0.0),  # E12 would train it
        ("masked", 0.79, -2.0, 0.0),
        ("masked", 1.31, 2.0, 0.0),
        ("masked", 1.31, -2.0, 0.0),  # E12 would train it
    ],
)
def test_importance_weights_by_hand(kind: str, rho: float, advantage: float, weight: float) -> None:
    """-weight A log pi, cap 1.5 or mask (0.8, 1.3), beside a token of ratio 1: loss and derivative by log pi.

    The other token keeps its weight of a half: what is masked stays in the denominator.
    """
    behaviour = torch.tensor([-3.0, -1.0], dtype=torch.float64)
    logprobs = (behaviour + torch.tensor([math.log(rho), 0.0])).requires_grad_()
    advantages, halves = torch.tensor([advantage, 3.0], dtype=torch.float64), torch.tensor([0.5, 0.5])
    found = policy_loss(logprobs, behaviour, advantages, halves, 0.2, 0.3, kind=kind, ratio_cap=1.5)
    found.backward()
    assert logprobs.grad.tolist() == pytest.approx([-0.5 * weight * advantage, -0.5 * 3.0])
    assert found.item() == pytest.approx(0.5 * (weight * advantage * (3 - math.log(rho)) + 3.0 * 1.0))


@pytest.mark.parametrize("kind", POLICY_LOSSES)
@given(seeds)
@settings(max_examples=20, deadline=None)
def test_gradients_against_finite_differences(kind: str, seed: int) -> None:
    """Of the loss with its importance weights held where they are: no gradient flows through those."""
    generator = torch.Generator().manual_seed(seed)
    behaviour, moved, advantages = torch.randn(3, 12, generator=generator, dtype=torch.float64)
    logprobs, weights = behaviour + 0.4 * moved, torch.rand(12, generator=generator, dtype=torch.float64)
    rho = (logprobs - behaviour).exp()
    held = rho.clamp(max=1.2) if kind == "truncated" else rho * ((rho > 0.8) & (rho < 1.3))

    def loss(at: Tensor) -> Tensor:
        if kind == "clip":
            return policy_loss(at, behaviour, advantages, weights, 0.2, 0.3)
        return -(weights * held * advantages * at).sum()

    step, eye = 1e-6, torch.eye(12, dtype=torch.float64)
    expected = [float(loss(logprobs + step * row) - loss(logprobs - step * row)) / (2 * step) for row in eye]
    trained = logprobs.clone().requires_grad_()
    policy_loss(trained, behaviour, advantages, weights, 0.2, 0.3, kind=kind, ratio_cap=1.2).backward()
    assert trained.grad.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-7)


@given(seeds)
@settings(max_examples=20, deadline=None)
def test_at_ratio_one_all_kinds_have_one_gradient(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    behaviour, advantages = torch.randn(2, 9, generator=generator, dtype=torch.float64)
    weights = torch.rand(9, generator=generator, dtype=torch.float64)
    for kind in POLICY_LOSSES:
        logprobs = behaviour.clone().requires_grad_()
        policy_loss(logprobs, behaviour, advantages, weights, kind=kind).backward()
        assert_close(logprobs.grad, -weights * advantages)


@pytest.mark.parametrize("kind", ["truncated", "masked"])
def test_a_ratio_beyond_all_numbers_is_cut_like_any_other(kind: str) -> None:
    behaviour, one = torch.tensor([-1e4, -1.0]), torch.ones(2)
    logprobs = torch.tensor([-1.0, -1.0], requires_grad=True)
    policy_loss(logprobs, behaviour, one, one, kind=kind, ratio_cap=2.0).backward()
    assert logprobs.grad.tolist() == [-2.0 if kind == "truncated" else 0.0, -1.0]


def test_value_loss_by_hand() -> None:
    values, targets, w = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 2.0]), torch.tensor([0.5, 0.5])
    assert value_loss(values, targets, w).item() == pytest.approx(0.5 * 0.5 * (1 + 4))
    # Held at 1.8 and .2 the errors are 1.8 and 1.8: the larger of (1, 3.24) and of (4, 3.24).
    clipped = value_loss(values, targets, w, old_values=torch.tensor([2.0, 0.4]), clip=0.2)
    assert clipped.item() == pytest.approx(0.5 * 0.5 * (3.24 + 4))
    with pytest.raises(ValueError, match="old_values"):
        value_loss(values, targets, w, clip=0.2)


def test_mismatched_weights_are_refused() -> None:
    with pytest.raises(ValueError, match="2 tokens, 3 weights"):
        entropy_bonus(torch.ones(2), torch.ones(3))
    with pytest.raises(ValueError, match=r"unknown policy loss 'ppo'.*clip, truncated, masked"):
        policy_loss(*torch.ones(4, 2), kind="ppo")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="unknown normalisation"):
        token_weights(brute.from_lengths([[1]]), "rollout")
