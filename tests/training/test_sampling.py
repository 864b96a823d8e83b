"""The sampler of a run: what of it outlives a batch."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from training_tasks import make_base, tiny_config

from compactionrl.models import Policy, load_policy
from compactionrl.samplers.protocol import Sampled, Sampler
from compactionrl.training.sampling import Sampling

LONG, SHORT = list(range(1, 9)) * 8, list(range(1, 9)) * 2


@pytest.fixture
def policy(tmp_path: Path) -> Policy:
    return load_policy(make_base(tmp_path / "base"))


async def ask(sampler: Sampler, prompt: list[int]) -> Sampled:
    return await sampler.sample(
        prompt, max_tokens=12, stop_token_ids=[], temperature=1.0, top_p=1.0, seed=7, affinity="rollout"
    )


@pytest.mark.parametrize("version", [1, 2], ids=["behind an evaluation", "behind an update"])
def test_without_staleness_nothing_that_was_cached_is_left(policy: Policy, tmp_path: Path, version: int) -> None:
    """A run that was stopped here and goes on in another process caches the same: the same rows, in as much room."""

    async def sampled_by(*prompts: list[int]) -> Any:
        """The prompts, one after the other, the last one with `version`; what comes of it, and what the sampler holds."""
        sampling = Sampling(tiny_config(tmp_path), policy)
        for prompt in prompts[:-1]:
            await ask(await sampling.current(1), prompt)
        sampler: Any = await sampling.current(version)
        sampled = await ask(sampler, prompts[-1])
        return sampled, sampler.stats.reused_tokens, sampler._cache.rows, sampler._cache.tokens

    assert asyncio.run(sampled_by(LONG, SHORT)) == asyncio.run(sampled_by(SHORT))
