"""Many rollouts at once: bounded, retried, refilled, in order, and gone when cancelled."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count as integers
from typing import Any

import pytest
from rollout_stubs import ScriptedEnvironment, ScriptedSampler, chat_format, context, words

from compactionrl.config import ConfigError, LimitsConfig
from compactionrl.rollout.collect import Collected, CollectionError, Job, collect
from compactionrl.rollout.ledger import Rollout
from compactionrl.rollout.loop import RolloutSettings
from compactionrl.rollout.stream import MAX_BROKEN_UNITS, run_length


@dataclass
class Tasks:
    """A TaskSet whose task i makes the environment `make(i, attempt)`."""

    make: Callable[[int, int], Any]
    tried: Counter[int] = field(default_factory=Counter)
    made: list[Any] = field(default_factory=list)

    def size(self, split: str) -> int:
        return 10**6

    def task_id(self, split: str, index: int) -> str:
        return f"{split}-{index}"

    def environment(self, split: str, index: int) -> Any:
        self.tried[index] += 1
        self.made.append(self.make(index, self.tried[index]))
        return self.made[-1]


def good(index: int = 0, attempt: int = 1) -> ScriptedEnvironment:
    return ScriptedEnvironment(steps=1)


def broken(index: int = 0, attempt: int = 1) -> ScriptedEnvironment:
    return ScriptedEnvironment([OSError(f"task {index}")])


def too_long(index: int = 0, attempt: int = 1) -> ScriptedEnvironment:
    return ScriptedEnvironment(messages=[{"role": "user", "content": words(300)}])


def units(size: int = 1, n: int | None = None) -> Iterator[list[Job]]:
    for unit in integers() if n is None else range(n):
        yield [Job("train", index, f"job{index}", 100 + index) for index in range(unit * size, (unit + 1) * size)]


def run(
    tasks: Tasks, count: int, *, jobs: Iterator[list[Job]] | None = None, sampler: Any = None, **options: Any
) -> Collected:
    options = {"concurrency": 8, "retries": 1, **options}
    settings = RolloutSettings(options.pop("context", context()), LimitsConfig())
    sampler = sampler or ScriptedSampler(["w1"])
    return asyncio.run(collect(tasks, sampler, chat_format(), settings, jobs or units(), count, **options))


def ids(rollouts: list[Rollout]) -> list[str]:
    return [rollout.id for rollout in rollouts]


def test_count_rollouts_in_the_order_of_their_jobs() -> None:
    """Later jobs finish first: the first sleeps longest."""
    tasks = Tasks(lambda index, attempt: ScriptedEnvironment(steps=1, seconds=0.05 - 0.01 * index))
    collected = run(tasks, 5)
    assert ids(collected.rollouts) == ["job0", "job1", "job2", "job3", "job4"]
    assert [rollout.task_id for rollout in collected.rollouts] == [f"train-{i}" for i in range(5)]
    assert (collected.ends, collected.units, collected.retried) == ({"submitted": 5}, 5, 0)


def test_an_iterator_that_ends_gives_what_there_is() -> None:
    collected = run(Tasks(good), 10, jobs=units(n=3))
    assert (len(collected.rollouts), collected.units) == (3, 3)


def test_no_more_than_concurrency_rollouts_run_at_a_time() -> None:
    live, most = 0, []

    class Watched(ScriptedEnvironment):
        async def start(self) -> Any:
            nonlocal live
            live += 1
            most.append(live)
            return await super().start()

        async def close(self) -> None:
            nonlocal live
            live -= 1

    run(Tasks(lambda index, attempt: Watched(steps=2, seconds=0.002)), 12, jobs=units(size=3), concurrency=4)
    assert max(most) == 4
    assert live == 0


def test_a_rollout_that_broke_down_is_tried_again_with_another_random_stream() -> None:
    tasks = Tasks(lambda index, attempt: broken() if index == 1 and attempt < 3 else good())
    sampler = ScriptedSampler(["w1"])
    collected = run(tasks, 3, retries=2, sampler=sampler)
    assert ids(collected.rollouts) == ["job0", "job1-retry2", "job2"]
    assert (tasks.tried, collected.retried) == ({0: 1, 1: 3, 2: 1}, 2)
    assert collected.ends == {"submitted": 3, "error": 2}
    assert not collected.dropped
    assert len({request.seed for request in sampler.requests}) == 5


def test_a_unit_that_keeps_breaking_down_is_dropped_whole_and_refilled() -> None:
    tasks = Tasks(lambda index, attempt: broken(index) if index == 3 else good())
    seen: list[str] = []
    collected = run(tasks, 6, jobs=units(size=2), on_rollout=lambda rollout: seen.append(rollout.id))
    assert ids(collected.rollouts) == [f"job{i}" for i in (0, 1, 4, 5, 6, 7)]
    assert ids(collected.dropped) == ["job3-retry1"]
    assert collected.dropped[0].error == "OSError: task 3"
    assert collected.units == 4
    assert sorted(seen) == sorted(ids(collected.rollouts))
    assert collected.ends == {"submitted": 7, "error": 2}


def test_a_job_runs_under_its_own_settings_also_when_it_is_tried_again() -> None:
    """Job 0 has the collection's, job 1 a smaller window, job 2 a larger one that never compacts."""
    contexts = {1: context(budget=150, max_compactions=1), 2: context(budget=400, max_compactions=0)}

    def jobs() -> Iterator[list[Job]]:
        for index in range(3):
            own = contexts.get(index)
            settings = RolloutSettings(own, LimitsConfig()) if own else None
            yield [Job("train", index, f"job{index}", 100 + index, settings)]

    def make(index: int, attempt: int) -> ScriptedEnvironment:
        return broken() if attempt == 1 else ScriptedEnvironment([words(10)], steps=25)

    collected = run(Tasks(make), 3, jobs=jobs(), sampler=ScriptedSampler(["w1 w2"]))
    assert ids(collected.rollouts) == ["job0-retry1", "job1-retry1", "job2-retry1"]
    longest = [max(len(window) for window in rollout.windows) for rollout in collected.rollouts]
    assert longest[0] <= 200 < longest[2] <= 400
    assert longest[1] <= 150
    assert [rollout.compactions for rollout in collected.rollouts] == [3, 1, 0]
    # A step takes about 20 tokens: 25 fit into four windows of 200, not into two of 150 or one of 400.
    assert [rollout.end for rollout in collected.rollouts] == ["submitted", "budget", "budget"]


