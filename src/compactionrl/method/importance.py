"""How far the policy has moved from the sampler that wrote a token (paper E11). All tensors [n], optimised tokens."""

from __future__ import annotations

from torch import Tensor


def ratio(logprobs: Tensor, behaviour: Tensor) -> Tensor:
    """E11: pi_theta / pi_rollout of each token, from the trained and the recorded log-probabilities."""
    return (logprobs - behaviour).exp()


def clipped(ratios: Tensor, advantages: Tensor, clip_low: float = 0.2, clip_high: float = 0.2) -> Tensor:
    """Bool: the tokens to which E12 gives no gradient, because they already moved as far as the clip lets them."""
    return ((advantages > 0) & (ratios > 1 + clip_high)) | ((advantages < 0) & (ratios < 1 - clip_low))


def truncated(ratios: Tensor, cap: float) -> Tensor:
    """Bool: the tokens whose ratio truncated importance sampling holds at `cap`; they keep a gradient."""
    return ratios > cap


def masked(ratios: Tensor, clip_low: float = 0.2, clip_high: float = 0.2) -> Tensor:
    """Bool: the tokens outside (1 - clip_low, 1 + clip_high), which SAO's double-sided mask takes out of the gradient."""
    return (ratios <= 1 - clip_low) | (ratios >= 1 + clip_high)


def kl_to_sampler(logprobs: Tensor, behaviour: Tensor) -> Tensor:
    """rho - 1 - log rho ("k3") per token: never negative, its mean estimates KL(pi_rollout || pi_theta) without bias."""
    moved = logprobs - behaviour
    return moved.expm1() - moved
