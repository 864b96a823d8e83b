"""From adapters to an ordinary model."""

from __future__ import annotations

from pathlib import Path

from safetensors import safe_open

from compactionrl.config import ConfigError
from compactionrl.models import load_policy, save_policy
from compactionrl.models.lora import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from compactionrl.training.atomic import write_folder
from compactionrl.training.checkpoint import copy_tokenizer


def merge(folder: Path, output: Path) -> None:
    """Write the policy whose adapters are in `folder` as an ordinary model with its tokenizer, all of it or nothing.

    It has the precision that the adapters were trained in. Raises ConfigError if there is nothing to merge or `output`
    exists.
    """
    if not (folder / ADAPTER_CONFIG).is_file():
        raise ConfigError(f"{folder} holds no adapters (no {ADAPTER_CONFIG}): nothing is to be merged")
    if output.exists():
        raise ConfigError(f"{output} exists: choose another folder")
    with safe_open(folder / ADAPTER_WEIGHTS, "pt") as weights:
        dtype = weights.get_tensor(next(iter(weights.keys()))).dtype
    try:
        policy = load_policy(folder, dtype=dtype)
    except ValueError as error:
        raise ConfigError(str(error)) from error

    def fill(partial: Path) -> None:
        save_policy(policy, partial)
        copy_tokenizer(folder, partial)

    write_folder(output, fill)
