"""One batch, one update: equal to a naive PPO, however the batch is packed; summaries and groups."""

import math
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from training_fakes import parameters, random_rollouts, small_learner

from compactionrl.config import TrainConfig
from compactionrl.rollout.ledger import Rollout
from compactionrl.training.batch import Batch, build_batch
from compactionrl.training.learner import Credit, Learner, repeat


def gradients(
    learner: Learner, batch: Batch, credit: Credit | None = None
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """The gradients of the first update of policy and critic, in place of the update."""
    found: dict[str, Tensor] = {}
    for optimiser in (learner.policy_optimiser, learner.critic_optimiser):
        if optimiser is not None:
            optimiser.max_grad_norm = float("inf")
            optimiser.adam.step = lambda optimiser=optimiser: found.update(  # type: ignore[method-assign]
                {f"{optimiser.name}.{key}": p.grad.clone() for key, p in optimiser.parameters.items()}
            )
    metrics = learner.update(batch, credit or learner.credit(batch))
    return found, metrics


def assert_close(one: dict[str, Tensor], other: dict[str, Tensor], tolerance: float) -> None:
    for model in ("policy", "critic"):
        keys = [key for key in one if key.startswith(model)]
        norm = torch.stack([one[key].norm() for key in keys]).norm()
        difference = torch.stack([(one[key] - other[key]).norm() for key in keys]).norm()
        assert norm > 0
        assert difference <= tolerance * norm, f"{model}: {difference / norm}"


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-9)])
@pytest.mark.parametrize("normalisation", ["token", "segment"])
@pytest.mark.parametrize("seed", range(3))
def test_micro_batches_and_order_change_nothing(
    dtype: torch.dtype, tolerance: float, normalisation: str, seed: int
) -> None:
    """Invariant 5: one micro-batch, one window at a time, or anything between, rollouts in any order."""
    results = []
    for budget, order in ((10_000, None), (1, None), (37, None), (37, seed)):
        rollouts = random_rollouts(6, seed)
        if order is not None:
            random.Random(order).shuffle(rollouts)
        learner = small_learner(dtype, micro_batch_tokens=budget, normalisation=normalisation, entropy_bonus=0.01)
        batch = build_batch(rollouts, learner.config)
        results.append(gradients(learner, batch))
    for grads, metrics in results[1:]:
        assert_close(results[0][0], grads, tolerance)
        for key in ("policy/loss", "critic/loss", "policy/entropy"):
            assert metrics[key] == pytest.approx(results[0][1][key], rel=1e3 * tolerance, abs=1e3 * tolerance)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"gamma": 0.9},
    {"alpha": 0.7},
    {"lambda_length": "window"},
    {"lambda_length": "segment", "alpha": 3.0},
    {"critic_lambda": 0.6},
    {"clip_low": 0.05},
    {"clip_high": 0.05},
    {"value_clip": 0.1},
    {"normalisation": "segment"},
    {"estimator": "segment"},
    {"whiten": True},
    {"entropy_bonus": 0.3},
    {"temperature": 0.6},
    {"policy_loss": "truncated", "ratio_cap": 1.1},
    {"policy_loss": "masked", "clip_low": 0.1, "clip_high": 0.1},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("seed", range(2))
def test_equal_to_naive_ppo_on_padded_rows(seed: int, options: dict[str, Any]) -> None:
    """Losses and gradients, with the defaults and with each option: none of them does nothing."""
    learner, expected = naive_results(seed, options)
    batch = build_batch(random_rollouts(5, seed), learner.config)
    credit = learner.credit(batch)
    found = gradients(learner, batch, replace(credit, values=credit.values + DRIFT))
    assert_same_update(found, expected)
    if options:
        with pytest.raises(AssertionError):
            assert_same_update(found, naive_results(seed, {})[1])


Update = tuple[dict[str, Tensor], dict[str, float]]
DRIFT = 0.2
"""What the critic is taken to have moved since the values of the batch: the first update alone shows no value clip."""


def assert_same_update(found: Update, expected: Update) -> None:
    assert_close(expected[0], found[0], 1e-9)
    for name, loss in expected[1].items():
        assert found[1][name] == pytest.approx(loss, rel=1e-9)


