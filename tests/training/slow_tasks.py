"""What takes its time, and what breaks down: tasks and samplers for tests of asynchronous training."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

from training_tasks import Chatter, ChatterTasks

from compactionrl.environments.protocol import Observation, Response
from compactionrl.models import Transformer
from compactionrl.samplers.local import LocalSampler
from compactionrl.samplers.protocol import Sampled, SamplerError, SamplerRefused


class SlowChatter(Chatter):
    """Each step takes a moment, now and then a long one; some steps break down."""

    def __init__(self, index: int, broken: bool, most: int, seconds: float, faults: float) -> None:
        super().__init__(index, broken, most)
        self.rng = random.Random(index)
        self.seconds = seconds
        self.faults = faults

    async def step(self, response: Response) -> Observation:
        await asyncio.sleep(self.seconds * self.rng.choice((0, 1, 1, 10)))
        if self.rng.random() < self.faults:
            raise OSError("the container is gone")
        return await super().step(response)


class SlowTasks(ChatterTasks):
    def __init__(self, seconds: float = 0.0, faults: float = 0.0, **options: Any) -> None:
        super().__init__(**options)
        self.seconds = seconds
        self.faults = faults

    def environment(self, split: str, index: int) -> SlowChatter:
        return SlowChatter(index, split == "train" and index in self.broken, self.turns, self.seconds, self.faults)


class SlowSampler:
    """A local sampler that dawdles before its answers, breaks down now and then, and has all that a sampler may have.

    `calls` of all that were made: what was called, in order. With `deaf`, it does not hear of new weights.
    """

    calls: list[Any] = []  # noqa: RUF012  a trainer makes its sampler itself: this is how a test sees it

    def __init__(
        self, policy: Transformer, seconds: float = 0.0, faults: float = 0.0, deaf: bool = False, refuses: str = ""
    ) -> None:
        self.local = LocalSampler(policy, max_rows=8, max_tokens_per_row=384)
        self.rng = random.Random(0)
        self.seconds, self.faults, self.deaf, self.refuses = seconds, faults, deaf, refuses

    async def start(self, budget: int) -> None:
        self.calls.append(("start", budget))
        await asyncio.sleep(0)
        if self.refuses == "start":
            raise SamplerRefused("no such model: set server.model")

    async def sample(self, token_ids: Sequence[int], **request: Any) -> Sampled:
        self.calls.append("sample")
        await asyncio.sleep(self.seconds * self.rng.choice((0, 1, 1, 10)))
        if self.rng.random() < self.faults:
            raise SamplerError("the connection broke")
        return await self.local.sample(token_ids, **request)

    async def release(self, affinity: str) -> None:
        await self.local.release(affinity)

    async def weights_changed(self, version: int) -> None:
        self.calls.append(("weights", version))
        if not self.deaf:
            self.local.weights_changed(version)  # at once: the policy has its new weights already
        await asyncio.sleep(self.seconds)
        if self.refuses == f"weights {version}":
            raise SamplerRefused("wrong weights")

    async def close(self) -> None:
        self.calls.append("close")
