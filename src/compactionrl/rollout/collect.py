"""Many rollouts at once: bounded concurrency, retries, and refills, so that a batch always has its N rollouts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import aclosing

from compactionrl.environments.protocol import TaskSet
from compactionrl.rollout.chat import ChatFormat
from compactionrl.rollout.job import Job
from compactionrl.rollout.ledger import Rollout
from compactionrl.rollout.loop import RolloutSettings
from compactionrl.rollout.stream import Collected, CollectionError, Stream
from compactionrl.samplers.protocol import Sampler, Summariser

__all__ = ["Collected", "CollectionError", "Job", "collect"]


async def collect(
    tasks: TaskSet,
    sampler: Sampler,
    chat: ChatFormat,
    settings: RolloutSettings,
    units: Iterator[list[Job]],
    count: int,
    *,
    concurrency: int,
    retries: int,
    summariser: Summariser | None = None,
    on_rollout: Callable[[Rollout], None] | None = None,
) -> Collected:
    """Run units of jobs (a unit: the rollouts of one group) until `count` rollouts have finished or `units` ends.

    A rollout that breaks down is tried again up to `retries` times; if it still does, its whole unit is dropped, counted,
    and the next unit takes its place. Raises CollectionError when units only break down.
    """
    stream = Stream(
        tasks,
        sampler,
        chat,
        settings,
        units,
        count,
        concurrency=concurrency,
        retries=retries,
        summariser=summariser,
        on_rollout=on_rollout,
    )
    async with aclosing(stream):
        return await stream.batch()
