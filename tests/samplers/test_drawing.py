"""Draws: the right distribution, the right log-probability, streams that do not depend on each other."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from compactionrl.config import COLDEST, NARROWEST
from compactionrl.samplers.drawing import draw, uniforms

LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5, -3.0])


def draws(n: int, temperature: float = 1.0, top_p: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    uniform = torch.from_numpy(uniforms(np.arange(n, dtype=np.uint64), np.zeros(n, dtype=np.uint64)))
    return draw(LOGITS.expand(n, -1), torch.full((n,), temperature), torch.full((n,), top_p), uniform)


def chi_square(tokens: torch.Tensor, probabilities: torch.Tensor) -> float:
    expected = probabilities * len(tokens)
    return float(((tokens.bincount(minlength=len(probabilities)) - expected) ** 2 / expected).sum())


def test_sampled_frequencies_follow_the_softmax() -> None:
    for temperature in (0.7, 1.0, 2.0):
        tokens, logprobs = draws(40_000, temperature)
        expected = (LOGITS / temperature).softmax(-1)
        assert chi_square(tokens, expected) < 25.7  # 99.99 % of chi-square with 5 degrees of freedom
        torch.testing.assert_close(logprobs, expected.log()[tokens])


def test_nucleus_is_the_smallest_set_that_reaches_top_p() -> None:
    # Softmax: 0.571, 0.210, 0.127 (token 4), 0.077, 0.028, ...
    probabilities = LOGITS.softmax(-1)
    for top_p, inside in [(0.5, {0}), (0.6, {0, 1}), (0.79, {0, 1, 4}), (1.0, {0, 1, 2, 3, 4, 5})]:
        tokens, logprobs = draws(40_000, top_p=top_p)
        assert set(tokens.tolist()) == inside
        torch.testing.assert_close(logprobs, probabilities.log()[tokens])
        kept = torch.tensor(sorted(inside))
        if len(kept) > 1:
            counts = tokens.bincount(minlength=6)[kept]
            ratio = counts / counts.sum() - probabilities[kept] / probabilities[kept].sum()
            assert ratio.abs().max() < 0.01


def test_rows_keep_their_own_settings() -> None:
    temperature, top_p = torch.tensor([0.0, 1.0, 0.5]), torch.tensor([1.0, 0.1, 1.0])
    uniform = torch.full((3,), 0.999999, dtype=torch.float64)
    tokens, logprobs = draw(LOGITS.expand(3, -1), temperature, top_p, uniform)
    assert tokens.tolist() == [0, 0, 5]
    full, sharp = LOGITS.log_softmax(-1), (2 * LOGITS).log_softmax(-1)
    torch.testing.assert_close(logprobs, torch.stack([full[0], full[0], sharp[5]]))


def test_extreme_draws_stay_on_tokens_that_have_probability() -> None:
    logits = torch.tensor([[-torch.inf, 3.0, 1.0, -torch.inf]]).expand(2, -1)
    uniform = torch.tensor([0.0, 1 - 2.0**-52], dtype=torch.float64)
    tokens, _ = draw(logits, torch.ones(2), torch.ones(2), uniform)
    assert tokens.tolist() == [1, 2]


@pytest.mark.parametrize(("temperature", "top_p"), [(COLDEST, 1.0), (1.0, NARROWEST), (COLDEST, NARROWEST)])
@pytest.mark.parametrize("scale", [1.0, 1e6])
def test_the_coldest_and_the_narrowest_draw_is_that_of_the_most_likely_token(
    temperature: float, top_p: float, scale: float
) -> None:
    logits, uniform = scale * LOGITS[None], torch.tensor([1 - 2.0**-52], dtype=torch.float64)
    tokens, logprobs = draw(logits, torch.tensor([temperature]), torch.tensor([top_p]), uniform)
    assert tokens.tolist() == [0]
    assert logprobs.item() == pytest.approx(float((scale * LOGITS.double() / temperature).log_softmax(-1)[0]), abs=1e-6)


def test_uniforms_are_uniform_and_unrelated() -> None:
    seeds, indices = np.meshgrid(np.arange(300, dtype=np.uint64), np.arange(300, dtype=np.uint64), indexing="ij")
    values = uniforms(seeds.ravel(), indices.ravel())
    assert values.min() >= 0
    assert values.max() < 1
    counts = np.histogram(values, bins=50, range=(0, 1))[0]
    assert ((counts - 1800) ** 2 / 1800).sum() < 98  # 99.99 % with 49 degrees of freedom: 97.9
    grid = values.reshape(300, 300)
    for a, b in [(grid[:, :-1], grid[:, 1:]), (grid[:-1], grid[1:]), (grid[:-1, 1:], grid[1:, :-1])]:
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 4 / np.sqrt(a.size)


def test_a_draw_is_a_function_of_seed_and_index() -> None:
    many = uniforms(np.arange(50, dtype=np.uint64), np.full(50, 7, dtype=np.uint64))
    alone = uniforms(np.array([31], dtype=np.uint64), np.array([7], dtype=np.uint64))
    assert many[31] == alone[0]
