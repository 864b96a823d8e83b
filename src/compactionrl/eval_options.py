"""What the options of `compactionrl eval` mean: keys of the configuration, which alone decide what happens."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

from compactionrl.config import ConfigError, ContextConfig

FAMILY = {
    name: f"compactionrl.environments.{name}:{name.capitalize()}Tasks" for name in ("notes", "logbook", "deliveries")
}
"""The embedded families of tasks."""
SIZE = re.compile(r"([1-9]\d*)([kKmM]?)")
UNIT = {"": 1, "k": 1024, "m": 1024**2}
FRAME = 512
"""Tokens that a framed summary request takes, with room for the calls that it leaves unanswered."""
TEXT_FRAME = 1024
"""The same as windows of text count it."""
APIS = ("auto", "vllm", "sglang", "chat")


def eval_keys(
    file: Path | None,
    overrides: dict[str, Any],
    *,
    checkpoint: Path | None = None,
    tasks: str | None = None,
    limit: int | None = None,
    model: str | None = None,
    url: str | None = None,
    api: str | None = None,
    tokenizer: Path | None = None,
    budget: str | None = None,
    modes: str | None = None,
    runs: int | None = None,
    summariser: str | None = None,
    summariser_model: str | None = None,
    concurrency: int | None = None,
) -> dict[str, Any]:
    """The overrides and what the options stand for, which counts more. `file` is read for what it leaves open alone.

    In the order in which they are to be applied.
    """
    given = read(file)
    served = bool(url) or bool(given.get("server", {}).get("urls")) or bool(overrides.get("server.urls"))
    if (model or api) and not served:
        raise ConfigError(
            "--model and --api are about a served model: give its --url. A local folder goes to --checkpoint"
        )
    if api and api not in APIS:
        raise ConfigError(f"--api {api}: choose {', '.join(APIS)}")
    if checkpoint and (tokenizer or url):
        raise ConfigError("--checkpoint is sampled from in this process, --url elsewhere: choose one")
    keys: dict[str, Any] = {
        "environment.tasks": family(tasks) if tasks else None,
        "evaluation.final_tasks": limit,
        "server.model": model,
        "server.urls": [base_url(each) for each in url.split(",")] if url else None,
        "sampling.sampler": api or ("auto" if url else None),
        "model.path": str(tokenizer or policy(checkpoint)) if tokenizer or checkpoint else None,
        "evaluation.modes": modes.split(",") if modes else None,
        "evaluation.runs": runs,
        "evaluation.summarisers": summariser.split(",") if summariser else None,
        "evaluation.summariser_model": summariser_model,
        "sampling.concurrency": concurrency,
    }
    in_file = str(given.get("environment", {}).get("tasks", ""))
    if tasks and keys["environment.tasks"].partition(":")[2] == in_file.partition(":")[2]:
        keys["environment.tasks"] = in_file
    first: dict[str, Any] = {}
    if budget:
        keys["context.budget"] = size(budget)
        has_tokens = tokenizer or "path" in given.get("model", {}) or "model.path" in overrides
        frame = TEXT_FRAME if api == "chat" or (served and not has_tokens) else FRAME
        follow = sizes(size(budget), frame)
        first = {f"context.{key}": n for key, n in follow.items() if key not in given.get("context", {})}
    if tokenizer and "renderer" not in given.get("model", {}):
        first["model.renderer"] = "auto"  # what the tokenizer's own template renders as, unless someone knows better
    if tasks and keys["environment.tasks"] != in_file:
        first["environment.options"] = {}  # those of the file are another family's
    return first | overrides | {key: value for key, value in keys.items() if value is not None}


def sizes(budget: int, frame: int = FRAME) -> dict[str, int]:
    """The other sizes of a context of `budget` tokens: the defaults from 64k on, in proportion to them below.

    But a threshold always leaves room for a summary and its framed request of at most `frame` tokens.
    """
    default = {key: field.default for key, field in ContextConfig.model_fields.items()}
    if budget >= default["budget"]:
        return {}

    def share(key: str) -> int:
        return max(default[key] * budget // default["budget"], 1)

    summary, least = share("summary_tokens"), max(share("min_response"), 16)
    return {
        "summary_tokens": summary,
        "min_response": least,
        "response_tokens": max(share("response_tokens"), least),
        "threshold": max(share("threshold"), summary + least + frame),
    }


def size(text: str) -> int:
    """Tokens: 65536 or 64k."""
    match = SIZE.fullmatch(text)
    if match is None:
        raise ConfigError(f"--budget {text}: give a number of tokens, such as 65536 or 64k")
    return int(match[1]) * UNIT[match[2].lower()]


def family(name: str) -> str:
    if ":" not in name and name not in FAMILY:
        raise ConfigError(f"--tasks {name}: choose {', '.join(FAMILY)}, or the import path module:Class of your own")
    return FAMILY.get(name, name)


def policy(checkpoint: Path | None) -> Path | None:
    """Where a checkpoint's policy really lies: a link such as `best` may point elsewhere tomorrow."""
    if checkpoint is None:
        return None
    real = checkpoint.resolve()
    return real / "policy" if (real / "policy").is_dir() else real


def base_url(url: str) -> str:
    """The address without the /v1 that OpenAI-style clients want; ours is added where it belongs."""
    return url.strip().rstrip("/").removesuffix("/v1")


def read(file: Path | None) -> dict[str, Any]:
    """The sections of a file; whatever is wrong with it is said where it is loaded."""
    try:
        data = tomllib.loads(file.read_text()) if file else {}
    except (OSError, ValueError):
        return {}
    return {name: section for name, section in data.items() if isinstance(section, dict)}
