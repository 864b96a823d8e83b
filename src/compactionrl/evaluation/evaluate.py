"""Measure a policy on held-out tasks in several ways, each task several times. No torch: any Sampler can be measured."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from compactionrl.config import Config, ConfigError, ContextConfig
from compactionrl.environments.protocol import TaskSet
from compactionrl.evaluation.behaviour import Digest, describe, digest
from compactionrl.evaluation.modes import for_mode
from compactionrl.evaluation.statistics import Difference, paired_difference
from compactionrl.evaluation.usage import total
from compactionrl.rollout.budget import ContextBudget
from compactionrl.rollout.chat import ChatFormat
from compactionrl.rollout.job import Job, run_job
from compactionrl.rollout.ledger import Rollout
from compactionrl.rollout.loop import RolloutSettings
from compactionrl.rollout.stream import MAX_BROKEN_UNITS, CollectionError, run_length
from compactionrl.samplers.protocol import Sampler, Summariser

RETRY = re.compile(r"-retry\d+$")
OWN = "own"
"""The policy as its own summariser."""


@dataclass(frozen=True)
class Arm:
    """One way to run the policy: a mode, and who writes the summaries, by name. `name` is the mode, or mode+summariser."""

    name: str
    mode: str
    context: ContextConfig
    summariser: str = OWN


@dataclass(frozen=True)
class Trial:
    """One rollout to run: try `run` (from 1) of a task in an arm."""

    arm: Arm
    run: int
    index: int
    job: Job


@dataclass
class Tally:
    """What has become of an arm's trials."""

    finished: dict[str, Digest] = field(default_factory=dict)
    broken: dict[int, Rollout] = field(default_factory=dict)
    """By number within the arm."""
    retried: int = 0

    @property
    def ended(self) -> int:
        return len(self.finished) + len(self.broken)

    @property
    def state(self) -> str:
        """For people who wait."""
        solved = sum(rollout.solved for rollout in self.finished.values())
        return f"{solved} solved" + (f", {len(self.broken)} broke down" if self.broken else "")


def make_arms(config: Config, modes: Sequence[str], summarisers: Sequence[str] = (OWN,)) -> list[Arm]:
    """Every mode; those that compact with each of the summarisers. Raises ConfigError for an impossible mode."""
    arms = []
    for mode in dict.fromkeys(modes):
        context = for_mode(config, mode)
        for name in summarisers if context.max_compactions else [OWN]:
            arms.append(Arm(mode if name == OWN else f"{mode}+{name}", mode, context, name))
    return arms


