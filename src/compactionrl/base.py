"""A base from nothing: a small tokenizer and a policy trained on scripted demonstrations, saved as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from compactionrl import build
from compactionrl.config import Config, ConfigError
from compactionrl.models import save_policy
from compactionrl.rollout.chat import ChatFormat
from compactionrl.training.atomic import write_folder
from compactionrl.training.tokenizer import build_tokenizer
from compactionrl.training.warm_start import demonstrate, fit, new_policy


def make_base(config: Config, folder: Path) -> float:
    """Write policy and tokenizer into `folder`; returns the loss at the end. Progress goes to stderr.

    The same configuration gives the same base on the same machine, and `folder` is there complete or not at all. Raises
    ConfigError if it exists, if the task family does not say which words it needs (`texts`), or if the demonstrator cannot
    be made.
    """
    if folder.exists():
        raise ConfigError(f"{folder} exists: remove it, or choose another folder")
    warm, context = config.warm_start, config.context
    tasks: Any = build.build_tasks(config)
    if not hasattr(tasks, "texts"):
        raise ConfigError("environment.tasks: a warm start needs a task family with `texts`, all words of its tasks")
    requests = (context.summary_request, context.retry_request)
    tokenizer = build_tokenizer([*tasks.texts, *requests, context.resume_template, context.placeholder])
    chat = ChatFormat(tokenizer, config.model.renderer, config.model.renderer_options)
    options = {"forget": warm.forget, "seed": warm.seed, "summary_requests": requests}
    if warm.hurry:  # not every demonstrator can
        options["hurry"] = warm.hurry
    demonstrator = build.create("warm_start.demonstrator", warm.demonstrator, "warm_start", options, tasks, tokenizer)
    policy = new_policy(config, tokenizer).to(build.build_device(config))
    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()]
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task(f"playing {warm.demonstrations} demonstrations", total=None)
        rollouts = demonstrate(config, tasks, chat, demonstrator)

        def updated(done: int, total: int, loss: float) -> None:
            progress.update(bar, description=f"warm start, loss {loss:.3f}", completed=done, total=total)

        loss = fit(policy, rollouts, config, updated)

    def fill(partial: Path) -> None:
        save_policy(policy, partial)
        tokenizer.save_pretrained(partial)

    write_folder(folder, fill)
    return loss


def prepare(config: Config) -> None:
    """Make the run's own base where `model.path` is 'warm-start' and it has none yet."""
    folder = Path(config.run.folder) / "base"
    if config.model.path == "warm-start" and not (folder / "config.json").exists():
        make_base(config, folder)
