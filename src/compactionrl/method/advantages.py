"""Advantages and critic targets of a batch: paper E13 and E14, and the estimators that they are compared with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from compactionrl.method.layout import Layout, Span
from compactionrl.method.scan import reverse_scan

Estimator = Literal["cross_trajectory", "segment", "concatenated", "group"]
ESTIMATORS: tuple[Estimator, ...] = get_args(Estimator)
RMS_FLOOR = 1e-8
"""Added to the RMS that whitening divides by, so that rounding noise around zero advantages stays noise."""


@dataclass(frozen=True, eq=False)
class Estimate:
    """Credit of a batch. `advantages` [N] and critic `targets` [N] are 0 at tokens that are not optimised.

    `lambdas` [S]: the lambda of each segment. `factors` [S]: what E14 multiplied its advantages with, 1 in the other
    estimators.
    """

    advantages: Tensor
    targets: Tensor
    lambdas: Tensor
    factors: Tensor


@torch.no_grad()
def estimate(
    layout: Layout,
    values: Tensor,
    rewards: Tensor,
    *,
    estimator: Estimator = "cross_trajectory",
    gamma: float = 1.0,
    lambda_length: Span = "rollout",
    alpha: float = 1.5,
    lam: float | None = None,
    critic_lambda: float | Literal["policy"] = 1.0,
    whiten: bool = False,
    groups: Tensor | None = None,
    all_reduce: Callable[[Tensor], object] | None = None,
) -> Estimate:
    """Credit every optimised token of a batch; computed once per batch, before any update.

    `values` [N]: V(x_i), the critic's value before token i; ignored at tokens that are not optimised, even if NaN.
    `rewards` [R]: the terminal reward of each rollout.

    - "cross_trajectory": local GAE in each segment (E13), times (gamma lambda_s)^{N_>s} (E14).
    - "segment": E13 alone, each segment as if it were a rollout of its own.
    - "concatenated": GAE over the rollout's optimised tokens laid end to end: the value of the next segment's first
      state bootstraps across the boundary. A token's trace decays with the lambda of its own segment.
    - "group": the reward minus its mean over the rollouts of the group, the same for all tokens of a rollout. `groups`
      [R] numbers the groups. A whole group must be in this batch; rollouts without optimised tokens take no part.

    Lambda is `lam` if given, else max(0, 1 - 1/(alpha l)), l the optimised tokens of the segment's `lambda_length`.
    Targets are A + V with `critic_lambda` over segments (E13, never E14); over rollouts for "concatenated". With "policy"
    the critic's lambda is the policy's.
    `whiten` divides advantages by their RMS over M, before E14 and without a shift; `all_reduce` sums a tensor in place
    over the ranks that share M, as `torch.distributed.all_reduce` does.
    Works in float64 and returns the type of `values`, but at least float32.
    """
    _check(layout, values, rewards, estimator, gamma, alpha, lam, critic_lambda, groups)
    lambdas = adaptive_lambda(layout.span_lengths(lambda_length), alpha)
    if lam is not None:
        lambdas.fill_(lam)
    rewards, old_values = rewards.double(), values.index_select(0, layout.positions).double()
    if estimator == "concatenated":
        errors, ends = td_errors(old_values, rewards, layout.rollout_lengths, gamma)
    else:
        errors, ends = td_errors(old_values, rewards[layout.rollout], layout.lengths, gamma)

    def gae(decay: Tensor) -> Tensor:
        return reverse_scan(errors, decay.index_fill_(0, ends, 0.0))

    if estimator == "group":
        assert groups is not None
        advantages = layout.spread(group_advantages(rewards, groups, layout.rollout_lengths > 0)[layout.rollout])
    else:
        advantages = gae(layout.spread(gamma * lambdas))
    if whiten:
        advantages /= rms(advantages, all_reduce) + RMS_FLOOR
    factors = torch.ones_like(lambdas)
    if estimator == "cross_trajectory":
        factors = (gamma * lambdas) ** layout.later
        advantages *= layout.spread(factors)
    decay = gamma * (lambdas if critic_lambda == "policy" else torch.full_like(lambdas, critic_lambda))
    targets = gae(layout.spread(decay)) + old_values

    dtype = torch.promote_types(values.dtype, torch.float32)
    return Estimate(layout.scatter(advantages.to(dtype)), layout.scatter(targets.to(dtype)), lambdas, factors)


def td_errors(values: Tensor, rewards: Tensor, lengths: Tensor, gamma: float) -> tuple[Tensor, Tensor]:
    """delta of E13, r + gamma V(next) - V, of sequences laid end to end, and the position of each one's last token.

    `values` [n]; `rewards` and `lengths` one per sequence. r is the reward at the last token, where V(next) is 0, and 0
    elsewhere. A sequence without tokens has no last token, and its reward no place.
    """
    filled = lengths > 0
    ends = lengths.cumsum(0)[filled] - 1
    errors = values.roll(-1).index_fill_(0, ends, 0.0).mul_(gamma).sub_(values)
    return errors.index_add_(0, ends, rewards[filled]), ends


def adaptive_lambda(lengths: Tensor, alpha: float) -> Tensor:
    """max(0, 1 - 1/(alpha l)), 0 where l is 0. In float64: lambda^64000 from float32 is wrong in the third digit."""
    return (1 - 1 / (alpha * lengths.double())).clamp(min=0)


def group_advantages(rewards: Tensor, groups: Tensor, counted: Tensor) -> Tensor:
    """[R]: each reward minus the mean reward of its group's `counted` rollouts; 0 for rollouts that do not count."""
    groups = groups.unique(return_inverse=True)[1]
    kept, members = rewards[counted], groups[counted]
    sizes = members.bincount(minlength=len(rewards)).clamp(min=1)
    means = rewards.new_zeros(len(rewards)).index_add_(0, members, kept) / sizes
    return rewards.new_zeros(len(rewards)).masked_scatter_(counted, kept - means[members])


