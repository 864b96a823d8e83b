"""Many rollouts at once: bounded concurrency, retries, and refills, so that a batch always has its N rollouts."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count as integers

from compactionrl.environments.protocol import TaskSet
from compactionrl.rollout.chat import ChatFormat
from compactionrl.rollout.ledger import Rollout
from compactionrl.rollout.loop import RolloutSettings, describe, random_stream, run_rollout
from compactionrl.samplers.protocol import Sampler

MAX_BROKEN_UNITS = 16
"""Neighbouring units that all had to be dropped stop a collection: something is broken for good."""


class CollectionError(RuntimeError):
    """Rollouts keep breaking down for reasons outside the policy."""


@dataclass(frozen=True)
class Job:
    """One rollout to run: a task of a split, the seed of its random streams, and its own settings if it has some."""

    split: str
    index: int
    rollout_id: str
    seed: int
    settings: RolloutSettings | None = None


@dataclass
class Collected:
    """`rollouts` finished, in the order of their jobs; `dropped`: the last try of each that kept breaking down.

    `ends` counts every finished rollout and every broken try by its end; `units`: how many were taken from the iterator.
    """

    rollouts: list[Rollout] = field(default_factory=list)
    dropped: list[Rollout] = field(default_factory=list)
    ends: Counter[str] = field(default_factory=Counter)
    retried: int = 0
    units: int = 0


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
    summariser: Sampler | None = None,
    on_rollout: Callable[[Rollout], None] | None = None,
) -> Collected:
    """Run units of jobs (a unit: the rollouts of one group) until `count` rollouts have finished or `units` ends.

    A rollout that breaks down is tried again up to `retries` times; if it still does, its whole unit is dropped, counted,
    and the next unit takes its place. Raises CollectionError when units only break down.
    """
    result = Collected()
    slots = asyncio.Semaphore(concurrency)

    async def run(job: Job) -> Rollout:
        async with slots:
            for attempt in range(retries + 1):
                rollout_id = job.rollout_id if not attempt else f"{job.rollout_id}-retry{attempt}"
                task_id = tasks.task_id(job.split, job.index)
                try:
                    environment = tasks.environment(job.split, job.index)
                except Exception as error:  # whatever a user's task family raises: the environment's trouble
                    rollout = Rollout(rollout_id, task_id, error=describe(error))
                else:
                    rollout = await run_rollout(
                        environment,
                        sampler,
                        chat,
                        job.settings or settings,
                        rollout_id=rollout_id,
                        task_id=task_id,
                        seed=random_stream(job.seed, "retry", attempt) if attempt else job.seed,
                        summariser=summariser,
                    )
                if rollout.end != "error" or not rollout.retryable or attempt == retries:
                    return rollout
                result.ends["error"] += 1
                result.retried += 1
        raise AssertionError("unreachable: the last attempt returns")

    async def run_unit(jobs: list[Job]) -> list[Rollout]:
        try:
            async with asyncio.TaskGroup() as group:
                running = [group.create_task(run(job)) for job in jobs]
        except ExceptionGroup as errors:
            # Trouble of a rollout is in its ledger; what comes out here is a configuration that cannot work, or a bug.
            raise errors.exceptions[0] from None
        return [task.result() for task in running]

    finished: dict[int, list[Rollout]] = {}
    running: dict[asyncio.Task[list[Rollout]], int] = {}
    broken_units: set[int] = set()
    expected = 0
    try:
        while True:
            while expected < count and (jobs := next(units, None)) is not None:
                running[asyncio.create_task(run_unit(jobs))] = result.units
                result.units += 1
                expected += len(jobs)
            if not running:
                break
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=running.__getitem__):
                number, rollouts = running.pop(task), task.result()
                result.ends.update(rollout.end for rollout in rollouts)
                broken = [rollout for rollout in rollouts if rollout.end == "error"]
                if not broken:
                    finished[number] = rollouts
                    for rollout in rollouts:
                        if on_rollout:
                            on_rollout(rollout)
                    continue
                result.dropped += broken
                expected -= len(rollouts)
                broken_units.add(number)
                if run_length(broken_units, number) >= MAX_BROKEN_UNITS:
                    raise CollectionError(f"{MAX_BROKEN_UNITS} tasks in a row broke down; the last: {broken[-1].error}")
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    result.rollouts = [rollout for number in sorted(finished) for rollout in finished[number]]
    return result


def run_length(numbers: set[int], number: int) -> int:
    """How many consecutive numbers around `number` are in the set. (Broken units end first: their order says nothing.)"""
    before = next(i for i in integers(1) if number - i not in numbers)
    after = next(i for i in integers(1) if number + i not in numbers)
    return before + after - 1
