"""Which token of a batch belongs to which segment, window and rollout."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

import torch
from torch import Tensor

Span = Literal["rollout", "window", "segment"]
SPANS: tuple[Span, ...] = get_args(Span)


@dataclass(frozen=True, eq=False)
class Layout:
    """N tokens in order (rollout by rollout, window by window), sampled in S segments of R rollouts.

    `segment` [N] is the batch-wide number of the segment that sampled a token, -1 for tokens that are not optimised
    (context, observations, excluded segments); the others are the paper's M. Segments are numbered in the order of
    their tokens. `rollout` [S], `window` [S] and `is_summary` [S] describe the segments; rollouts and windows are
    numbered batch-wide too. Rollouts, windows and segments without optimised tokens are allowed.
    """

    segment: Tensor
    rollout: Tensor
    window: Tensor
    is_summary: Tensor
    n_rollouts: int

    def __post_init__(self) -> None:
        for name, size in (("rollout", self.n_rollouts), ("window", None), ("is_summary", None)):
            numbers = getattr(self, name)
            if numbers.shape != self.rollout.shape or numbers.dim() != 1:
                raise ValueError(f"{name} has shape {tuple(numbers.shape)}: give one entry per segment")
            if name != "is_summary":
                _check_numbers(name, numbers, size)
        if self.segment.dim() != 1:
            raise ValueError(f"segment has shape {tuple(self.segment.shape)}: flatten the batch to one entry per token")
        if self.segment.numel() and int(self.segment.min()) < -1:
            raise ValueError("segment numbers start at 0; tokens that are not optimised are -1")
        _check_numbers("segment (of the optimised tokens)", self.of_token, self.n_segments)
        same_window = self.window[1:] == self.window[:-1]
        if bool((same_window & (self.rollout[1:] != self.rollout[:-1])).any()):
            raise ValueError("a window holds segments of two rollouts: number windows over the whole batch")

    @property
    def n_segments(self) -> int:
        return self.rollout.numel()

    @cached_property
    def mask(self) -> Tensor:
        """[N] bool: the optimised tokens, the paper's M."""
        return self.segment >= 0

    @cached_property
    def positions(self) -> Tensor:
        """[n]: where the n optimised tokens stand among the N."""
        return self.mask.nonzero().squeeze(1)

    @cached_property
    def of_token(self) -> Tensor:
        """[n]: the segment of each optimised token."""
        return self.segment.index_select(0, self.positions)

    @property
    def count(self) -> int:
        """|M|, the number n of optimised tokens."""
        return self.positions.numel()

    @cached_property
    def lengths(self) -> Tensor:
        """[S]: n_s, the optimised tokens of each segment."""
        return self.of_token.bincount(minlength=self.n_segments)

    @cached_property
    def rollout_lengths(self) -> Tensor:
        """[R]: the optimised tokens of each rollout."""
        return self.lengths.new_zeros(self.n_rollouts).index_add_(0, self.rollout, self.lengths)

    def span_lengths(self, span: Span) -> Tensor:
        """[S]: the optimised tokens of the rollout, the window or the segment itself in which each segment lies."""
        if span == "segment":
            return self.lengths
        if span == "rollout":
            return self.rollout_lengths[self.rollout]
        if span == "window":
            windows = int(self.window.max()) + 1 if self.n_segments else 0
            return self.lengths.new_zeros(windows).index_add_(0, self.window, self.lengths)[self.window]
        raise ValueError(f"unknown span {span!r}: choose one of {', '.join(SPANS)}")

    @cached_property
    def later(self) -> Tensor:
        """[S]: N_{>s}, the optimised tokens of the later segments of the same rollout (E14)."""
        return self.rollout_lengths.cumsum(0)[self.rollout] - self.lengths.cumsum(0)

    @cached_property
    def index(self) -> Tensor:
        """[S]: the place of each segment in its rollout, from 0."""
        first = self.rollout.bincount(minlength=self.n_rollouts).cumsum(0).roll(1)
        first[:1] = 0
        return torch.arange(self.n_segments, device=self.rollout.device) - first[self.rollout]

    def spread(self, of_segment: Tensor) -> Tensor:
        """[S] to [n]: what belongs to a segment, for each of its optimised tokens."""
        return of_segment.index_select(0, self.of_token)

    def scatter(self, of_optimised: Tensor) -> Tensor:
        """[n] to [N]: the given numbers at the optimised tokens, 0 elsewhere."""
        return of_optimised.new_zeros(self.segment.numel()).index_copy_(0, self.positions, of_optimised)


def _check_numbers(name: str, numbers: Tensor, size: int | None) -> None:
    if not numbers.numel():
        return
    if int(numbers.min()) < 0 or (size is not None and int(numbers.max()) >= size):
        raise ValueError(f"{name}: numbers must lie in 0..{'' if size is None else size - 1}")
    if bool((numbers[1:] < numbers[:-1]).any()):
        raise ValueError(f"{name}: numbers must not decrease; order the batch by rollout, then window, then token")
