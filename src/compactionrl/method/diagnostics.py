"""Numbers to watch during training, as flat dictionaries. All are finite: what is undefined for a batch has no key."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from compactionrl.method.advantages import Estimate
from compactionrl.method.importance import clipped, kl_to_sampler, ratio
from compactionrl.method.layout import Layout

LAST_INDEX = 6
"""Segments from this place in their rollout on share one bucket."""


def policy_diagnostics(
    logprobs: Tensor, behaviour: Tensor, advantages: Tensor, *, clip_low: float = 0.2, clip_high: float = 0.2
) -> dict[str, float]:
    """Over optimised tokens [n]: `ratio/mean` and `ratio/max` (E11), `ratio/clip_fraction` (tokens that E12 gives no
    gradient) and `ratio/kl_to_sampler` (nats per token, KL(pi_rollout || pi_theta)).
    """
    if not logprobs.numel():
        return {}
    logprobs, behaviour = logprobs.detach().double(), behaviour.double()
    ratios = ratio(logprobs, behaviour)
    return _finite(
        {
            "ratio/mean": ratios.mean(),
            "ratio/max": ratios.max(),
            "ratio/clip_fraction": clipped(ratios, advantages, clip_low, clip_high).double().mean(),
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
