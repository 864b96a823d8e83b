"""Log-probabilities and entropies of sampled tokens, without ever holding the logits of all tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def token_logprobs(
    hidden: Tensor, head_weight: Tensor, targets: Tensor, *, temperature: float = 1.0, chunk: int = 128
) -> tuple[Tensor, Tensor]:
    """Log-probability [n] of `targets` [n] and entropy [n], in nats, of softmax(hidden @ head_weight.T / temperature).

    `hidden` [n, d] holds the last hidden state before each target, `head_weight` is [V, d]. `chunk` tokens are done
    at a time, and again in the backward pass: memory is O(chunk V), whatever n; a GPU works best with a larger chunk.
    Both results are differentiable once. The softmax is in float32, or float64 for float64 input.
    """
    if temperature <= 0:
        raise ValueError(f"temperature is {temperature}: must be positive")
    if chunk < 1:
        raise ValueError(f"chunk is {chunk}: must be at least one token")
    if hidden.shape[:1] != targets.shape:
        raise ValueError(f"{len(hidden)} hidden states for {len(targets)} targets: give one per target")
    logprobs, entropy = _TokenLogprobs.apply(hidden, head_weight, targets, temperature, chunk)
    return logprobs, entropy


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head_weight: Tensor, targets: Tensor, temperature: float, chunk: int
    ) -> tuple[Tensor, Tensor]:
        precision = torch.promote_types(hidden.dtype, torch.float32)
        logprobs, entropy = (hidden.new_empty(len(targets), dtype=precision) for _ in range(2))

        def do_part(part: slice) -> None:  # a function, so that its [chunk, V] tensors are gone before the next part
            logp = _log_softmax(hidden[part], head_weight, temperature)
            logprobs[part] = logp.gather(1, targets[part, None]).squeeze(1)
            entropy[part] = -logp.exp().mul_(logp).sum(1)

        for part in _parts(len(targets), chunk):
            do_part(part)
        ctx.save_for_backward(hidden, head_weight, targets, entropy)
        ctx.temperature, ctx.chunk = temperature, chunk
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        """With log p = log_softmax(z) and H = -sum of p log p: d log p_t / dz = 1[t] - p, dH / dz = -p (log p + H)."""
        hidden, head_weight, targets, entropy = ctx.saved_tensors
        wants_hidden, wants_head = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        grad_head = torch.zeros_like(head_weight, dtype=entropy.dtype) if wants_head else None

        def add_part(part: slice) -> None:  # a function, so that its [chunk, V] tensors are gone before the next part
            of_target, of_entropy = (g[part, None] / ctx.temperature for g in (grad_logprobs, grad_entropy))
            grad = _log_softmax(hidden[part], head_weight, ctx.temperature)
            p = grad.exp()
            grad.add_(entropy[part, None]).mul_(of_entropy).add_(of_target).mul_(p).neg_()
            grad = grad.scatter_add_(1, targets[part, None], of_target).to(head_weight.dtype)
            if grad_hidden is not None:
                grad_hidden[part] = grad @ head_weight
            if grad_head is not None:
                _add_product(grad_head, grad.t(), hidden[part])

        for part in _parts(len(targets), ctx.chunk):
            add_part(part)
        return grad_hidden, None if grad_head is None else grad_head.to(head_weight.dtype), None, None, None


def _parts(n: int, chunk: int) -> list[slice]:
    return [slice(start, start + chunk) for start in range(0, n, chunk)]


def _log_softmax(hidden: Tensor, head_weight: Tensor, temperature: float) -> Tensor:
    logits = (hidden @ head_weight.t()).to(torch.promote_types(hidden.dtype, torch.float32))
    return logits.div_(temperature).log_softmax(1)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b: in place where the types allow it, else with the sum in the type of `total`."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        total += a @ b