def rms(x: Tensor, all_reduce: Callable[[Tensor], object] | None = None) -> Tensor:
    """Root mean square of x over all ranks; 0 if there is nothing."""
    totals = torch.stack([x.square().sum(), x.new_tensor(x.numel())])
    if all_reduce is not None:
        all_reduce(totals)
    return (totals[0] / totals[1].clamp(min=1)).sqrt()


def _check(
    layout: Layout,
    values: Tensor,
    rewards: Tensor,
    estimator: Estimator,
    gamma: float,
    alpha: float,
    lam: float | None,
    critic_lambda: float | Literal["policy"],
    groups: Tensor | None,
) -> None:
    if estimator not in ESTIMATORS:
        raise ValueError(f"unknown estimator {estimator!r}: choose one of {', '.join(ESTIMATORS)}")
    if values.shape != layout.segment.shape:
        raise ValueError(f"values {tuple(values.shape)}: give one for each of the {layout.segment.numel()} tokens")
    if rewards.shape != (layout.n_rollouts,):
        raise ValueError(f"rewards {tuple(rewards.shape)}: give one for each of the {layout.n_rollouts} rollouts")
    if alpha <= 0:
        raise ValueError(f"alpha is {alpha}: must be positive")
    for name, number in (("gamma", gamma), ("lam", lam), ("critic_lambda", critic_lambda)):
        if isinstance(number, int | float) and not 0 <= number <= 1:
            raise ValueError(f"{name} is {number}: must lie in [0, 1]")
    if isinstance(critic_lambda, str) and critic_lambda != "policy":
        raise ValueError(f"critic_lambda is {critic_lambda!r}: must be a number or 'policy'")
    if estimator == "group" and (groups is None or groups.shape != rewards.shape):
        raise ValueError("the group estimator needs groups: the number of its group (its task) for each rollout")
