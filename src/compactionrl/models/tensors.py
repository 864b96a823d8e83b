"""Tensors in files that hold nothing else: safetensors, never a pickle."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor


def save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Write a safetensors file. Raises OSError where the disk does not take it."""
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"{path} cannot be written: {error}") from error
