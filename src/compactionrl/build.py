"""From the configuration to the objects that it names. Whatever is heavy is imported by the function that needs it."""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compactionrl.config import Config, ConfigError
from compactionrl.environments.protocol import TaskSet
from compactionrl.evaluation.modes import longest_window
from compactionrl.samplers.protocol import Sampler

if TYPE_CHECKING:
    import torch

    from compactionrl.models import Policy
    from compactionrl.rollout.chat import ChatFormat

DEMO = Path(__file__).parent / "bases" / "demo"
"""The packaged base."""


def build_tasks(config: Config, splits: Sequence[str] = ("train", "heldout")) -> TaskSet:
    """The task family of `environment.tasks`. Raises ConfigError if one of the `splits` that are needed is empty."""
    tasks = create("environment.tasks", config.environment.tasks, "environment.options", config.environment.options)
    for split in splits:
        if not tasks.size(split):
            raise ConfigError(f"environment.options: the {split} split has no task")
    return tasks


def model_folder(config: Config) -> Path:
    """Where the base model lies: 'demo' is packaged, 'warm-start' is trained into the run's own folder first."""
    named = {"demo": DEMO, "warm-start": Path(config.run.folder) / "base"}
    folder = named.get(config.model.path, Path(config.model.path))
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"model.path: {folder} is no Hugging Face model folder (it has no config.json). "
            "Nothing is downloaded: give a local folder, 'demo' or 'warm-start'"
        )
    return folder


def build_chat(config: Config, folder: Path) -> ChatFormat:
    """The chat format of the model in `folder`."""
    from transformers import AutoTokenizer

    from compactionrl.rollout.chat import ChatFormat

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"model.path: no tokenizer can be loaded from {folder}: {error}") from error
    return ChatFormat(tokenizer, config.model.renderer, config.model.renderer_options)


def build_device(config: Config) -> torch.device:
    import torch

    name = config.model.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"model.device: {name!r} cannot be used here: {error}") from error


def build_policy(config: Config, folder: Path) -> Policy:
    """The policy in `folder`, to be sampled from. Raises ConfigError if none can be loaded."""
    import torch

    from compactionrl.models import load_policy

    options = {"dtype": getattr(torch, config.model.dtype), "device": build_device(config)}
    try:
        return load_policy(folder, implementation=config.model.implementation, **options)
    except (OSError, ValueError) as error:
        raise ConfigError(f"no policy can be loaded from {folder}: {error}") from error


def build_sampler(config: Config, policy: Policy | None, modes: Sequence[str] | None = None) -> Sampler:
    """'local', 'vllm' or 'sglang', or `module:Class` called as Class(policy, **sampling.sampler_options).

    To be trained with, it must have `weights_changed(version)`, which is called whenever `policy` has new weights. Without a
    policy, servers are measured as they are. A local one has room for training and `modes` (default: those of the evaluation).
    """
    sampling = config.sampling
    if sampling.sampler in ("vllm", "sglang"):
        return build_served(config, policy)
    if sampling.sampler != "local":
        return create(
            "sampling.sampler", sampling.sampler, "sampling.sampler_options", sampling.sampler_options, policy
        )
    if policy is None:
        raise ConfigError("sampling.sampler: 'local' needs a policy in this process: give model.path, or name servers")
    from compactionrl.samplers.local import LocalSampler

    longest = longest_window(config, modes)
    if longest > policy.config.max_position_embeddings:
        raise ConfigError(
            f"context.budget: this model has {policy.config.max_position_embeddings} positions, but {longest} are needed; "
            "lower the budget, or leave the long windows (long is 4C) out of evaluation.modes and train.modes"
        )
    return LocalSampler(policy, max_rows=sampling.concurrency, max_tokens_per_row=longest)


def build_served(config: Config, policy: Policy | None) -> Sampler:
    """A sampler on the servers of `[server]`. With a policy, its weights are pushed to them."""
    if config.sampling.sampler == "vllm":
        from compactionrl.samplers.vllm import VLLMSampler as Kind
    else:
        from compactionrl.samplers.sglang import SGLangSampler as Kind  # type: ignore[assignment]
    if policy is None:
        push, vocab_size = None, json.loads((model_folder(config) / "config.json").read_text()).get("vocab_size")
    else:
        from compactionrl.samplers.push import WeightPush

        folder = Path(config.server.weights or Path(config.run.folder) / "weights")
        push = WeightPush(
            policy, folder, temperature=config.sampling.temperature, tolerance=config.server.probe_tolerance
        )
        vocab_size = policy.config.vocab_size
    return Kind(config.server, vocab_size=vocab_size, temperature=config.sampling.temperature, push=push)


def create(key: str, path: str, options_key: str, options: dict[str, Any], *arguments: Any) -> Any:
    """An instance of the class at the import path `module:Class`. Raises ConfigError that names the key at fault."""
    module, _, name = path.partition(":")
    if not module or not name:
        raise ConfigError(f"{key}: {path!r} must be an import path of the form 'module:Class'")
    try:
        kind = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{key}: cannot import {path!r}: {error}") from error
    try:
        return kind(*arguments, **options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{options_key}: {path} refuses {options}: {error}") from error
