"""Policy, value and entropy terms, each a weighted sum over tokens: those of micro-batches and ranks just add.

All arguments of the losses are [n]: optimised tokens only, of any part of the batch, in any order. `weights` are made
once for the global batch by `token_weights` and cut like everything else.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from compactionrl.method.importance import masked, ratio
from compactionrl.method.layout import Layout

Normalisation = Literal["token", "segment"]
NORMALISATIONS: tuple[Normalisation, ...] = get_args(Normalisation)
PolicyLoss = Literal["clip", "truncated", "masked"]
POLICY_LOSSES: tuple[PolicyLoss, ...] = get_args(PolicyLoss)


def token_weights(layout: Layout, normalisation: Normalisation = "token", *, total: int | None = None) -> Tensor:
    """[N] float64: the share of each token in the loss, 0 at tokens that are not optimised. The global batch sums to 1.

    "token": 1/|M| each (E12). "segment": 1/(S n_s), the mean over the S non-empty segments of their means. `total` is
    |M| or S over all ranks (see `weight_total`), if this layout holds one rank's part of the batch.
    """
    own_total = weight_total(layout, normalisation)
    total = max(own_total if total is None else total, 1)
    sizes = layout.lengths.double() if normalisation == "segment" else torch.ones_like(layout.lengths).double()
    return layout.scatter(layout.spread(1 / (total * sizes)))


def weight_total(layout: Layout, normalisation: Normalisation = "token") -> int:
    """What `token_weights` divides by: the optimised tokens, or the segments that have some. Sum it over the ranks."""
    if normalisation not in NORMALISATIONS:
        raise ValueError(f"unknown normalisation {normalisation!r}: choose one of {', '.join(NORMALISATIONS)}")
    return layout.count if normalisation == "token" else int(layout.lengths.count_nonzero())


def policy_loss(
    logprobs: Tensor,
    behaviour: Tensor,
    advantages: Tensor,
    weights: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    *,
    kind: PolicyLoss = "clip",
    ratio_cap: float = 2.0,
) -> Tensor:
    """The policy's loss over tokens with weights w, rho of E11. Where rho is 1, all kinds have the same gradient.

    "clip": E12, -sum of w min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A). "truncated": truncated importance
    sampling (Ionides 2008), -sum of w sg(min(rho, ratio_cap)) A log pi, sg: no gradient flows through it.
    "masked": SAO (arXiv 2607.07508), -sum of w sg(rho) A log pi over the tokens with rho inside (1 - clip_low,
    1 + clip_high); the others have no gradient, whatever the sign of A, but keep their share in the weights.
    """
    if kind not in POLICY_LOSSES:
        raise ValueError(f"unknown policy loss {kind!r}: choose one of {', '.join(POLICY_LOSSES)}")
    rho = ratio(logprobs, behaviour)
    if kind == "clip":
        bounded = rho.clamp(1 - clip_low, 1 + clip_high)
        return -_weighted(torch.minimum(rho * advantages, bounded * advantages), weights)
    rho = rho.detach()
    rho = rho.clamp(max=ratio_cap) if kind == "truncated" else rho.masked_fill(masked(rho, clip_low, clip_high), 0.0)
    return -_weighted(rho * advantages * logprobs, weights)


def value_loss(
    values: Tensor, targets: Tensor, weights: Tensor, old_values: Tensor | None = None, clip: float | None = None
) -> Tensor:
    """Sum of w 0.5 (V - target)^2; with `clip`, the larger of it and of the same for V held near `old_values`."""
    error = (values - targets).square()
    if clip is not None:
        if old_values is None:
            raise ValueError("value clipping needs old_values: the values from before the update")
        held = old_values + (values - old_values).clamp(-clip, clip)
        error = torch.maximum(error, (held - targets).square())
    return _weighted(0.5 * error, weights)


def entropy_bonus(entropy: Tensor, weights: Tensor) -> Tensor:
    """Mean entropy under the weights, in nats: subtract a multiple of it from the loss to keep the policy random."""
    return _weighted(entropy, weights)


def _weighted(per_token: Tensor, weights: Tensor) -> Tensor:
    if per_token.shape != weights.shape:
        raise ValueError(f"{per_token.numel()} tokens, {weights.numel()} weights: select the optimised tokens of both")
    return (weights.to(per_token.dtype) * per_token).sum()
