"""From a configuration and a checkpoint to measurements: builds what they name, shows progress on stderr."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from compactionrl import build
from compactionrl.config import Config, ConfigError
from compactionrl.evaluation.evaluate import evaluate, stream
from compactionrl.evaluation.modes import for_mode
from compactionrl.models import load_policy
from compactionrl.rollout.chat import ChatFormat
from compactionrl.rollout.ledger import Rollout
from compactionrl.rollout.loop import RolloutSettings, run_rollout
from compactionrl.samplers.protocol import Sampler


def measure(
    config: Config, folder: Path, *, modes: Sequence[str], n_tasks: int, summariser: Path | None = None, label: str = ""
) -> dict[str, dict[str, Any]]:
    """Evaluate the checkpoint in `folder` on held-out tasks: mode -> result. `summariser`: who writes the summaries instead."""
    chat, sampler = open_policy(config, folder)
    summaries = open_summariser(config, summariser, chat) if summariser else None
    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()]
    with Progress(*columns, console=Console(stderr=True)) as progress:
        tasks = build.build_tasks(config)
        n = min(n_tasks, tasks.size("heldout"))
        bars = {mode: progress.add_task(f"{label} {mode}".strip(), total=n) for mode in modes}

        def finished(rollout: Rollout) -> None:
            progress.advance(bars[rollout.id.partition("-")[0]])

        work = evaluate(
            tasks,
            sampler,
            chat,
            config,
            modes=modes,
            n_tasks=n_tasks,
            seed=config.evaluation.seed,
            summariser=summaries,
            on_rollout=finished,
        )
        return asyncio.run(work)


def play(config: Config, folder: Path, *, mode: str, split: str, index: int) -> tuple[Rollout, ChatFormat]:
    """One rollout of one task, the same that an evaluation would give."""
    if split not in ("train", "heldout"):
        raise ConfigError(f"--split {split}: choose train or heldout")
    context = for_mode(config, mode)
    tasks = build.build_tasks(config)
    if not 0 <= index < tasks.size(split):
        raise ConfigError(f"--index {index}: the {split} split has the tasks 0 to {tasks.size(split) - 1}")
    chat, sampler = open_policy(config, folder)
    rollout = run_rollout(
        tasks.environment(split, index),
        sampler,
        chat,
        RolloutSettings(context, config.limits, config.sampling.temperature, config.sampling.top_p),
        rollout_id=f"{mode}-{split}-{index}",
        task_id=tasks.task_id(split, index),
        seed=stream(config.evaluation.seed, index),
    )
    return asyncio.run(rollout), chat


def open_policy(config: Config, folder: Path) -> tuple[ChatFormat, Sampler]:
    """The chat format and a sampler of the policy in `folder`: a model folder, or a checkpoint that training wrote."""
    folder = folder / "policy" if (folder / "policy").is_dir() else folder
    if isinstance(config.run.threads, int):
        torch.set_num_threads(config.run.threads)
    try:
        policy = load_policy(folder, device=build.build_device(config))
    except (OSError, ValueError) as error:
        raise ConfigError(f"no policy can be loaded from {folder}: {error}") from error
    return build.build_chat(config, folder), build.build_sampler(config, policy)


def open_summariser(config: Config, folder: Path, chat: ChatFormat) -> Sampler:
    """Another policy, to write the summaries. It must know the same tokens."""
    other, sampler = open_policy(config, folder)
    if other.tokenizer.base.get_vocab() != chat.tokenizer.base.get_vocab():
        raise ConfigError(
            f"the summariser in {folder} has another tokenizer than the policy: tokens go from one to the other"
        )
    return sampler
