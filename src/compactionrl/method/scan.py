"""A linear recurrence over millions of tokens, without a loop over tokens."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 64
TILE = 4096 * BLOCK
"""Elements worked on at a time: few enough for a processor's cache."""


def reverse_scan(x: Tensor, decay: Tensor) -> Tensor:
    """y[i] = x[i] + decay[i] * y[i + 1], with y[n] = 0. x, decay, y: [n].

    A zero in `decay` starts afresh, so one call scans many sequences laid end to end. Nothing is divided by powers of
    `decay`: with 0 <= decay <= 1 no intermediate is larger than the sums themselves, whatever n.
    """
    y = torch.empty_like(x)
    after = x.new_zeros(1)  # what comes after the tile, as one more element of it
    for start in reversed(range(0, x.numel(), TILE)):
        tile = slice(start, start + TILE)
        y[tile] = _scan_blocks(torch.cat([x[tile], after]), pad(decay[tile], (0, 1)))[:-1]
        after = y[start : start + 1]
    return y


def _scan_blocks(x: Tensor, decay: Tensor) -> Tensor:
    """Scan all blocks side by side, then their first elements in the same way, then add what comes after each block."""
    y, reach = _columns(x), _columns(decay)
    for i in range(BLOCK - 2, -1, -1):
        y[i].addcmul_(reach[i], y[i + 1])
        reach[i] *= reach[i + 1]  # now the product of all decays from i to the end of the block
    if y.shape[1] > 1:
        first = _scan_blocks(y[0], reach[0])
        y[:, :-1].addcmul_(reach[:, :-1], first[1:])
    return y.t().reshape(-1)[: x.numel()]


def _columns(sequence: Tensor) -> Tensor:
    """[n] to a new [BLOCK, n / BLOCK]: each block a column, so that a step in all blocks is one contiguous operation."""
    blocks = pad(sequence, (0, -sequence.numel() % BLOCK)).view(-1, BLOCK)
    return blocks.t().clone(memory_format=torch.contiguous_format)
