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


# Models narrower than float32.


def test_the_masters_of_wide_models_are_their_parameters() -> None:
    for dtype in (torch.float32, torch.float64):
        learner = small_learner(dtype)
        assert all(p is learner.policy_optimiser.masters[key] for key, p in learner.policy.named_parameters())
        assert not learner.policy_optimiser.rounded


def test_float32_updates_equal_plain_adam_bit_for_bit() -> None:
    torch.manual_seed(0)
    ours = nn.Linear(7, 5)
    plain = nn.Linear(7, 5)
    plain.load_state_dict(ours.state_dict())
    optimiser = Optimiser("policy", ours, TrainConfig(policy_lr=0.03, max_grad_norm=0.5))
    adam = torch.optim.Adam(plain.parameters(), lr=0.03)
    for _ in range(5):
        parts = torch.randn(3, 4, 7).unbind()
        optimiser.update(ours(part).square().sum() for part in parts)
        adam.zero_grad()
        for part in parts:
            plain(part).square().sum().backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        adam.step()
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), plain.parameters(), strict=True))


def bfloat16(value: float = 1.0, **options: float) -> tuple[nn.Linear, Optimiser]:
    model = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    nn.init.constant_(model.weight, value)
    return model, Optimiser("policy", model, TrainConfig(max_grad_norm=1e6, **options))


def test_small_updates_of_a_bfloat16_weight_add_up() -> None:
    """The neighbours of 1 are 1/256 away at least: ten updates of 1/1000 each must not be lost one by one."""
    model, optimiser = bfloat16(policy_lr=1e-3)
    for _ in range(10):
        optimiser.update([model.weight.sum()])
    assert optimiser.masters["weight"].item() == pytest.approx(1 - 0.01, abs=1e-5)
    assert model.weight.item() == torch.tensor(0.99).bfloat16().item()
    assert model.weight.dtype == torch.bfloat16


def test_gradients_of_many_micro_batches_add_up_in_float32() -> None:
    """1 + 1/512 + ... is 1 in bfloat16, however many terms there are."""
    model, optimiser = bfloat16()
    metrics = optimiser.update(scale * model.weight.sum() for scale in [1.0] + [1 / 512] * 512)
    assert metrics["policy/grad_norm"] == 2.0
    assert model.weight.grad is None


def test_a_bfloat16_update_that_is_not_finite_leaves_model_and_master() -> None:
    model, optimiser = bfloat16(policy_lr=1e-3)
    optimiser.update([model.weight.sum()])
    before = {key: value.clone() for key, value in optimiser.tensors().items()}
    optimiser.update([model.weight.sum() * float("nan")])
    assert optimiser.bad == 1
    assert all(torch.equal(before[key], value) for key, value in optimiser.tensors().items())
    assert model.weight.isfinite().all()


def test_masters_are_stored_and_go_on_exactly() -> None:
    model, optimiser = bfloat16(policy_lr=1e-3)
    optimiser.update([model.weight.sum()])
    again = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    again.load_state_dict(model.state_dict())
    resumed = Optimiser("policy", again, TrainConfig(max_grad_norm=1e6, policy_lr=1e-3))
    stored = {key: value.clone() for key, value in optimiser.tensors().items()}
    assert stored["weight.master"].dtype == torch.float32
    resumed.load_tensors(dict(stored))
    for m, o in ((model, optimiser), (again, resumed)):
        for _ in range(3):
            o.update([(m.weight * 3).square().sum()])
    assert torch.equal(optimiser.masters["weight"], resumed.masters["weight"])
    assert torch.equal(model.weight, again.weight)
    del stored["weight.master"]
    with pytest.raises(ValueError, match=r"model\.dtype"):
        resumed.load_tensors(stored)
