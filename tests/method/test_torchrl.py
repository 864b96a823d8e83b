"""A rollout of one segment against torchrl's GAE, written by others."""

import pytest
import torch
from torch.testing import assert_close
from torchrl.objectives.value.functional import generalized_advantage_estimate

from compactionrl.method import estimate

from . import brute


@pytest.mark.parametrize("estimator", ["cross_trajectory", "segment", "concatenated"])
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (1.0, 0.95), (0.97, 0.8), (0.9, 0.0)])
def test_one_segment_equals_torchrl(estimator: str, gamma: float, lam: float) -> None:
    n = 137
    layout = brute.from_lengths([[n]])
    values, rewards = brute.numbers(layout, 11)
    found = estimate(layout, values, rewards, estimator=estimator, gamma=gamma, lam=lam, critic_lambda=lam)
    column = values.view(1, n, 1)
    following = torch.cat([column[:, 1:], torch.zeros(1, 1, 1, dtype=torch.float64)], dim=1)
    constants = (torch.tensor(x, dtype=torch.float64) for x in (gamma, lam))  # Python numbers become float32 there
    reward, done = torch.zeros_like(column), torch.zeros_like(column, dtype=torch.bool)
    reward[0, -1], done[0, -1] = rewards[0], True
    advantage, target = generalized_advantage_estimate(*constants, column, following, reward, done, done)
    assert_close(found.advantages, advantage.view(n), rtol=1e-10, atol=1e-12)
    assert_close(found.targets, target.view(n), rtol=1e-10, atol=1e-12)
