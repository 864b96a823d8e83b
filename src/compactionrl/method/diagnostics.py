"""Numbers to watch during training, as flat dictionaries. All are finite: what is undefined for a batch has no key."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from compactionrl.method.advantages import Estimate
from compactionrl.method.importance import clipped, kl_to_sampler, masked, ratio, truncated
from compactionrl.method.layout import Layout
from compactionrl.method.losses import PolicyLoss

LAST_INDEX = 6
"""Segments from this place in their rollout on share one bucket."""


def policy_diagnostics(
    logprobs: Tensor,
    behaviour: Tensor,
    advantages: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kind: PolicyLoss = "clip",
    ratio_cap: float = 2.0,
) -> dict[str, float]:
    """Over optimised tokens [n]: `ratio/mean`, `ratio/max` (E11), `ratio/kl_to_sampler` (nats per token, KL(pi_rollout ||
    pi_theta)), and the part on which the loss of that `kind` acts: `ratio/clip_fraction` (no gradient by E12),
    `ratio/truncated_fraction` (held at `ratio_cap`) or `ratio/masked_fraction` (no gradient by SAO's mask).
    """
    if not logprobs.numel():
        return {}
    logprobs, behaviour = logprobs.detach().double(), behaviour.double()
    ratios = ratio(logprobs, behaviour)
    if kind == "clip":
        name, acted_on = "clip", clipped(ratios, advantages, clip_low, clip_high)
    elif kind == "truncated":
        name, acted_on = kind, truncated(ratios, ratio_cap)
    else:
        name, acted_on = kind, masked(ratios, clip_low, clip_high)
    return _finite(
        {
            "ratio/mean": ratios.mean(),
            "ratio/max": ratios.max(),
            f"ratio/{name}_fraction": acted_on.double().mean(),
            "ratio/kl_to_sampler": kl_to_sampler(logprobs, behaviour).mean(),
        }
    )


def critic_diagnostics(layout: Layout, values: Tensor, targets: Tensor) -> dict[str, float]:
    """`explained_variance/all` and, by a segment's place in its rollout, `explained_variance/segment_0` to `_6+`.

    1 - Var(target - V) / Var(target) over optimised tokens: 1 is perfect, 0 a constant. `values` and `targets`: [N].
    """
    if not layout.count:
        return {}
    values, targets = (x.detach()[layout.positions].double() for x in (values, targets))
    places = layout.index[layout.of_token].clamp(max=LAST_INDEX)
    parts = {"all": torch.ones_like(places, dtype=torch.bool)}
    for place in places.unique().tolist():
        parts[f"segment_{place}{'+' * (place == LAST_INDEX)}"] = places == place
    found = {name: _explained_variance(values[part], targets[part]) for name, part in parts.items()}
    return _finite({f"explained_variance/{name}": value for name, value in found.items() if value is not None})


def credit_diagnostics(layout: Layout, estimate: Estimate) -> dict[str, float]:
    """`credit/summary_share`: sum of |A| on summary tokens over sum of |A| on M. `factor/<kind>_mean`, `factor/<kind>_min`:
    E14's factor over non-empty execution and summary segments.
    """
    sizes = estimate.advantages[layout.positions].abs().double()
    found = {"credit/summary_share": sizes[layout.is_summary[layout.of_token]].sum() / sizes.sum()}
    for kind, chosen in (("execution", ~layout.is_summary), ("summary", layout.is_summary)):
        factors = estimate.factors[chosen & (layout.lengths > 0)]
        if factors.numel():
            found |= {f"factor/{kind}_mean": factors.mean(), f"factor/{kind}_min": factors.min()}
    return _finite(found)


def _explained_variance(values: Tensor, targets: Tensor) -> Tensor | None:
    """None where the targets do not vary beyond rounding."""
    variance = targets.var(correction=0)
    noise = 1e-12 * (targets.square().mean() + values.square().mean())
    return 1 - (targets - values).var(correction=0) / variance if variance > noise else None


def _finite(numbers: dict[str, Tensor]) -> dict[str, float]:
    return {name: float(number) for name, number in numbers.items() if math.isfinite(number)}
