"""Log-probabilities of tokens that are there already."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

CHUNK = 256
"""Positions whose distribution over the vocabulary is in memory at a time."""


@dataclass(frozen=True)
class Score:
    """One token in its place. `rank`: 1 if it was the most likely; `top`: the most likely tokens, in order."""

    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]


@torch.inference_mode()
def score(
    policy: Any, token_ids: Sequence[int], first: int = 1, *, temperature: float = 1.0, top: int = 0
) -> list[Score]:
    """Scores of token_ids[first:], by one forward; first >= 1. Temperature 0 counts as 1, as in sampling."""
    head = policy.head_weight
    ids = torch.tensor(token_ids, device=head.device)
    hidden, targets = policy(ids, [len(ids)])[first - 1 : -1], ids[first:]
    scores: list[Score] = []
    for rows, chunk in zip(hidden.split(CHUNK), targets.split(CHUNK), strict=True):
        logprobs = ((rows @ head.T).float() / (temperature or 1.0)).log_softmax(-1)
        scores += _scores(logprobs, chunk, top)
    return scores


def _scores(logprobs: torch.Tensor, targets: torch.Tensor, top: int) -> Iterator[Score]:
    """`logprobs` [n, V], `targets` [n]."""
    found = logprobs.gather(1, targets[:, None])
    ranks = 1 + (logprobs > found).sum(1)
    best = logprobs.topk(min(top, logprobs.shape[1]))
    columns = (targets, found[:, 0], ranks, best.indices, best.values)
    for token, logprob, rank, indices, values in zip(*(column.tolist() for column in columns), strict=True):
        yield Score(token, logprob, rank, list(zip(indices, values, strict=True)))
