"""Batches that run ahead: how old a token can be, in which order rollouts come, who waits for whom."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import count as integers
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_stubs import ScriptedEnvironment, chat_format, context, reply

from compactionrl.config import LimitsConfig
from compactionrl.environments.protocol import Response
from compactionrl.rollout.job import Job
from compactionrl.rollout.ledger import Rollout
from compactionrl.rollout.loop import RolloutSettings
from compactionrl.rollout.stream import Collected, CollectionError, Queue, Stream, Unit
from compactionrl.samplers.protocol import Sampled


@dataclass
class VersionedSampler:
    """Says "w1", with the version it has when the request is answered; a request takes `seconds()`."""

    seconds: Callable[[], float] = lambda: 0.0
    version: int = 0
    running: set[str] = field(default_factory=set)

    async def sample(self, token_ids: Sequence[int], *, max_tokens: int, affinity: str, **_: Any) -> Sampled:
        self.running.add(affinity)
        await asyncio.sleep(self.seconds())
        sampled = reply("w1", max_tokens)
        sampled.versions = [self.version] * len(sampled.token_ids)
        return sampled

    async def release(self, affinity: str) -> None:
        self.running.discard(affinity)


@dataclass
class Tasks:
    """A TaskSet of environments `make(index)`; `started` in order."""

    make: Callable[[int], Any]
    started: list[int] = field(default_factory=list)

    def size(self, split: str) -> int:
        return 10**6

    def task_id(self, split: str, index: int) -> str:
        return str(index)

    def environment(self, split: str, index: int) -> Any:
        self.started.append(index)
        return self.make(index)


class Held(ScriptedEnvironment):
    """Its first step waits for `release`."""

    def __init__(self, release: asyncio.Event, steps: int) -> None:
        super().__init__(steps=steps)
        self.release = release

    async def step(self, response: Response) -> Any:
        if not self.responses:
            await self.release.wait()
        return await super().step(response)


def units(n: int | None = None, size: int = 1) -> Iterator[list[Job]]:
    for unit in integers() if n is None else range(n):
        yield [Job("train", unit * size + member, f"job{unit * size + member}", unit) for member in range(size)]


def stream(tasks: Tasks, sampler: Any, count: int, jobs: Iterator[list[Job]] | None = None, **options: Any) -> Stream:
    options = {"concurrency": 64, "retries": 0, "batches": 3, "ahead": 1, **options}
    rollout_settings = RolloutSettings(options.pop("context", context()), LimitsConfig())
    return Stream(tasks, sampler, chat_format(), rollout_settings, jobs or units(), count, **options)


def quick(index: int = 0) -> ScriptedEnvironment:
    return ScriptedEnvironment(steps=1)


def broken(index: int = 0) -> ScriptedEnvironment:
    return ScriptedEnvironment([OSError("gone")])


def indices(rollouts: Sequence[Rollout]) -> list[int]:
    return [int(rollout.task_id) for rollout in rollouts]


def versions(rollout: Rollout) -> list[int]:
    return [v for window in rollout.windows for v in window.versions if v >= 0]


async def passes(n: int = 40) -> None:
    """Let everything that can run without waiting run."""
    for _ in range(n):
        await asyncio.sleep(0)


def expected_batches(is_broken: Callable[[int], bool], count: int, batches: int) -> list[list[int]]:
    """The definition: the good units in order, `count` at a time."""
    good = (index for index in integers() if not is_broken(index))
    return [[next(good) for _ in range(count)] for _ in range(batches)]


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    ahead=st.integers(0, 3),
    count=st.integers(1, 5),
    concurrency=st.sampled_from([1, 2, 5, 100]),
    rate=st.sampled_from([0.0, 0.3]),
)
def test_no_token_is_too_old_and_units_come_in_their_order(
    seed: int, ahead: int, count: int, concurrency: int, rate: float
) -> None:
    """Whatever takes long: environments, requests, updates. A simulated trainer checks every token of every batch."""
    rng = random.Random(seed)
    total = 5
    bad = {index for index in range(100) if rng.random() < rate}
    pauses = (0.0, 0.0, 0.0005, 0.004)
    sampler = VersionedSampler(lambda: rng.choice(pauses))

    def make(index: int) -> ScriptedEnvironment:
        if index in bad:
            return ScriptedEnvironment([OSError("gone")], seconds=rng.choice(pauses))
        return ScriptedEnvironment(steps=rng.choice((1, 2, 8)), seconds=rng.choice(pauses))

    tasks = Tasks(make)

    async def train() -> list[Collected]:
        found = []
        async with aclosing(stream(tasks, sampler, count, batches=total, ahead=ahead, concurrency=concurrency)) as s:
            for number in range(total):
                sampler.version = number
                batch = await s.batch()
                assert all(number - v <= ahead for r in batch.rollouts for v in versions(r))
                assert all(v <= number for r in batch.rollouts for v in versions(r))
                found.append(batch)
                await asyncio.sleep(rng.choice(pauses))  # the update
        return found

    found = asyncio.run(train())
    assert [indices(batch.rollouts) for batch in found] == expected_batches(bad.__contains__, count, total)
    seen = [index for batch in found for index in sorted(indices([*batch.rollouts, *batch.dropped]))]
    assert seen == list(range(sum(batch.units for batch in found))), "a cursor: trained once, or counted as dropped"
    assert set(seen) & bad == {index for batch in found for index in indices(batch.dropped)}
    assert tasks.started == sorted(tasks.started)


def next_batch(queue: Sequence[Unit], count: int) -> list[Unit]:
    """The definition: units from the front, until they have `count` rollouts."""
    return [unit for i, unit in enumerate(queue) if sum(before.size for before in queue[:i]) < count]


@settings(max_examples=200, deadline=None)
@given(count=st.integers(1, 6), size=st.integers(1, 3), rng=st.randoms(use_true_random=False))
def test_units_are_counted_as_they_stand_in_the_queue(count: int, size: int, rng: random.Random) -> None:
    """Whatever starts, ends and breaks down, in any order: all that the queue says is what a look at every unit says."""
    queue, standing, numbered = Queue(count), [], enumerate(units(size=size))
    for _ in range(60):
        running = [unit for unit in standing if not unit.ended]
        due = next_batch(standing, count)
        if rng.random() < 0.4:
            standing.append(Unit(*next(numbered)))
            queue.add(standing[-1])
        elif running:
            unit = rng.choice(running)
            ends = [rng.choice(["submitted"] * 4 + ["error"]) for _ in unit.jobs]
            unit.rollouts = [Rollout(job.rollout_id, "", end=end) for job, end in zip(unit.jobs, ends, strict=True)]
            queue.settle(unit)
        elif queue.full:
            behind = standing[len(due) :]
            broken = next((i for i, unit in enumerate(behind) if not unit.broken), len(behind))
            taken, standing = due + behind[:broken], behind[broken:]
            batch = queue.take()
            assert batch.rollouts == [r for unit in taken if not unit.broken for r in unit.rollouts]
            assert batch.units == len(taken)
        due = next_batch(standing, count)
        assert queue.expected == sum(unit.size for unit in standing)
        assert queue.ready == sum(unit.size for unit in due if unit.ended)
        assert queue.full == (sum(unit.size for unit in due) >= count)
        assert queue.ended == all(unit.ended for unit in due)


def test_a_straggler_is_waited_for_while_the_batches_ahead_run() -> None:
    """Rollout 1 of batch 0 takes for ever: batches 1 and 2 are run meanwhile, nothing of batch 3, and it is not dropped."""
    release = asyncio.Event()
    tasks = Tasks(lambda index: Held(release, 1) if index == 1 else quick())
    sampler = VersionedSampler()

    async def scenario() -> None:
        async with aclosing(stream(tasks, sampler, 4, ahead=2, batches=9)) as s:
            first = asyncio.create_task(s.batch())
            await passes()
            assert not first.done()
            assert tasks.started == list(range(12))
            assert s.ready == 3
            release.set()
            assert indices((await first).rollouts) == [0, 1, 2, 3]
            sampler.version = 1
            second = await s.batch()
            assert indices(second.rollouts) == [4, 5, 6, 7]
            assert {v for r in second.rollouts for v in versions(r)} == {0}

    asyncio.run(scenario())


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_what_runs_while_an_update_computes(ahead: int) -> None:
    """After batch b is taken, and before the next is asked for, the `ahead` following batches may run, no more."""
    tasks = Tasks(quick)

    async def scenario() -> None:
        async with aclosing(stream(tasks, VersionedSampler(), 3, ahead=ahead, batches=5)) as s:
            for number in range(5):
                await s.batch()
                await passes()
                assert len(tasks.started) == 3 * min(number + 1 + ahead, 5)
                assert s.ready == (3 if ahead and number < 4 else 0)

    asyncio.run(scenario())
    assert tasks.started == list(range(15)), "none is started for a batch that never comes"


def test_a_rollout_may_span_versions() -> None:
    """One response before the update, two behind it: the first step waits for its end."""
    sampler = VersionedSampler()
    release = asyncio.Event()

    def make(index: int) -> ScriptedEnvironment:
        return Held(release, 3) if index == 1 else quick()

    async def scenario() -> Rollout:
        async with aclosing(stream(Tasks(make), sampler, 1, ahead=1, batches=2)) as s:
            await s.batch()
            await passes()
            sampler.version = 1
            release.set()
            return (await s.batch()).rollouts[0]

    found = versions(asyncio.run(scenario()))
    response = len(reply("w1", 9).token_ids)
    assert found == [0] * response + [1] * 2 * response


def test_dropped_units_are_refilled_from_later_ones_and_counted_with_the_batch_of_their_place() -> None:
    """Units of two. 1 and 4 break down: batch 0 is units 0 and 2, batch 1 units 3 and 5."""
    tasks = Tasks(lambda index: broken() if index // 2 in (1, 4) else quick())

    async def scenario() -> list[Collected]:
        async with aclosing(stream(tasks, VersionedSampler(), 4, units(size=2), ahead=1, batches=2, retries=1)) as s:
            return [await s.batch(), await s.batch()]

    first, second = asyncio.run(scenario())
    assert (indices(first.rollouts), indices(first.dropped)) == ([0, 1, 4, 5], [2, 3])
    assert (indices(second.rollouts), indices(second.dropped)) == ([6, 7, 10, 11], [8, 9])
    assert (first.units, second.units) == (3, 3)
    assert (first.retried, first.ends) == (2, {"submitted": 4, "error": 4})


def test_paused_means_that_no_rollout_runs_and_all_go_on_behind_it() -> None:
    sampler = VersionedSampler(lambda: 0.01)
    tasks = Tasks(lambda index: ScriptedEnvironment(steps=3))

    async def scenario() -> None:
        async with aclosing(stream(tasks, sampler, 6, ahead=1, batches=2, concurrency=2)) as s:
            await s.batch()
            await passes()
            assert sampler.running
            async with s.paused():
                before = len(tasks.started)
                assert not sampler.running
                await asyncio.sleep(0.01)
                assert not sampler.running
                assert len(tasks.started) == before < 12
            assert indices((await s.batch()).rollouts) == list(range(6, 12))

    asyncio.run(scenario())


def test_time_in_which_rollouts_ran() -> None:
    """Two rollouts of a second each at once are one second; nothing runs between batches without `ahead`."""
    tasks = Tasks(lambda index: ScriptedEnvironment(steps=1, seconds=0.05))

    async def scenario() -> None:
        async with aclosing(stream(tasks, VersionedSampler(), 2, ahead=0, batches=2)) as s:
            assert s.busy_seconds == 0
            await s.batch()
            first = s.busy_seconds
            assert first >= 0.05
            await asyncio.sleep(0.02)
            assert s.busy_seconds == first
            await s.batch()
            assert s.busy_seconds >= first + 0.05

    asyncio.run(scenario())


def test_when_everything_breaks_down_the_next_batch_says_so() -> None:
    """Also when it happens ahead of time: the batches before are whole."""
    tasks = Tasks(lambda index: broken() if index > 2 else quick())

    async def scenario() -> None:
        async with aclosing(stream(tasks, VersionedSampler(), 3, ahead=1)) as s:
            assert indices((await s.batch()).rollouts) == [0, 1, 2]
            await passes(400)
            with pytest.raises(CollectionError, match="OSError: gone"):
                await s.batch()

    asyncio.run(scenario())


@pytest.mark.parametrize("trouble", ["environment", "on_rollout"])
def test_what_is_no_trouble_of_a_rollout_comes_out(trouble: str) -> None:
    """A task family that cancels, and a disk that is full: no batch waits for ever."""

    def make(index: int) -> ScriptedEnvironment:
        if trouble == "environment" and index == 4:
            raise asyncio.CancelledError
        return quick()

    def fail(rollout: Rollout) -> None:
        if trouble == "on_rollout" and rollout.task_id == "4":
            raise OSError("disk full")

    async def scenario() -> None:
        async with aclosing(stream(Tasks(make), VersionedSampler(), 3, ahead=1, on_rollout=fail)) as s:
            await s.batch()
            await s.batch()

    with pytest.raises((RuntimeError, OSError), match=r"job4 was cancelled from within|disk full"):
        asyncio.run(asyncio.wait_for(scenario(), 10))


def test_closing_leaves_nothing_running() -> None:
    made: list[ScriptedEnvironment] = []

    def make(index: int) -> ScriptedEnvironment:
        made.append(ScriptedEnvironment(seconds=3600))
        return made[-1]

    async def scenario() -> None:
        s = stream(Tasks(make), VersionedSampler(), 3, ahead=2, concurrency=5)
        waiting = asyncio.create_task(s.batch())
        await passes()
        waiting.cancel()
        await s.aclose()
        await asyncio.gather(waiting, return_exceptions=True)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(scenario())
    assert [environment.closed for environment in made] == [1] * 5


def test_units_that_end_give_what_there_is() -> None:
    async def scenario() -> list[int]:
        async with aclosing(stream(Tasks(quick), VersionedSampler(), 3, units(4), ahead=1)) as s:
            return [len((await s.batch()).rollouts) for _ in range(3)]

    assert asyncio.run(scenario()) == [3, 1, 0]
