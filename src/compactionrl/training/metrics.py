"""Metrics as JSON lines, and the same for TensorBoard."""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter


class MetricsLog:
    """`metrics.jsonl` and `tensorboard/` in `folder`. Only the first `position` bytes of what is there are kept.

    Every line has `phase` ("value", "train" or "eval") and `step`: the batch of value pretraining, or policy updates done.
    TensorBoard's files are a view, written anew from the kept lines, so that a resumed run leaves no trace of what it does again.
    """

    def __init__(self, folder: Path, position: int = 0) -> None:
        self.path = folder / "metrics.jsonl"
        self.file = self.path.open("ab")
        self.file.truncate(min(position, self.path.stat().st_size))
        shutil.rmtree(folder / "tensorboard", ignore_errors=True)
        self.board = SummaryWriter(str(folder / "tensorboard"))
        for line in self.path.read_text().splitlines():
            self.show(json.loads(line))

    def write(self, phase: str, step: int, metrics: dict[str, Any]) -> None:
        """Append one line. Numbers that are not finite have no place in JSON: they are left out."""
        finite = {key: value for key, value in metrics.items() if not isinstance(value, float) or math.isfinite(value)}
        line = {"phase": phase, "step": step, **finite}
        self.file.write(json.dumps(line, allow_nan=False).encode() + b"\n")
        self.file.flush()
        self.show(line)

    def show(self, line: dict[str, Any]) -> None:
        for key, value in line.items():
            if isinstance(value, int | float) and key != "step":
                self.board.add_scalar(key, value, line["step"])
        self.board.flush()

    def position(self) -> int:
        """Bytes that are safely on disk."""
        self.file.flush()
        os.fsync(self.file.fileno())
        return self.path.stat().st_size

    def close(self) -> None:
        self.file.close()
        self.board.close()


def flatten(data: dict[str, Any], prefix: str = "") -> dict[str, float]:
    """The numbers in nested dictionaries, under keys joined by "/"."""
    result: dict[str, float] = {}
    for key, value in data.items():
        if isinstance(value, dict):
            result |= flatten(value, f"{prefix}{key}/")
        elif isinstance(value, int | float):
            result[f"{prefix}{key}"] = float(value)
    return result
