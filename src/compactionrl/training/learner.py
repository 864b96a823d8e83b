"""Policy and critic, and how one batch changes them: PPO with the paper's credit (E11 to E15, (V))."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compactionrl.config import TrainConfig
from compactionrl.method import (
    Estimate,
    credit_diagnostics,
    critic_diagnostics,
    entropy_bonus,
    estimate,
    policy_diagnostics,
    policy_loss,
    token_logprobs,
    token_weights,
    value_loss,
)
from compactionrl.models import Critic, Policy
from compactionrl.training.batch import Batch, MicroBatch
from compactionrl.training.optimiser import Optimiser


@dataclass(frozen=True)
class Credit:
    """Values V(x_i) [N] before any update (0 at tokens that are not optimised), and what they give."""

    values: Tensor
    estimate: Estimate


class Learner:
    """Trains `policy` and `critic`, in place. Both must come from the same checkpoint; 'group' needs no critic."""

    def __init__(self, policy: Policy, critic: Critic | None, config: TrainConfig, *, temperature: float = 1.0) -> None:
        if (critic is None) != (config.estimator == "group"):
            raise ValueError("a critic is needed by every estimator but 'group', which must not have one")
        self.policy = policy
        self.critic = critic
        self.config = config
        self.temperature = temperature
        self.policy_optimiser = Optimiser("policy", policy, config)
        self.critic_optimiser = Optimiser("critic", critic, config) if critic else None

    @property
    def device(self) -> torch.device:
        return self.policy.head_weight.device

    def credit(self, batch: Batch) -> Credit:
        """Values, advantages and targets of a batch: computed once, before any of its updates."""
        values = batch.layout.scatter(self.values(batch))
        c = self.config
        result = estimate(
            batch.layout,
            values,
            batch.rewards,
            estimator=c.estimator,
            gamma=c.gamma,
            lambda_length=c.lambda_length,
            alpha=c.alpha,
            critic_lambda=c.critic_lambda,
            whiten=c.whiten,
            groups=batch.groups,
        )
        return Credit(values, result)

    def update(self, batch: Batch, credit: Credit, *, train_policy: bool = True) -> dict[str, float]:
        """All updates of one batch; returns what to log. Without optimised tokens nothing is updated."""
        if not batch.layout.count:
            return {}
        metrics: dict[str, float] = {}
        if self.critic is not None:
            metrics |= critic_diagnostics(batch.layout, credit.values, credit.estimate.targets)
            metrics |= repeat(self.config.critic_updates, lambda: self.update_critic(batch, credit))
        if train_policy:
            metrics |= credit_diagnostics(batch.layout, credit.estimate)
            metrics |= repeat(self.config.policy_updates, lambda: self.update_policy(batch, credit))
        return metrics

    def update_critic(self, batch: Batch, credit: Credit) -> dict[str, float]:
        """Value regression (V): the mean over M, whatever `normalisation` says of the policy's loss."""
        assert self.critic_optimiser is not None
        weights, targets, old = self.select(batch, token_weights(batch.layout), credit.estimate.targets, credit.values)

        def losses() -> Iterator[Tensor]:
            for part in self.micro_batches(batch):
                i = part.index
                yield value_loss(self.part_values(part), targets[i], weights[i], old[i], self.config.value_clip)

        return self.critic_optimiser.update(losses())

    def update_policy(self, batch: Batch, credit: Credit) -> dict[str, float]:
        """E12, or another `policy_loss`, against the recorded log-probabilities, over one global count of tokens."""
        c = self.config
        terms: dict[str, Any] = {
            "kind": c.policy_loss, "clip_low": c.clip_low, "clip_high": c.clip_high, "ratio_cap": c.ratio_cap,
        }  # fmt: skip
        weights, advantages = self.select(
            batch, token_weights(batch.layout, c.normalisation), credit.estimate.advantages
        )
        behaviour = batch.behaviour.to(self.device, advantages.dtype)
        logprobs, entropy = torch.empty_like(behaviour), torch.empty_like(behaviour)

        def losses() -> Iterator[Tensor]:
            for part in self.micro_batches(batch):
                i = part.index
                hidden = self.policy(part.token_ids, part.lengths)[part.states]
                logp, h = token_logprobs(hidden, self.policy.head_weight, part.targets, temperature=self.temperature)
                logprobs[i], entropy[i] = logp.detach(), h.detach()
                loss = policy_loss(logp, behaviour[i], advantages[i], weights[i], **terms)
                yield loss - c.entropy_bonus * entropy_bonus(h, weights[i]) if c.entropy_bonus else loss

        metrics = self.policy_optimiser.update(losses())
        metrics |= policy_diagnostics(logprobs.cpu(), behaviour.cpu(), advantages.cpu(), **terms)
        return metrics | {"policy/entropy": float(entropy.mean())}

    @torch.no_grad()
    def values(self, batch: Batch) -> Tensor:
        """V(x_i) [n] of the optimised tokens; zeros without a critic."""
        values = torch.zeros(batch.layout.count, dtype=self.precision)
        if self.critic is not None:
            for part in self.micro_batches(batch):
                values[part.index] = self.part_values(part).cpu().to(values.dtype)
        return values

    def part_values(self, part: MicroBatch) -> Tensor:
        assert self.critic is not None
        return self.critic(part.token_ids, part.lengths)[part.states].to(self.precision)

    @property
    def precision(self) -> torch.dtype:
        """Of losses, values and advantages: the models', at least float32."""
        return torch.promote_types(self.policy.head_weight.dtype, torch.float32)

    def select(self, batch: Batch, *tensors: Tensor) -> list[Tensor]:
        """Each [N] to the optimised tokens [n], on the device, in the loss's precision."""
        return [tensor[batch.layout.positions].to(self.device, self.precision) for tensor in tensors]

    def micro_batches(self, batch: Batch) -> Iterator[MicroBatch]:
        return batch.micro_batches(self.config.micro_batch_tokens, self.device)


def repeat(times: int, update: Callable[[], dict[str, float]]) -> dict[str, float]:
    """Update `times` times. Figures are those of the last update, but `.../skipped` counts them all."""
    figures: dict[str, float] = {}
    skipped: Counter[str] = Counter()
    for _ in range(times):
        latest = update()
        figures |= latest
        skipped.update({key: count for key, count in latest.items() if key.endswith("/skipped")})
    return {**figures, **skipped}
