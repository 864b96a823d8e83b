"""One rollout to run, with the tries that it may take."""

from __future__ import annotations

from dataclasses import dataclass

from compactionrl.environments.protocol import TaskSet
from compactionrl.rollout.chat import ChatFormat
from compactionrl.rollout.ledger import Rollout
from compactionrl.rollout.loop import RolloutSettings, describe, random_stream, run_rollout
from compactionrl.samplers.protocol import Sampler, Summariser


@dataclass(frozen=True)
class Job:
    """One rollout to run: a task of a split, the seed of its random streams, and its own settings if it has some."""

    split: str
    index: int
    rollout_id: str
    seed: int
    settings: RolloutSettings | None = None


async def run_job(
    job: Job,
    tasks: TaskSet,
    sampler: Sampler,
    chat: ChatFormat,
    settings: RolloutSettings,
    *,
    retries: int,
    summariser: Summariser | None = None,
) -> tuple[Rollout, int]:
    """The rollout, and how many tries broke down before it. The last try is returned even if it broke down, too."""
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
            return rollout, attempt
    raise AssertionError("unreachable: the last attempt returns")
