"""Tensors in files that hold nothing else: safetensors, never a pickle."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor


def save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Write a safetensors file. Raises OSError where the disk does not take it."""
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"{path} cannot be written: {error}") from error


def tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Name to shape of all weights in a model folder, from the files' headers alone. Empty if there are none."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(folder.glob("model*.safetensors")):
        with safe_open(path, "np") as file:
            shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    return shapes