def test_an_environment_that_cannot_be_made_is_trouble_like_any_other() -> None:
    def make(index: int, attempt: int) -> ScriptedEnvironment:
        if index == 1 or (index == 2 and attempt == 1):
            raise OSError("no such image")
        return good()

    collected = run(Tasks(make), 3)
    assert ids(collected.rollouts) == ["job0", "job2-retry1", "job3"]
    assert [(r.id, r.error) for r in collected.dropped] == [("job1-retry1", "OSError: no such image")]
    assert collected.ends == {"submitted": 3, "error": 3}


def test_a_task_that_does_not_fit_is_not_tried_again() -> None:
    tasks = Tasks(lambda index, attempt: too_long() if index == 0 else good())
    collected = run(tasks, 2, retries=5)
    assert tasks.tried[0] == 1
    assert (ids(collected.rollouts), collected.retried) == (["job1", "job2"], 0)
    assert collected.ends == {"submitted": 2, "error": 1}


def test_when_everything_breaks_down_collecting_stops_and_says_why() -> None:
    tasks = Tasks(broken)
    with pytest.raises(CollectionError, match="OSError: task"):
        run(tasks, 4)
    assert len(tasks.tried) <= MAX_BROKEN_UNITS + 4


def test_tasks_that_break_down_at_once_do_not_stop_those_that_take_their_time() -> None:
    """Every other task does not fit: forty of them end before any other one has finished."""
    tasks = Tasks(lambda index, attempt: too_long() if index % 2 else ScriptedEnvironment(steps=1, seconds=0.05))
    collected = run(tasks, 80, concurrency=200)
    assert ids(collected.rollouts) == [f"job{2 * i}" for i in range(80)]
    assert len(collected.dropped) >= 79


def test_run_length_counts_neighbours_on_both_sides() -> None:
    assert run_length({1, 2, 3, 5, 6}, 2) == 3
    assert run_length({1, 2, 3, 5, 6}, 5) == 2
    assert run_length({4}, 4) == 1


def test_a_configuration_that_cannot_work_comes_out_as_it_is() -> None:
    with pytest.raises(ConfigError):
        run(Tasks(good), 3, context=context(threshold=30))


@pytest.mark.parametrize("trouble", ["cancelled", "on_rollout"])
def test_nothing_is_left_running(trouble: str) -> None:
    slow = [ScriptedEnvironment(seconds=3600) for _ in range(3)]
    tasks = Tasks(lambda index, attempt: good() if index == 0 else slow[index - 1])
    sampler = ScriptedSampler(["w1"])

    def fail(rollout: Rollout) -> None:
        if trouble == "on_rollout":
            raise RuntimeError("disk full")

    async def scenario() -> None:
        settings = RolloutSettings(context(), LimitsConfig())
        running = asyncio.create_task(
            collect(tasks, sampler, chat_format(), settings, units(), 4, concurrency=4, retries=0, on_rollout=fail)
        )
        await asyncio.sleep(0.03)
        running.cancel()
        with pytest.raises((asyncio.CancelledError, RuntimeError)):
            await running
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(scenario())
    assert [environment.closed for environment in tasks.made] == [1, 1, 1, 1]
    assert sorted(sampler.released) == ["job0", "job1", "job2", "job3"]
