"""From rollouts to one training batch.

The windows of all rollouts are laid end to end, without padding, and described by one `Layout`. A worked example, one
rollout whose first window ends in a summary (c: context, e: execution, s: summary):

    window 0   c c e e c e c s s      segments 0 (execution) and 1 (summary), trained in one forward pass
    window 1   c c c e e              segment 2 (execution); the copied summary is context here
    segment    - - 0 0 - 0 - 1 1 - - - 2 2
    positions      2 3   5   7 8       12 13

Token 2 was sampled in the state that position 1 has seen, so its logits and its value V(x) stand at position 1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from compactionrl.config import TrainConfig
from compactionrl.method.layout import Layout
from compactionrl.rollout.ledger import CONTEXT, Rollout, Window

UNTRAINED_SUMMARIES = "summaries not trained"


@dataclass(frozen=True)
class MicroBatch:
    """Whole windows of a batch, laid end to end, with k optimised tokens. On the device, but for `index`."""

    token_ids: Tensor
    """[m]"""
    lengths: list[int]
    """Tokens of each window; sum m."""
    states: Tensor
    """[k] position before each optimised token: where its logits and its value are."""
    targets: Tensor
    """[k] ids of the optimised tokens."""
    index: Tensor
    """[k] which of the batch's n optimised tokens they are."""


@dataclass(frozen=True)
class Batch:
    """N tokens in the windows that hold an optimised token, n optimised tokens, R rollouts.

    All tensors stay on the CPU: only micro-batches go to the device, and credit is the same on every machine.
    """

    token_ids: Tensor
    """[N]"""
    lengths: list[int]
    """Tokens of each window; sum N."""
    layout: Layout
    behaviour: Tensor
    """[n] log-probability of each optimised token (`layout.positions`), as its sampler recorded it."""
    rewards: Tensor
    """[R]"""
    groups: Tensor
    """[R] number of the task group of each rollout."""
    accounting: dict[str, int]
    """`sampled` = `trained` + every `excluded: ...` + every `rejected: ...`, in tokens (invariant 1)."""

    @cached_property
    def starts(self) -> list[int]:
        """First position of each window."""
        return [0, *np.cumsum(self.lengths)[:-1].tolist()] if self.lengths else []

    def micro_batches(self, token_budget: int, device: torch.device | str = "cpu") -> Iterator[MicroBatch]:
        """Whole windows, at most `token_budget` tokens at a time; a longer window goes alone."""
        ranks = self.layout.mask.cumsum(0) - 1
        for windows in pack(self.lengths, token_budget):
            flat = torch.cat([torch.arange(self.starts[w], self.starts[w] + self.lengths[w]) for w in windows])
            token_ids = self.token_ids[flat]
            optimised = self.layout.mask[flat].nonzero().squeeze(1)
            yield MicroBatch(
                token_ids=token_ids.to(device),
                lengths=[self.lengths[w] for w in windows],
                states=(optimised - 1).to(device),
                targets=token_ids[optimised].to(device),
                index=ranks[flat[optimised]],
            )