def naive_results(seed: int, options: dict[str, Any]) -> tuple[Learner, Update]:
    rest = dict(options)
    temperature = rest.pop("temperature", 1.0)
    learner = small_learner(torch.float64, seed=seed, micro_batch_tokens=50, **rest)
    learner.temperature = temperature
    losses = naive_losses(learner, random_rollouts(5, seed))
    grads = {}
    for name, loss, model in zip(("policy", "critic"), losses, (learner.policy, learner.critic), strict=True):
        assert model is not None
        names, weights = zip(*model.named_parameters(), strict=True)
        found = torch.autograd.grad(loss, weights)
        grads |= {f"{name}.{key}": grad for key, grad in zip(names, found, strict=True)}
    return learner, (grads, {"policy/loss": losses[0].item(), "critic/loss": losses[1].item()})


@dataclass
class Token:
    segment: tuple[int, int]
    logprob: Tensor
    rho: Tensor
    entropy: Tensor
    value: Tensor
    advantage: float
    factor: float
    target: float


def naive_losses(learner: Learner, rollouts: list[Rollout]) -> tuple[Tensor, Tensor]:
    """PPO written down token by token: every window a row of its own, E13 and E14 as sums, no micro-batches."""
    c, tokens = learner.config, []
    for number, rollout in enumerate(rollouts):
        tokens += naive_tokens(learner, number, rollout)
    sizes = Counter(token.segment for token in tokens)
    scale = math.sqrt(sum(t.advantage**2 for t in tokens) / len(tokens)) + 1e-8 if c.whiten else 1.0
    policy, critic = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for t in tokens:
        share = 1 / len(tokens) if c.normalisation == "token" else 1 / (len(sizes) * sizes[t.segment])
        advantage = t.advantage / scale * t.factor
        rho = t.rho.item()
        gain = {
            "clip": torch.minimum(t.rho * advantage, t.rho.clamp(1 - c.clip_low, 1 + c.clip_high) * advantage),
            "truncated": min(rho, c.ratio_cap) * advantage * t.logprob,
            "masked": rho * (1 - c.clip_low < rho < 1 + c.clip_high) * advantage * t.logprob,
        }[c.policy_loss]
        policy -= share * (gain + c.entropy_bonus * t.entropy)
        error = (t.value - t.target) ** 2
        if c.value_clip:
            old = t.value.item() + DRIFT
            held = old + (t.value - old).clamp(-c.value_clip, c.value_clip)
            error = torch.maximum(error, (held - t.target) ** 2)
        critic += 0.5 * error / len(tokens)
    return policy, critic


def naive_tokens(learner: Learner, number: int, rollout: Rollout) -> Iterator[Token]:
    assert learner.critic is not None
    c = learner.config
    rows, windows = [], []  # of each segment: its tokens' (log-probability, ratio, entropy, value), and its window
    for window in rollout.windows:
        ids = torch.tensor(window.token_ids + [0] * (60 - len(window)))  # padded to one length
        logits = learner.policy(ids, [60]) @ learner.policy.head_weight.T / learner.temperature
        values = learner.critic(ids, [60])
        for segment in window.segments:
            row = []
            for t in (t for t, s in enumerate(window.segment_ids) if s == segment.index):
                logp = logits[t - 1].log_softmax(0)
                rho = (logp[ids[t]] - window.logprobs[t]).exp()
                row.append((logp[ids[t]], rho, -(logp.exp() * logp).sum(), values[t - 1]))
            rows.append(row)
            windows.append(window)
    for s, row in enumerate(rows):
        of_window = [other for other, window in zip(rows, windows, strict=True) if window is windows[s]]
        length = sum(map(len, {"rollout": rows, "window": of_window, "segment": [row]}[c.lambda_length]))
        decay = c.gamma * max(0.0, 1 - 1 / (c.alpha * length))
        v = [value.item() for *_, value in row] + [0.0]
        delta = [c.gamma * v[i + 1] - v[i] + rollout.reward * (i == len(row) - 1) for i in range(len(row))]
        factor = decay ** sum(map(len, rows[s + 1 :])) if c.estimator == "cross_trajectory" else 1.0
        for i, (logprob, rho, entropy, value) in enumerate(row):
            later = range(i, len(row))
            advantage = sum(decay ** (j - i) * delta[j] for j in later)
            target = v[i] + sum((c.gamma * c.critic_lambda) ** (j - i) * delta[j] for j in later)
            yield Token((number, s), logprob, rho, entropy, value, advantage, factor, target)


