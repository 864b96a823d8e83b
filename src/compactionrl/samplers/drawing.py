"""From logits to tokens: one independent random stream per request, log-probabilities as sampled."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
FIRST = np.uint64(0xBF58476D1CE4E5B9)
SECOND = np.uint64(0x94D049BB133111EB)
MANTISSA = 52
"""Bits of a draw: with one more, draw * total could round up to the total, past the last token of the CDF."""


def uniforms(seeds: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """Draws in [0, 1), float64 [n]: number `indices` [n] of the streams `seeds` [n] (both uint64).

    A stream is a hash of (seed, index) and has no state, so a request's draws do not depend on its neighbours. The hash
    is SplitMix64 (Steele, Lea and Flood 2014), keyed by a hash of the seed.
    """
    words = _mix(_mix(seeds + GOLDEN) + indices * GOLDEN)
    return (words >> np.uint64(64 - MANTISSA)) * 2.0**-MANTISSA


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * FIRST
    x = (x ^ (x >> np.uint64(27))) * SECOND
    return x ^ (x >> np.uint64(31))


def draw(logits: Tensor, temperature: Tensor, top_p: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Sample one token per row: token ids [B] and log-probabilities [B] in fp32.

    `logits` [B, V]; `temperature`, `top_p` and `uniform` (float64) are [B]. The token is where the cumulative
    distribution first exceeds `uniform`. The log-probability is of the whole temperature-scaled softmax, also where
    `top_p` < 1 restricts the draw to the nucleus. Temperature 0 takes the most likely token (the first among equals) and
    gives its log-probability at temperature 1.
    """
    greedy = temperature == 0
    scaled = logits.float() / torch.where(greedy, 1.0, temperature)[:, None]
    logprobs = scaled.log_softmax(-1)
    probabilities = logprobs.exp()
    if (top_p < 1).any():
        probabilities = torch.where(_nucleus(probabilities, top_p), probabilities, 0.0)
    cumulative = probabilities.cumsum(-1, dtype=torch.float64)
    threshold = (uniform * cumulative[:, -1])[:, None]
    tokens = torch.searchsorted(cumulative, threshold, right=True)
    if greedy.any():
        tokens = torch.where(greedy[:, None], logprobs.argmax(-1, keepdim=True), tokens)
    return tokens[:, 0], logprobs.gather(-1, tokens)[:, 0]


def _nucleus(probabilities: Tensor, top_p: Tensor) -> Tensor:
    """The smallest set of most likely tokens whose probability reaches top_p, as a mask [B, V] (Holtzman et al. 2020)."""
    ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(-1, dtype=torch.float64) - ordered
    inside = (before < top_p[:, None]) | (top_p[:, None] >= 1)
    return torch.zeros_like(inside).scatter(-1, order, inside)
