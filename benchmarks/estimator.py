"""Credit for 128 rollouts of 64k tokens: `estimate` against a loop over tokens in plain Python. Single thread.

Both go from the same tensors to tensors of advantages and targets, and must agree. `python benchmarks/estimator.py` prints
JSON; `estimator_vs_loop` is the loop's seconds over ours.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from compactionrl.method import Layout, adaptive_lambda, estimate

ROLLOUTS, TOKENS, SEGMENTS, OBSERVED = 128, 65_536, 7, 0.25
"""A rollout is four windows, the first three with a summary; a quarter of the tokens are observations."""


def measure(repeats: int, rollouts: int = ROLLOUTS, tokens: int = TOKENS) -> dict[str, dict[str, Any]]:
    """`estimator_vs_loop`: median and range over `repeats` of the ratio of times, each pair measured back to back."""
    torch.set_num_threads(1)
    batch = _batch(rollouts, tokens)
    ours, loops = [], []
    for _ in range(repeats):
        seconds, (advantages, targets) = _timed(lambda: _ours(*batch))
        ours.append(seconds)
        seconds, (expected_advantages, expected_targets) = _timed(lambda: _loop(*batch))
        loops.append(seconds)
        torch.testing.assert_close(advantages, expected_advantages, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(targets, expected_targets, rtol=1e-5, atol=1e-6)
    ratios = [loop / own for loop, own in zip(loops, ours, strict=True)]
    return {
        "estimator_vs_loop": {
            "median": statistics.median(ratios),
            "spread": [min(ratios), max(ratios)],
            "tokens": rollouts * tokens,
            "ours_seconds": statistics.median(ours),
            "loop_seconds": statistics.median(loops),
        }
    }


def _batch(rollouts: int, tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    place = torch.arange(tokens) * SEGMENTS // tokens
    segment = (place + SEGMENTS * torch.arange(rollouts)[:, None]).flatten()
    observed = torch.rand(segment.numel(), generator=generator) < OBSERVED
    number = torch.arange(SEGMENTS * rollouts)
    rollout, index = number // SEGMENTS, number % SEGMENTS
    window = rollout * (SEGMENTS // 2 + 1) + index // 2
    values = torch.randn(segment.numel(), generator=generator)
    return segment.masked_fill(observed, -1), rollout, window, index % 2 == 1, values, torch.rand(rollouts)


def _ours(
    segment: Tensor, rollout: Tensor, window: Tensor, is_summary: Tensor, values: Tensor, rewards: Tensor
) -> tuple[Tensor, Tensor]:
    found = estimate(Layout(segment, rollout, window, is_summary, len(rewards)), values, rewards)
    return found.advantages, found.targets


def _loop(
    segment: Tensor, rollout: Tensor, window: Tensor, is_summary: Tensor, values: Tensor, rewards: Tensor
) -> tuple[Tensor, Tensor]:
    """E13 and E14, backwards token by token; gamma = 1, one lambda per rollout, critic lambda 1."""
    segments, of_segment, v, r = segment.tolist(), rollout.tolist(), values.tolist(), rewards.tolist()
    lengths = [0] * len(of_segment)
    for s in segments:
        if s >= 0:
            lengths[s] += 1
    totals, later = [0] * len(r), [0] * len(lengths)
    for s in reversed(range(len(lengths))):
        later[s] = totals[of_segment[s]]
        totals[of_segment[s]] += lengths[s]
    lambdas = adaptive_lambda(torch.tensor(totals), 1.5)[rollout].tolist()
    advantages, targets = [0.0] * len(v), [0.0] * len(v)
    current, following, policy, critic = -1, 0.0, 0.0, 0.0
    for t in reversed(range(len(v))):
        s = segments[t]
        if s < 0:
            continue
        if s != current:
            current, factor = s, lambdas[s] ** later[s]
            policy = critic = r[of_segment[s]] - v[t]
        else:
            delta = following - v[t]
            policy, critic = delta + lambdas[s] * policy, delta + critic
        following = v[t]
        advantages[t], targets[t] = factor * policy, critic + following
    return torch.tensor(advantages), torch.tensor(targets)


def _timed(work: Callable[[], tuple[Tensor, Tensor]]) -> tuple[float, tuple[Tensor, Tensor]]:
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rollouts", type=int, default=ROLLOUTS)
    parser.add_argument("--tokens", type=int, default=TOKENS, help="per rollout")
    options = parser.parse_args()
    print(json.dumps(measure(options.repeats, options.rollouts, options.tokens), indent=2))


if __name__ == "__main__":
    main()
