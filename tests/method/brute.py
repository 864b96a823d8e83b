"""Batches to test on, and the method's equations as sums over Python lists, written down as the paper prints them."""

from __future__ import annotations

import math

import torch
from hypothesis import strategies as st
from torch import Tensor

from compactionrl.method import Layout

Windows = list[list[tuple[bool, list[bool]]]]
"""The windows of one rollout; a window is its segments, (is it a summary, is each of its tokens optimised)."""


def make_layout(rollouts: list[Windows]) -> Layout:
    segment: list[int] = []
    rollout: list[int] = []
    window: list[int] = []
    is_summary: list[bool] = []
    n_windows = 0
    for r, windows in enumerate(rollouts):
        for segments in windows:
            for summary, optimised in segments:
                segment += [len(rollout) if yes else -1 for yes in optimised]
                rollout.append(r)
                window.append(n_windows)
                is_summary.append(summary)
            n_windows += 1
    numbers = (torch.tensor(x, dtype=torch.long) for x in (segment, rollout, window))
    return Layout(*numbers, torch.tensor(is_summary, dtype=torch.bool), len(rollouts))


def from_lengths(rollouts: list[list[int]]) -> Layout:
    """Segments of the given lengths, all tokens optimised; windows of an execution and a summary segment each."""
    return make_layout(
        [
            [
                [(bool(i % 2), [True] * lengths[i]) for i in range(first, min(first + 2, len(lengths)))]
                for first in range(0, len(lengths), 2)
            ]
            for lengths in rollouts
        ]
    )


@st.composite
def layouts(draw: st.DrawFn, max_rollouts: int = 4, max_windows: int = 3, max_tokens: int = 7) -> Layout:
    """Any rollouts, windows without tokens or optimised tokens included."""
    optimised = st.lists(st.booleans(), max_size=max_tokens)
    window = st.one_of(
        st.tuples(st.tuples(st.just(False), optimised)),
        st.tuples(st.tuples(st.just(False), optimised), st.tuples(st.just(True), optimised)),
    ).map(list)
    return make_layout(draw(st.lists(st.lists(window, max_size=max_windows), min_size=1, max_size=max_rollouts)))


def numbers(layout: Layout, seed: int) -> tuple[Tensor, Tensor]:
    """Values [N] and rewards [R], float64; values of tokens that are not optimised are NaN."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(layout.segment.numel(), generator=generator, dtype=torch.float64)
    rewards = torch.randn(layout.n_rollouts, generator=generator, dtype=torch.float64)
    return values.masked_fill(layout.segment < 0, math.nan), rewards


def positions(layout: Layout) -> list[list[int]]:
    """The optimised tokens of each segment."""
    segment = layout.segment.tolist()
    return [[t for t, s in enumerate(segment) if s == number] for number in range(len(layout.rollout))]


def lambdas(layout: Layout, span: str, alpha: float) -> list[float]:
    """max(0, 1 - 1/(alpha l)) for each segment."""
    tokens, found = positions(layout), []
    of = {"rollout": layout.rollout.tolist(), "window": layout.window.tolist(), "segment": list(range(len(tokens)))}[
        span
    ]
    for s in range(len(tokens)):
        length = sum(len(tokens[other]) for other in range(len(tokens)) if of[other] == of[s])
        found.append(max(0.0, 1 - 1 / (alpha * length)) if length else 0.0)
    return found


def local(values: list[float], reward: float, decay: list[float], gamma: float) -> list[float]:
    """E13 over one sequence: the sum over j >= i of delta_j times all decays of the tokens i .. j - 1."""
    n = len(values)
    delta = [
        (reward if j == n - 1 else 0.0) + gamma * (values[j + 1] if j < n - 1 else 0.0) - values[j] for j in range(n)
    ]
    return [sum(math.prod(decay[i:j]) * delta[j] for j in range(i, n)) for i in range(n)]


def estimate(
    layout: Layout,
    values: Tensor,
    rewards: Tensor,
    estimator: str,
    gamma: float,
    lams: list[float],
    critic_lambda: float | str,
) -> tuple[Tensor, Tensor]:
    """Advantages and targets of a value-based estimator."""
    tokens, rollout, v = positions(layout), layout.rollout.tolist(), values.tolist()
    advantages, targets = [0.0] * len(v), [0.0] * len(v)
    if estimator == "concatenated":
        runs = [[s for s in range(len(tokens)) if rollout[s] == r] for r in range(layout.n_rollouts)]
    else:
        runs = [[s] for s in range(len(tokens))]
    for run in runs:
        where = [t for s in run for t in tokens[s]]
        own = [v[t] for t in where]
        reward = float(rewards[rollout[run[0]]]) if run else 0.0
        decay = [gamma * lams[s] for s in run for _ in tokens[s]]
        later = (
            sum(len(tokens[s]) for s in range(run[-1] + 1, len(tokens)) if rollout[s] == rollout[run[-1]]) if run else 0
        )
        factor = (gamma * lams[run[0]]) ** later if estimator == "cross_trajectory" else 1.0
        policy = local(own, reward, decay, gamma)
        critic = policy if critic_lambda == "policy" else local(own, reward, [gamma * critic_lambda] * len(own), gamma)
        for t, a, b, value in zip(where, policy, critic, own, strict=True):
            advantages[t], targets[t] = factor * a, b + value
    return torch.tensor(advantages, dtype=torch.float64), torch.tensor(targets, dtype=torch.float64)
