"""Updates that are not finite are skipped, counted, and stop the run after a while."""

import pytest
import torch
from torch import Tensor, nn
from training_fakes import parameters, random_rollouts, small_learner

from compactionrl.config import TrainConfig
from compactionrl.training.batch import build_batch
from compactionrl.training.optimiser import Optimiser, TrainingError


def snapshot(learner: object) -> dict[str, Tensor]:
    tensors = dict(parameters(learner))  # type: ignore[arg-type]
    for optimiser in (learner.policy_optimiser, learner.critic_optimiser):  # type: ignore[attr-defined]
        tensors |= {f"{optimiser.name}.{key}": value.clone() for key, value in optimiser.tensors().items()}
    return tensors


def test_a_poisoned_batch_is_skipped_bit_for_bit() -> None:
    learner = small_learner(max_bad_updates=3)
    good = build_batch(random_rollouts(4), learner.config)
    learner.update(good, learner.credit(good))
    before = snapshot(learner)

    poisoned = build_batch(random_rollouts(4), learner.config)
    poisoned.behaviour[0] = float("nan")
    metrics = learner.update(poisoned, learner.credit(poisoned))
    after = snapshot(learner)
    assert metrics["policy/skipped"] == 1
    assert metrics["critic/skipped"] == 0
    assert "policy/loss" not in metrics
    assert all(torch.equal(before[key], after[key]) for key in before if key.startswith("policy"))
    assert any(not torch.equal(before[key], after[key]) for key in before if key.startswith("critic"))

    learner.update(poisoned, learner.credit(poisoned))
    assert learner.policy_optimiser.bad == 2
    learner.update(good, learner.credit(good))
    assert learner.policy_optimiser.bad == 0
    assert all(bool(p.isfinite().all()) for p in learner.policy.parameters())


def test_too_many_in_a_row_stop_the_run() -> None:
    learner = small_learner(max_bad_updates=2)
    poisoned = build_batch(random_rollouts(4), learner.config)
    poisoned.rewards[:] = float("inf")
    before = snapshot(learner)
    with pytest.raises(TrainingError, match=r"2 critic updates in a row .* train.critic_lr"):
        learner.update(poisoned, learner.credit(poisoned))  # two critic updates per batch
    assert all(torch.equal(before[key], value) for key, value in snapshot(learner).items())


def quadratic(**options: float) -> tuple[nn.Linear, Optimiser]:
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 2.0)
    return model, Optimiser("policy", model, TrainConfig(policy_lr=0.1, **options))


def test_an_infinite_gradient_of_a_finite_loss_is_skipped() -> None:
    model, optimiser = quadratic()
    metrics = optimiser.update([(model.weight - 2.0).sum().abs().sqrt()])  # loss 0, gradient infinite
    assert metrics == {"policy/skipped": 1.0}
    assert model.weight.item() == 2.0
    assert optimiser.tensors() == {}


def test_losses_of_micro_batches_add_up_and_are_clipped_together() -> None:
    model, optimiser = quadratic(max_grad_norm=1.0)
    metrics = optimiser.update(3 * model.weight.sum() for _ in range(2))
    assert metrics == {"policy/skipped": 0.0, "policy/loss": 12.0, "policy/grad_norm": 6.0}
    assert optimiser.tensors()["weight.exp_avg"].item() == pytest.approx(0.1 * 1.0)  # (1 - beta1) x clipped gradient
    assert model.weight.grad is None


def test_state_of_another_model_is_refused() -> None:
    model, optimiser = quadratic()
    optimiser.update([model.weight.sum()])
    tensors = optimiser.tensors()
    wider = Optimiser("policy", nn.Linear(2, 1, bias=False), TrainConfig())
    with pytest.raises(ValueError, match="another model"):
        wider.load_tensors(dict(tensors))
    with pytest.raises(ValueError, match="unknown parameters"):
        optimiser.load_tensors({**tensors, "bias.step": torch.ones(())})
