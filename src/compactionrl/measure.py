"""From a configuration to measurements: builds what it names, shows progress on stderr."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from compactionrl import build
from compactionrl.agents import Agent, open_agent, open_policy, open_summariser, resolve, summariser_names
from compactionrl.config import Config, ConfigError
from compactionrl.evaluation.evaluate import OWN, Arm, Evaluation, make_arms, stream
from compactionrl.evaluation.modes import for_mode
from compactionrl.evaluation.progress import EvaluationProgress
from compactionrl.evaluation.usage import cost
from compactionrl.results_folder import ResultsFolder
from compactionrl.rollout.chat import ChatFormat
from compactionrl.rollout.ledger import Rollout
from compactionrl.rollout.loop import RolloutSettings, run_rollout
from compactionrl.samplers.protocol import Summariser, optional
from compactionrl.training.interrupt import Interrupt

__all__ = ["evaluate_into", "measure", "open_policy", "play"]


def measure(
    config: Config, folder: Path, *, modes: Sequence[str], n_tasks: int, label: str = ""
) -> dict[str, dict[str, Any]]:
    """Evaluate the checkpoint in `folder` on held-out tasks, once each: mode -> result."""
    chat, sampler = open_policy(config, folder)
    arms = make_arms(config, modes)
    evaluation = Evaluation(
        build.build_tasks(config, ["heldout"]), config, arms, n_tasks=n_tasks, seed=config.evaluation.seed
    )
    with EvaluationProgress(evaluation, label=label) as progress:
        ended = progress.ended_one
        asyncio.run(evaluation.run(sampler, chat, on_rollout=ended, on_broken=ended))
    return evaluation.results()


def evaluate_into(path: Path, config: Config) -> tuple[Path, int]:
    """Evaluate what `config` names, or go on with it, into a results folder: the report, and how many rollouts are missing.

    Every rollout is on disk when it has ended. Raises Interrupted after Ctrl-C or SIGTERM and CollectionError where rollouts
    only break down, both when the figures of what there is are written; ConfigError and SamplerError for what cannot work.
    """
    folder = ResultsFolder(path, config)
    config, settings = folder.config, folder.config.evaluation
    sources = summariser_names(settings.summarisers, settings.summariser_model)
    evaluation = Evaluation(
        build.build_tasks(config, ["heldout"]),
        config,
        make_arms(config, settings.modes, [*sources]),
        n_tasks=settings.final_tasks,
        seed=settings.seed,
        runs=settings.runs,
    )
    if folder.begun:
        with folder.rollouts() as file:
            file.recover(evaluation.keep)
    try:
        if evaluation.pending:
            with Interrupt() as interrupt:
                asyncio.run(interrupt.guard(run(evaluation, folder, sources)))
    finally:
        if folder.begun:
            folder.finish(record(evaluation, folder.recall(), config))
    return folder.report, len(evaluation.pending)


async def run(evaluation: Evaluation, folder: ResultsFolder, sources: dict[str, str]) -> None:
    config = await resolve(folder.config)
    agent = await open_agent(config, config.evaluation.modes)
    evaluation.check(agent.chat)
    others = {name: await open_summariser(config, source, agent) for name, source in sources.items() if name != OWN}
    samplers = {name: sampler for name, (sampler, _) in others.items()}
    longest = max(arm.context.budget for arm in evaluation.arms)
    async with started([agent.sampler, *samplers.values()], longest):
        folder.begin(config, about(agent, config, {name: described for name, (_, described) in others.items()}))
        with folder.rollouts() as file, EvaluationProgress(evaluation) as progress:

            def finished(rollout: Rollout) -> None:
                file.append(rollout)
                progress.ended_one(rollout)

            await evaluation.run(
                agent.sampler,
                agent.chat,
                summarisers=samplers,
                on_rollout=finished,
                on_broken=progress.ended_one,
            )


@asynccontextmanager
async def started(samplers: Iterable[Summariser], budget: int) -> AsyncIterator[None]:
    """Within, the samplers take requests of `budget` tokens. Raises SamplerError if one cannot."""
    samplers = list(samplers)
    try:
        for sampler in samplers:
            await optional(sampler, "start", budget)
        yield
    finally:
        for sampler in samplers:
            await optional(sampler, "close")


def about(agent: Agent, config: Config, summarisers: dict[str, str]) -> dict[str, Any]:
    """What only the servers know, for the report."""
    return {
        "agent": config.server.model if config.server.urls else Path(config.model.path).name,
        "sampler": agent.description,
        "exact": agent.exact,
        "summarisers": summarisers,
    }


def record(evaluation: Evaluation, known: dict[str, Any], config: Config) -> dict[str, Any]:
    """What `results.json` holds."""
    results = evaluation.results()
    prices = config.evaluation.prompt_price, config.evaluation.completion_price
    for arm in evaluation.arms:
        results[arm.name]["cost"] = cost(results[arm.name]["tokens"], *prices, own=arm.summariser == OWN)
    about = {
        **known,
        "tasks": config.environment.tasks,
        "n_tasks": evaluation.n_tasks,
        "runs": evaluation.runs,
        "budget": config.context.budget,
    }
    return {
        "about": about,
        "missing": len(evaluation.pending),
        "arms": results,
        "differences": [difference(evaluation, *pair) for pair in pairs(evaluation.arms)],
    }


def pairs(arms: Sequence[Arm]) -> list[tuple[Arm, Arm, bool]]:
    """What is compared: every arm with x1, also on the tasks that compacted, and every summariser with the policy's own."""
    by_name = {arm.name: arm for arm in arms}
    found = []
    if "x1" in by_name:
        for arm in arms:
            if arm.name != "x1":
                found += [(arm, by_name["x1"], False)]
                found += [(arm, by_name["x1"], True)] if arm.context.max_compactions else []
    found += [(arm, by_name[arm.mode], False) for arm in arms if arm.summariser != OWN and arm.mode in by_name]
    return found


def difference(evaluation: Evaluation, arm: Arm, other: Arm, compacted: bool) -> dict[str, Any]:
    names = {"arm": arm.name, "minus": other.name, "compacted": compacted}
    return {**names, **evaluation.difference(arm, other, compacted=compacted)}


def play(config: Config, *, mode: str, split: str, index: int) -> tuple[Rollout, ChatFormat]:
    """One rollout of one task, the same that an evaluation would give."""
    if split not in ("train", "heldout"):
        raise ConfigError(f"--split {split}: choose train or heldout")
    context = for_mode(config, mode)
    tasks = build.build_tasks(config)
    if not 0 <= index < tasks.size(split):
        raise ConfigError(f"--index {index}: the {split} split has the tasks 0 to {tasks.size(split) - 1}")

    async def one() -> tuple[Rollout, ChatFormat]:
        resolved = await resolve(config)
        agent = await open_agent(resolved, [mode])
        async with started([agent.sampler], context.budget):
            rollout = await run_rollout(
                tasks.environment(split, index),
                agent.sampler,
                agent.chat,
                RolloutSettings(context, config.limits, config.sampling.temperature, config.sampling.top_p),
                rollout_id=f"{mode}-{split}-{index}",
                task_id=tasks.task_id(split, index),
                seed=stream(config.evaluation.seed, index),
            )
        return rollout, agent.chat

    return asyncio.run(one())