class Evaluation:
    """`runs` rollouts of each of the first `n_tasks` tasks of `split` (all, if there are fewer), in every arm.

    Rollouts that broke down are tried again, then left out of every figure and counted. Tasks and random streams depend on
    `seed` alone and are the same in every arm and for every policy. A rollout's id begins with its arm's name.
    """

    def __init__(
        self,
        tasks: TaskSet,
        config: Config,
        arms: Sequence[Arm],
        *,
        n_tasks: int,
        seed: int,
        runs: int = 1,
        split: str = "heldout",
    ) -> None:
        if not tasks.size(split):
            raise ConfigError(f"environment: there is no task in {split!r} to evaluate on")
        self.tasks, self.config, self.arms, self.seed, self.runs = tasks, config, arms, seed, runs
        self.n_tasks = min(n_tasks, tasks.size(split))
        self.tallies = {arm.name: Tally() for arm in arms}
        # Task by task, not arm by arm: what a stopped evaluation has is paired.
        self.trials = {
            trial.job.rollout_id: trial
            for run in range(1, runs + 1)
            for index in range(self.n_tasks)
            for trial in (self._trial(arm, run, index, split) for arm in arms)
        }

    def _trial(self, arm: Arm, run: int, index: int, split: str) -> Trial:
        name = f"{arm.name}-{split}-{index}" + (f"-run{run}" if run > 1 else "")
        return Trial(arm, run, index, Job(split, index, name, stream(self.seed, index, run)))

    def keep(self, rollout: Rollout) -> None:
        """Count a rollout that an earlier evaluation, which was stopped, has finished; others' are passed over.

        Raises ConfigError if it was of another task.
        """
        trial = self.trials.get(RETRY.sub("", rollout.id))
        if trial is None:
            return
        task_id = self.tasks.task_id(trial.job.split, trial.index)
        if rollout.task_id != task_id:
            raise ConfigError(
                f"{rollout.id} was of the task {rollout.task_id!r}, which is now {task_id!r}: environment.tasks has changed"
            )
        self.tallies[trial.arm.name].finished[trial.job.rollout_id] = digest(rollout)

    def check(self, chat: ChatFormat) -> None:
        """Raise ConfigError for an arm whose context leaves no room for a compaction."""
        tools, first = None, next(iter(self.trials.values())).job
        with suppress(Exception):  # a task that cannot be made breaks down when its turn comes, and is counted
            tools = getattr(self.tasks.environment(first.split, first.index), "tools", None)
        for arm in self.arms:
            ContextBudget.measure(arm.context, chat, tools)

    @property
    def pending(self) -> list[Trial]:
        return [trial for name, trial in self.trials.items() if name not in self.tallies[trial.arm.name].finished]

    @property
    def broken(self) -> int:
        """Rollouts that broke down, however often they were tried."""
        return sum(len(tally.broken) for tally in self.tallies.values())

    async def run(
        self,
        sampler: Sampler,
        chat: ChatFormat,
        *,
        summarisers: Mapping[str, Summariser] | None = None,
        on_rollout: Callable[[Rollout], None] | None = None,
        on_broken: Callable[[Rollout], None] | None = None,
    ) -> None:
        """Run what is pending, `sampling.concurrency` rollouts at a time; each is given to a callback when it has ended.

        `summarisers`: those of the arms, by name, but for the policy's own. Raises CollectionError when an arm's rollouts
        only break down.
        """
        waiting = iter(self.pending)
        others = summarisers or {}

        async def work() -> None:
            for trial in waiting:
                rollout, retried = await run_job(
                    trial.job,
                    self.tasks,
                    sampler,
                    chat,
                    self._settings(trial.arm),
                    retries=self.config.train.retries,
                    summariser=None if trial.arm.summariser == OWN else others[trial.arm.summariser],
                )
                self._count(trial, rollout, retried)
                callback = on_broken if rollout.end == "error" else on_rollout
                if callback:
                    callback(rollout)
                self._check(trial)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(self.config.sampling.concurrency, len(self.trials))):
                    group.create_task(work())
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    def _settings(self, arm: Arm) -> RolloutSettings:
        sampling = self.config.sampling
        return RolloutSettings(arm.context, self.config.limits, sampling.temperature, sampling.top_p)

    def _number(self, trial: Trial) -> int:
        """Of a trial within its arm."""
        return (trial.run - 1) * self.n_tasks + trial.index

    def _count(self, trial: Trial, rollout: Rollout, retried: int) -> None:
        tally = self.tallies[trial.arm.name]
        tally.retried += retried
        if rollout.end == "error":
            tally.broken[self._number(trial)] = Rollout(rollout.id, rollout.task_id, error=rollout.error)
        else:
            tally.finished[trial.job.rollout_id] = digest(rollout)

    def _check(self, trial: Trial) -> None:
        broken, number = self.tallies[trial.arm.name].broken, self._number(trial)
        if number in broken and run_length(set(broken), number) >= MAX_BROKEN_UNITS:
            raise CollectionError(f"{MAX_BROKEN_UNITS} tasks in a row broke down; the last: {broken[number].error}")

    def results(self) -> dict[str, dict[str, Any]]:
        """Arm -> result: what the finished rollouts did, and what identifies the measurement.

        `outcomes`: one character per task, in order: 1 solved, 0 not solved, - broke down; a space between two runs.
        """
        return {arm.name: self._result(arm) for arm in self.arms}

    def _result(self, arm: Arm) -> dict[str, Any]:
        tally = self.tallies[arm.name]
        finished = [digested for _, digested in self._finished(arm)]
        causes = Counter(rollout.error or "unknown" for rollout in tally.broken.values())
        return {
            **describe(finished),
            "outcomes": self._outcomes(arm),
            "errors": len(tally.broken),
            "error_causes": dict(causes.most_common()),
            "retried": tally.retried,
            "tokens": {
                "responses": total(each.responses for each in finished)._asdict(),
                "summaries": total(each.summaries for each in finished)._asdict(),
            },
            "budget": arm.context.budget,
            "max_compactions": arm.context.max_compactions,
            "prompts_hash": arm.context.prompts_hash,
            "seed": self.seed,
        }

    def _trials(self, arm: Arm) -> Iterator[tuple[Trial, Digest | None]]:
        finished = self.tallies[arm.name].finished
        for name, trial in self.trials.items():
            if trial.arm is arm:
                yield trial, finished.get(name)

    def _finished(self, arm: Arm) -> Iterator[tuple[Trial, Digest]]:
        for trial, digested in self._trials(arm):
            if digested is not None:
                yield trial, digested

    def _outcomes(self, arm: Arm) -> str:
        runs: list[str] = [""] * self.runs
        for trial, digested in self._trials(arm):
            runs[trial.run - 1] += "-" if digested is None else "01"[digested.solved]
        return " ".join(runs)

    def difference(self, arm: Arm, other: Arm, *, compacted: bool = False) -> Difference:
        """Pass@1 of `arm` minus that of `other`, task by task, over the tasks that both finished.

        `compacted`: only over those on which `arm` compacted, in any run.
        """
        mine, theirs = self._by_task(arm), self._by_task(other)
        tasks = [task for task in mine if task in theirs]
        if compacted:
            tasks = [task for task in tasks if any(tried.compactions for tried in mine[task])]
        return paired_difference([rate(mine[task]) - rate(theirs[task]) for task in tasks])

    def _by_task(self, arm: Arm) -> dict[int, list[Digest]]:
        tasks: dict[int, list[Digest]] = {}
        for trial, digested in self._finished(arm):
            tasks.setdefault(trial.index, []).append(digested)
        return tasks


async def evaluate(
    tasks: TaskSet,
    sampler: Sampler,
    chat: ChatFormat,
    config: Config,
    *,
    modes: Sequence[str],
    n_tasks: int,
    split: str = "heldout",
    seed: int,
    summariser: Summariser | None = None,
    on_rollout: Callable[[Rollout], None] | None = None,
) -> dict[str, dict[str, Any]]:
    """One rollout of each task in every mode, all summaries by `summariser` if there is one: mode -> result.

    See `Evaluation`.
    """
    # All modes first: an impossible one is refused before anything is sampled.
    other = "other" if summariser else OWN
    arms = [Arm(mode, mode, for_mode(config, mode), other) for mode in modes]
    evaluation = Evaluation(tasks, config, arms, n_tasks=n_tasks, seed=seed, split=split)
    await evaluation.run(sampler, chat, summarisers={other: summariser} if summariser else None, on_rollout=on_rollout)
    return evaluation.results()


def rate(tries: Sequence[Digest]) -> float:
    return fmean(tried.solved for tried in tries)


def stream(seed: int, index: int, run: int = 1) -> int:
    """The random stream of a task in a run: far from its neighbours', and from those of its retries."""
    key = f"evaluation:{seed}:{index}" + (f":{run}" if run > 1 else "")
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest()) >> 1
