"""Attention over windows that are laid end to end in one row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def check_lengths(n_tokens: int, lengths: Sequence[int]) -> None:
    """Raises ValueError if windows of these lengths do not make up so many tokens."""
    if sum(lengths) != n_tokens:
        raise ValueError(f"window lengths sum to {sum(lengths)}, but there are {n_tokens} tokens")
    if min(lengths, default=0) < 1:
        raise ValueError(f"window lengths must be positive, got {list(lengths)}")


@dataclass(frozen=True)
class PackedAttention:
    """Causal attention that never leaves a window; `lengths` are the windows' token counts, in order.

    One call per window: measured as fast on CPU as batches of padded windows of similar length, and without padding.
    """

    lengths: list[int]

    @classmethod
    def over(cls, n_tokens: int, lengths: Sequence[int]) -> PackedAttention:
        check_lengths(n_tokens, lengths)
        return cls(list(lengths))

    @property
    def positions(self) -> Tensor:
        """[N] positions, restarting with every window."""
        return torch.cat([torch.arange(length) for length in self.lengths])

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query [N, heads, d], key and value [N, kv_heads, d] -> [N, heads, d]; the same for every layer."""
        # Split once: the gradient of slices would fill a whole [N, ...] tensor for each window.
        parts = (tensor.transpose(0, 1).split(self.lengths, dim=1) for tensor in (query, key, value))
        grouped = query.shape[1] != key.shape[1]
        outputs = [
            scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, enable_gqa=grouped)[0]
            for q, k, v in zip(*parts, strict=True)
        ]
        return torch.cat(outputs, dim=1).transpose(0, 1)
