"""Chunked log-probabilities and entropies against log_softmax."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from compactionrl.method import token_logprobs


def inputs(n: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(n)
    hidden = torch.randn(n, 7, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    head = torch.randn(31, 7, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    return hidden, head, torch.randint(31, (n,), generator=generator)


def naive(hidden: Tensor, head: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    logp = torch.log_softmax(hidden @ head.t() / temperature, dim=1)
    return logp.gather(1, targets[:, None]).squeeze(1), -(logp.exp() * logp).sum(1)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 2.0])
@pytest.mark.parametrize("chunk", [1, 4, 10, 256])
def test_equals_log_softmax_forward_and_backward(temperature: float, chunk: int) -> None:
    hidden, head, targets = inputs(10)
    upstream = torch.randn(2, 10, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    results = []
    for logprobs, entropy in (
        token_logprobs(hidden, head, targets, temperature=temperature, chunk=chunk),
        naive(hidden, head, targets, temperature),
    ):
        total = (upstream[0] * logprobs + upstream[1] * entropy).sum()
        results.append([logprobs, entropy, *torch.autograd.grad(total, (hidden, head))])
    for found, expected in zip(*results, strict=True):
        assert_close(found, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("only", [0, 1])
def test_each_gradient_alone_passes_gradcheck(only: int) -> None:
    hidden, head, targets = inputs(5)
    assert torch.autograd.gradcheck(
        lambda h, w: token_logprobs(h, w, targets, temperature=0.7, chunk=2)[only], (hidden, head)
    )


@pytest.mark.parametrize("frozen", [0, 1])
def test_frozen_inputs_get_no_gradient(frozen: int) -> None:
    hidden, head, targets = inputs(6)
    (hidden, head)[frozen].requires_grad_(False)
    trained = (hidden, head)[1 - frozen]
    found = torch.autograd.grad(token_logprobs(hidden, head, targets, chunk=4)[0].sum(), trained)[0]
    assert_close(found, torch.autograd.grad(naive(hidden, head, targets, 1.0)[0].sum(), trained)[0])


def test_low_precision_weights_still_give_a_float32_softmax() -> None:
    hidden, head, targets = inputs(12, torch.bfloat16)
    logprobs, entropy = token_logprobs(hidden, head, targets, chunk=5)
    assert logprobs.dtype == entropy.dtype == torch.float32
    expected = torch.log_softmax((hidden @ head.t()).float(), 1).gather(1, targets[:, None]).squeeze(1)
    assert_close(logprobs, expected)
    (logprobs.sum() + entropy.sum()).backward()
    assert hidden.grad.dtype == head.grad.dtype == torch.bfloat16


def test_large_logits_stay_finite() -> None:
    hidden, head, targets = inputs(8, torch.float32)
    logprobs, entropy = token_logprobs(hidden * 1e4, head, targets)
    assert bool((logprobs.isfinite() & entropy.isfinite()).all())
    assert bool((entropy >= 0).all())
    grads = torch.autograd.grad(logprobs.sum() + entropy.sum(), (hidden, head))
    assert all(bool(grad.isfinite().all()) for grad in grads)


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation returned."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        sizes = [x.numel() for x in tree_leaves(result) if isinstance(x, Tensor)]
        self.elements = max(self.elements, *sizes, 0)
        return result


def test_no_tensor_is_larger_than_chunk_times_vocabulary_or_the_inputs() -> None:
    hidden, head, targets = inputs(200)
    with Largest() as largest:
        logprobs, entropy = token_logprobs(hidden, head, targets, chunk=8)
        (logprobs.sum() + entropy.sum()).backward()
    assert largest.elements == max(8 * 31, hidden.numel(), head.numel())
    assert largest.elements < 200 * 31


def test_no_tokens() -> None:
    hidden, head, targets = inputs(0)
    logprobs, entropy = token_logprobs(hidden, head, targets)
    assert logprobs.shape == entropy.shape == (0,)
    logprobs.sum().backward()
    assert not head.grad.any()


def test_bad_input_is_refused() -> None:
    hidden, head, targets = inputs(3)
    with pytest.raises(ValueError, match="temperature"):
        token_logprobs(hidden, head, targets, temperature=0.0)
    with pytest.raises(ValueError, match="chunk"):
        token_logprobs(hidden, head, targets, chunk=0)
    with pytest.raises(ValueError, match="3 hidden states for 2 targets"):
        token_logprobs(hidden, head, targets[:2])