def pack(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """First fit, longest first: indices of `lengths` in bins of at most `budget` each; a longer one goes alone."""
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        for number, left in enumerate(room):
            if lengths[index] <= left:
                bins[number].append(index)
                room[number] -= lengths[index]
                break
        else:
            bins.append([index])
            room.append(budget - lengths[index])
    return bins


def exclude_untrained(rollouts: Sequence[Rollout], config: TrainConfig) -> None:
    """Record in the ledgers what this configuration does not train, and why."""
    for rollout in rollouts:
        if rollout.end == "time" and not config.train_timed_out:
            rollout.exclude("time")
        if not config.summaries:
            rollout.exclude(UNTRAINED_SUMMARIES, "summary")


def build_batch(rollouts: Sequence[Rollout], config: TrainConfig) -> Batch:
    """One batch of finished rollouts, in order; consecutive `config.group_size` of them share a task.

    Marks in the ledgers what is not trained. Raises ValueError for a rollout that must not get here: one that broke down,
    was sampled as text, has no finite reward, or samples its window's first token (there is no state before it).
    """
    for rollout in rollouts:
        check_rollout(rollout)
    exclude_untrained(rollouts, config)
    token_ids: list[np.ndarray] = []
    segments: list[np.ndarray] = []
    behaviour: list[np.ndarray] = []
    owners: list[tuple[int, int, bool]] = []
    n_windows = 0
    for number, rollout in enumerate(rollouts):
        for window in rollout.windows:
            first = len(owners)
            owners += [(number, n_windows, segment.kind == "summary") for segment in window.segments]
            n_windows += 1
            segment_of = batch_segments(window, first)
            optimised = segment_of >= 0
            if optimised.any():
                token_ids.append(np.asarray(window.token_ids, dtype=np.int64))
                segments.append(segment_of)
                behaviour.append(np.asarray(window.logprobs, dtype=np.float64)[optimised])
    columns = np.asarray(owners, dtype=np.int64).reshape(-1, 3).T
    layout = Layout(
        segment=torch.from_numpy(concatenate(segments, np.int64)),
        rollout=torch.from_numpy(columns[0].copy()),
        window=torch.from_numpy(columns[1].copy()),
        is_summary=torch.from_numpy(columns[2].astype(bool)),
        n_rollouts=len(rollouts),
    )
    return Batch(
        token_ids=torch.from_numpy(concatenate(token_ids, np.int64)),
        lengths=[len(ids) for ids in token_ids],
        layout=layout,
        behaviour=torch.from_numpy(concatenate(behaviour, np.float64)),
        rewards=torch.tensor([rollout.reward for rollout in rollouts], dtype=torch.float64),
        groups=torch.arange(len(rollouts)) // config.group_size,
        accounting=account(rollouts, trained=sum(len(part) for part in behaviour)),
    )


def batch_segments(window: Window, first: int) -> np.ndarray:
    """[T] batch-wide segment of each token, -1 where it is not optimised; `first`: number of the window's first segment."""
    numbers = np.full(len(window), -1, dtype=np.int64)
    ids = np.asarray(window.segment_ids)
    for offset, segment in enumerate(window.segments):
        if segment.trainable:
            numbers[ids == segment.index] = first + offset
    return numbers


def check_rollout(rollout: Rollout) -> None:
    if rollout.end == "error":
        raise ValueError(f"rollout {rollout.id} broke down ({rollout.error}): it is dropped, never trained")
    if rollout.approximate:
        raise ValueError(
            f"rollout {rollout.id} was sampled as text, without tokens and log-probabilities: it is evaluated, never trained"
        )
    if not np.isfinite(rollout.reward):
        raise ValueError(f"rollout {rollout.id} has reward {rollout.reward}: a reward must be a finite number")
    if any(window.segment_ids[:1] not in ([], [CONTEXT]) for window in rollout.windows):
        raise ValueError(f"rollout {rollout.id}: the first token of a window was sampled without any context")
    indices = [segment.index for segment in rollout.segments]
    if indices != list(range(len(indices))):
        raise ValueError(f"rollout {rollout.id}: segments must be numbered 0, 1, ... over its windows, got {indices}")


def account(rollouts: Sequence[Rollout], trained: int) -> dict[str, int]:
    """Sum the ledgers' token counts and hold them to invariant 1: nothing vanishes, nothing trains twice."""
    total: Counter[str] = Counter()
    for rollout in rollouts:
        total.update(rollout.token_counts())
    counts = {"sampled": 0, "trained": 0, **total}
    explained = sum(count for key, count in counts.items() if key != "sampled")
    if counts["trained"] != trained or counts["sampled"] != explained:
        raise ValueError(f"the ledgers do not add up: {trained} tokens in the batch, counts {counts}")
    return counts


def concatenate(parts: list[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate(parts) if parts else np.empty(0, dtype=dtype)