def test_untrained_summaries_have_no_influence() -> None:
    """What a summary's tokens were, and how likely, changes no gradient when summaries are not trained."""
    results = []
    for logprob in (-1.0, -9.0):
        rollouts = random_rollouts(6)
        for rollout in rollouts:
            for window in rollout.windows:
                summaries = [segment.index for segment in window.segments if segment.kind == "summary"]
                for t, segment in enumerate(window.segment_ids):
                    if segment in summaries:  # the summary is at the window's end: nothing else sees it
                        window.logprobs[t] = logprob
                        window.token_ids[t] = int(-logprob)
        learner = small_learner(torch.float64, summaries=False)
        results.append(gradients(learner, build_batch(rollouts, learner.config)))
    (one, metrics), (other, _) = results
    assert_close(one, other, 1e-12)
    assert metrics["credit/summary_share"] == 0
    trained, _ = gradients(small_learner(torch.float64), build_batch(random_rollouts(6), TrainConfig()))
    with pytest.raises(AssertionError):
        assert_close(one, trained, 1e-3)


def test_group_needs_no_critic() -> None:
    options = {"estimator": "group", "group_size": 2, "rollouts_per_step": 4}
    learner = small_learner(torch.float64, **options)
    rollouts = random_rollouts(4)
    for rollout, reward in zip(rollouts, (1.0, 0.0, 1.0, 1.0), strict=True):
        rollout.reward = reward
    batch = build_batch(rollouts, learner.config)
    credit = learner.credit(batch)
    of_rollout = batch.layout.rollout[batch.layout.of_token]
    expected = torch.tensor([0.5, -0.5, 0.0, 0.0], dtype=torch.float64)[of_rollout]
    torch.testing.assert_close(credit.estimate.advantages[batch.layout.positions], expected)
    before = parameters(learner)
    metrics = learner.update(batch, credit)
    assert learner.critic is None
    assert not any(key.startswith("critic") for key in metrics)
    assert any(not torch.equal(before[key], value) for key, value in parameters(learner).items())
    with pytest.raises(ValueError, match="group"):
        Learner(learner.policy, small_learner(torch.float64).critic, learner.config)


def test_value_pretraining_leaves_the_policy_alone() -> None:
    learner = small_learner()
    before = parameters(learner)
    batch = build_batch(random_rollouts(6), learner.config)
    metrics = learner.update(batch, learner.credit(batch), train_policy=False)
    after = parameters(learner)
    assert all(torch.equal(before[key], after[key]) for key in before if key.startswith("policy"))
    assert any(not torch.equal(before[key], after[key]) for key in before if key.startswith("critic"))
    assert not any(key.startswith("policy") for key in metrics)


def test_updates_per_batch_use_the_advantages_from_before_them() -> None:
    """Two critic and three policy updates; credit is what the values before the batch gave."""
    learner = small_learner(critic_updates=2, policy_updates=3)
    batch = build_batch(random_rollouts(6), learner.config)
    credit = learner.credit(batch)
    advantages = credit.estimate.advantages.clone()
    learner.update(batch, credit)
    assert torch.equal(credit.estimate.advantages, advantages)
    assert learner.critic_optimiser is not None
    assert {int(v) for k, v in learner.critic_optimiser.tensors().items() if k.endswith(".step")} == {2}
    assert {int(v) for k, v in learner.policy_optimiser.tensors().items() if k.endswith(".step")} == {3}


def test_a_batch_without_optimised_tokens_changes_nothing() -> None:
    learner = small_learner()
    before = parameters(learner)
    rollouts = random_rollouts(3)
    for rollout in rollouts:
        rollout.end = "time"
    batch = build_batch(rollouts, learner.config)
    assert learner.update(batch, learner.credit(batch)) == {}
    assert all(torch.equal(before[key], value) for key, value in parameters(learner).items())


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 1000))
def test_a_behaviour_that_is_the_policy_has_ratio_one(seed: int) -> None:
    learner = small_learner(torch.float64)
    rollouts = random_rollouts(3, seed)
    for rollout in rollouts:
        for window in rollout.windows:
            ids = torch.tensor(window.token_ids)
            logp = (learner.policy(ids, [len(ids)]) @ learner.policy.head_weight.T).log_softmax(1)
            window.logprobs = [0.0, *logp[:-1].gather(1, ids[1:, None]).squeeze(1).tolist()]
    batch = build_batch(rollouts, learner.config)
    metrics = learner.update(batch, learner.credit(batch))
    assert metrics["ratio/mean"] == pytest.approx(1, abs=1e-12)
    assert metrics["ratio/kl_to_sampler"] == pytest.approx(0, abs=1e-12)
    assert metrics["ratio/clip_fraction"] == 0


def test_figures_are_the_last_updates_but_every_skipped_one_counts() -> None:
    updates = iter([{"critic/skipped": 1.0}, {"critic/skipped": 0.0, "critic/loss": 0.5}])
    assert repeat(2, lambda: next(updates)) == {"critic/skipped": 1.0, "critic/loss": 0.5}
