"""Measure a policy on held-out tasks in the modes x1, x4 and long. No torch: any Sampler can be measured."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from compactionrl.config import Config, ConfigError
from compactionrl.environments.protocol import TaskSet
from compactionrl.evaluation.behaviour import SOLVED, behaviour
from compactionrl.evaluation.modes import for_mode
from compactionrl.rollout.chat import ChatFormat
from compactionrl.rollout.collect import Job, collect
from compactionrl.rollout.ledger import Rollout
from compactionrl.rollout.loop import RolloutSettings
from compactionrl.samplers.protocol import Sampler


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
    summariser: Sampler | None = None,
    on_rollout: Callable[[Rollout], None] | None = None,
) -> dict[str, dict[str, Any]]:
    """One rollout of each of the first `n_tasks` tasks of `split` (all, if there are fewer), in every mode: mode -> result.

    A result holds `behaviour` of the finished rollouts, `outcomes` task by task, and what identifies the measurement.
    Rollouts that broke down are tried again, then left out of every figure and counted: `errors`, by cause in
    `error_causes`. Tasks and random streams depend on `seed` alone and are the same in every mode and for every policy.
    Rollout ids begin with the mode.
    """
    size = tasks.size(split)
    if not size:
        raise ConfigError(f"environment: there is no task in {split!r} to evaluate on")
    indices = range(min(n_tasks, size))
    results: dict[str, dict[str, Any]] = {}
    # All modes first: an impossible one is refused before anything is sampled.
    contexts = {mode: for_mode(config, mode) for mode in modes}
    for mode, context in contexts.items():
        settings = RolloutSettings(context, config.limits, config.sampling.temperature, config.sampling.top_p)
        jobs = [Job(split, index, f"{mode}-{split}-{index}", stream(seed, index)) for index in indices]
        collected = await collect(
            tasks,
            sampler,
            chat,
            settings,
            iter([[job] for job in jobs]),
            len(jobs),
            concurrency=config.sampling.concurrency,
            retries=config.train.retries,
            summariser=summariser,
            on_rollout=on_rollout,
        )
        results[mode] = {
            **behaviour(collected.rollouts),
            "outcomes": outcomes(jobs, collected.rollouts),
            "errors": len(collected.dropped),
            "error_causes": dict(Counter(rollout.error or "unknown" for rollout in collected.dropped).most_common()),
            "retried": collected.retried,
            "budget": context.budget,
            "max_compactions": context.max_compactions,
            "prompts_hash": context.prompts_hash,
            "seed": seed,
        }
    return results


def outcomes(jobs: Sequence[Job], rollouts: Sequence[Rollout]) -> str:
    """One character per task, in order: 1 solved, 0 not solved, - broke down."""
    solved = {rollout.id.partition("-retry")[0]: "01"[rollout.reward >= SOLVED] for rollout in rollouts}
    return "".join(solved.get(job.rollout_id, "-") for job in jobs)


def stream(seed: int, index: int) -> int:
    """The random stream of a task: far from its neighbours', and from those of its retries."""
    return int.from_bytes(hashlib.blake2b(f"evaluation:{seed}:{index}".encode(), digest_size=8).digest()) >> 1
