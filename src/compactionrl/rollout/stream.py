"""Rollouts as an unending stream of batches, which may run ahead of the training that consumes them."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from itertools import count as integers

from compactionrl.environments.protocol import TaskSet
from compactionrl.rollout.chat import ChatFormat
from compactionrl.rollout.job import Job, run_job
from compactionrl.rollout.ledger import Rollout
from compactionrl.rollout.loop import RolloutSettings
from compactionrl.samplers.protocol import Sampler, Summariser

MAX_BROKEN_UNITS = 16
"""Neighbouring units that all had to be dropped stop a collection: something is broken for good."""


class CollectionError(RuntimeError):
    """Rollouts keep breaking down for reasons outside the policy."""


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

    def __repr__(self) -> str:
        return f"<Collected: {len(self.rollouts)} rollouts, {len(self.dropped)} dropped, of {self.units} units>"

    def add(self, unit: Unit) -> None:
        self.units += 1
        self.retried += unit.retried
        self.ends.update(rollout.end for rollout in unit.rollouts)
        if unit.retried:
            self.ends["error"] += unit.retried
        if unit.broken:
            self.dropped += unit.broken
        else:
            self.rollouts += unit.rollouts


@dataclass(eq=False)
class Unit:
    """The rollouts of one group, once they have ended; if one of them broke down, the unit is dropped."""

    number: int
    jobs: Sequence[Job]
    rollouts: list[Rollout] = field(default_factory=list)
    retried: int = 0

    @property
    def ended(self) -> bool:
        return bool(self.rollouts)

    @property
    def broken(self) -> list[Rollout]:
        return [rollout for rollout in self.rollouts if rollout.end == "error"]

    @property
    def size(self) -> int:
        """Rollouts that it has, or will have, for a batch."""
        return 0 if self.broken else len(self.jobs)


class Queue:
    """Units in their order, counted: those that are expected to make up the next batch of `count` rollouts, then all others."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.expected = 0
        """Rollouts that all units have, or will have."""
        self.ready = 0
        """Rollouts of the next batch that have ended."""
        self._next: deque[Unit] = deque()
        self._later: deque[Unit] = deque()
        self._due = 0

    @property
    def full(self) -> bool:
        return self._due >= self.count

    @property
    def ended(self) -> bool:
        """Whether every unit of the next batch has ended."""
        return self.ready == self._due

    def add(self, unit: Unit) -> None:
        self.expected += unit.size
        self._later.append(unit)
        self._fill()

    def settle(self, unit: Unit) -> None:
        """`unit` has ended. If it broke down, the next batch takes a later one instead."""
        lost = len(unit.jobs) - unit.size
        self.expected -= lost
        if unit.number <= self._next[-1].number:
            self.ready += unit.size
            self._due -= lost
            self._fill()

    def take(self) -> Collected:
        """The next batch, and with it the units behind it that broke down already."""
        batch = Collected()
        while self._later and self._later[0].broken:
            self._next.append(self._later.popleft())
        for unit in self._next:
            batch.add(unit)
        self.expected -= self._due
        self._next.clear()
        self._due = self.ready = 0
        self._fill()
        return batch

    def _fill(self) -> None:
        while self._later and not self.full:
            unit = self._later.popleft()
            self._next.append(unit)
            self._due += unit.size
            self.ready += unit.size * unit.ended


class Stream:
    """Batches of `count` rollouts, of units in the order in which they started; at most `batches` of them.

    A unit that is expected to fall into batch b (counted from 0) starts only when batch b - `ahead` is being asked for,
    which says that what was learned from all batches before is in the sampler. When a unit is dropped, later ones move
    up and a new one is started behind them: a unit can only come into an earlier batch than expected. So every token of
    batch b is sampled after at least b - `ahead` updates: it is never older than `ahead` updates when it is trained, by
    construction. Nothing is dropped for its age, none is overtaken for its length, and the rollouts of the batches ahead run
    while the last ones of this batch finish, and while it is trained. With `ahead` 0, no rollout runs between two batches.

    At most `concurrency` rollouts run at a time, those of earlier units first. One that breaks down is tried again up to
    `retries` times; if it still does, its whole unit is dropped and counted in the batch that it would have been in.
    `on_rollout` is called with each rollout of a unit that is not dropped, when the unit ends. `sampler` may be replaced; new
    rollouts take the new one. Close it with `aclose`.
    """

    def __init__(
        self,
        tasks: TaskSet,
        sampler: Sampler,
        chat: ChatFormat,
        settings: RolloutSettings,
        units: Iterator[list[Job]],
        count: int,
        *,
        concurrency: int,
        retries: int,
        batches: int = 1,
        ahead: int = 0,
        summariser: Summariser | None = None,
        on_rollout: Callable[[Rollout], None] | None = None,
    ) -> None:
        self.tasks, self.sampler, self.chat, self.settings = tasks, sampler, chat, settings
        self.ahead, self.batches = ahead, batches
        self.retries, self.summariser, self.on_rollout = retries, summariser, on_rollout
        self._numbered = enumerate(units)
        self._exhausted = False
        self._queue = Queue(count)
        self._tasks: set[asyncio.Task[None]] = set()
        self._broken: set[int] = set()
        self._failure: Exception | None = None
        self._slots = asyncio.Semaphore(concurrency)
        self._open = asyncio.Event()
        self._open.set()
        self._changed = asyncio.Event()
        self._running = 0
        self._busy = 0.0

    async def batch(self) -> Collected:
        """The next batch; it has fewer rollouts than `count` only if there are no more units.

        Raises CollectionError when units only break down, and whatever makes a rollout impossible to run at all.
        """
        self._fill(self.ahead + 1)
        while not (self._queue.ended and (self._queue.full or self._exhausted)):
            await self._wait()
        self.batches -= 1
        batch = self._queue.take()
        self._fill(self.ahead)
        return batch

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """Within, no rollout runs: those that do come to their end first, and no other starts."""
        self._open.clear()
        try:
            while self._running:
                await self._wait()
            yield
        finally:
            self._open.set()

    async def aclose(self) -> None:
        """Give up what is running."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def ready(self) -> int:
        """Rollouts of the next batch that have ended."""
        return self._queue.ready

    @property
    def busy_seconds(self) -> float:
        """For how long at least one rollout has been running, in all."""
        return self._busy + (time.perf_counter() if self._running else 0.0)

    def _fill(self, batches: int) -> None:
        """Start units until so many batches, but none beyond the last one, can be expected from the queue."""
        self._allowed = self._queue.count * min(batches, self.batches)
        self._refill()

    def _refill(self) -> None:
        while self._queue.expected < self._allowed and not self._exhausted:
            number, jobs = next(self._numbered, (0, None))
            if jobs is None:
                self._exhausted = True
                break
            unit = Unit(number, jobs)
            self._queue.add(unit)
            task = asyncio.create_task(self._run_unit(unit))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _wait(self) -> None:
        """Until something has changed. Raises what stopped the stream."""
        if self._failure is not None:
            raise self._failure
        self._changed.clear()
        await self._changed.wait()
        if self._failure is not None:
            raise self._failure

    async def _run_unit(self, unit: Unit) -> None:
        """Never raises: what is no rollout's trouble, but a configuration that cannot work or a bug, stops the stream."""
        try:
            async with asyncio.TaskGroup() as group:
                running = [group.create_task(self._run(job)) for job in unit.jobs]
            unit.rollouts = [task.result()[0] for task in running]
            unit.retried = sum(task.result()[1] for task in running)
            self._queue.settle(unit)
            if unit.broken:
                self._check_neighbours(unit)
            elif self.on_rollout:
                for rollout in unit.rollouts:
                    self.on_rollout(rollout)
            self._refill()
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            self._failure = self._failure or RuntimeError(
                f"the task {unit.jobs[0].rollout_id} was cancelled from within"
            )
        except ExceptionGroup as errors:
            self._failure = self._failure or errors.exceptions[0]
        except Exception as error:
            self._failure = self._failure or error
        finally:
            self._changed.set()

    async def _run(self, job: Job) -> tuple[Rollout, int]:
        async with self._slots:
            await self._open.wait()
            with self._counted():
                return await run_job(
                    job,
                    self.tasks,
                    self.sampler,
                    self.chat,
                    self.settings,
                    retries=self.retries,
                    summariser=self.summariser,
                )

    @contextmanager
    def _counted(self) -> Iterator[None]:
        if not self._running:
            self._busy -= time.perf_counter()
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            if not self._running:
                self._busy += time.perf_counter()
            self._changed.set()

    def _check_neighbours(self, unit: Unit) -> None:
        self._broken.add(unit.number)
        if run_length(self._broken, unit.number) >= MAX_BROKEN_UNITS:
            raise CollectionError(f"{MAX_BROKEN_UNITS} tasks in a row broke down; the last: {unit.broken[-1].error}")


def run_length(numbers: set[int], number: int) -> int:
    """How many consecutive numbers around `number` are in the set. (Broken units end first: their order says nothing.)"""
    before = next(i for i in integers(1) if number - i not in numbers)
    after = next(i for i in integers(1) if number + i not in numbers)
    return before + after - 1
