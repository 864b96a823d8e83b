"""Rollout files: one parquet file per batch, one row per window, so that every loss can be traced to its tokens.

Lists with one entry per token: `token_ids`, `segment_ids` (-1: context), `logprobs`, `versions`, and what training made of
them: `values` (V before the token), `advantages`, `targets`; these are 0 at tokens that were not optimised.
The rollout's own fields (`id`, `task_id`, `reward`, `end`, ...) are repeated in each of its rows. A rollout that was dropped
(`end` is "error") is there too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from compactionrl.rollout.ledger import Attempt, Rollout, Segment, Turn, Window
from compactionrl.training.atomic import write_file
from compactionrl.training.batch import Batch
from compactionrl.training.learner import Credit

ROLLOUT = {
    "id": pa.string(),
    "task_id": pa.string(),
    "reward": pa.float64(),
    "end": pa.string(),
    "error": pa.string(),
    "retryable": pa.bool_(),
    "turns": pa.int32(),
    "tool_calls": pa.int32(),
    "cut_responses": pa.int32(),
    "thinking_tokens": pa.int32(),
    "environment_seconds": pa.float64(),
    "sampler_seconds": pa.float64(),
}
TOKENS = {
    "token_ids": pa.list_(pa.int32()),
    "segment_ids": pa.list_(pa.int32()),
    "logprobs": pa.list_(pa.float64()),
    "versions": pa.list_(pa.int32()),
}
CREDIT = {name: pa.list_(pa.float32()) for name in ("values", "advantages", "targets")}
PARTS: dict[str, tuple[type, pa.DataType]] = {
    "segments": (Segment, pa.struct({"kind": pa.string(), "index": pa.int32(), "excluded": pa.string()})),
    "turns": (Turn, pa.struct({"role": pa.string(), "start": pa.int32(), "end": pa.int32(), "note": pa.string()})),
    "rejected": (
        Attempt,
        pa.struct({"token_ids": TOKENS["token_ids"], "logprobs": TOKENS["logprobs"], "reason": pa.string()}),
    ),
}
SCHEMA = pa.schema(
    {f"rollout_{name}": kind for name, kind in ROLLOUT.items()}
    | {"rollout_details": pa.string(), "window": pa.int32()}
    | TOKENS
    | CREDIT
    | {name: pa.list_(kind) for name, (_, kind) in PARTS.items()}
)


def credit_by_window(rollouts: Sequence[Rollout], batch: Batch, credit: Credit) -> list[dict[str, Tensor]]:
    """`values`, `advantages`, `targets` [T] of every window of `rollouts`, of which the batch's come first; else zeros."""
    estimate, layout = credit.estimate, batch.layout
    columns = {"values": credit.values, "advantages": estimate.advantages, "targets": estimate.targets}
    trained = layout.window[layout.of_token].unique_consecutive().tolist()
    parts = {name: dict(zip(trained, column.split(batch.lengths), strict=True)) for name, column in columns.items()}
    windows = [window for rollout in rollouts for window in rollout.windows]
    return [
        {name: part.get(number, torch.zeros(len(window))) for name, part in parts.items()}
        for number, window in enumerate(windows)
    ]


def write_rollouts(path: Path, rollouts: Sequence[Rollout], credit: Sequence[dict[str, Tensor]]) -> None:
    """Write a file completely or not at all. `credit`: for each window, in order, its `values`, `advantages`, `targets` [T]."""
    rows = list(window_rows(rollouts, credit))
    table = pa.Table.from_pylist(rows, schema=SCHEMA)
    write_file(path, lambda partial: pq.write_table(table, partial, compression="zstd"))


def window_rows(rollouts: Sequence[Rollout], credit: Sequence[dict[str, Tensor]]) -> Iterator[dict[str, Any]]:
    parts = iter(credit)
    for rollout in rollouts:
        shared: dict[str, Any] = {f"rollout_{name}": getattr(rollout, name) for name in ROLLOUT}
        shared["rollout_details"] = json.dumps(rollout.details, default=str)
        for number, window in enumerate(rollout.windows):
            yield {
                **shared,
                "window": number,
                **{name: getattr(window, name) for name in TOKENS},
                **{name: tensor.tolist() for name, tensor in next(parts).items()},
                **{name: [vars(part) for part in getattr(window, name)] for name in PARTS},
            }
        if not rollout.windows:  # broke down before it began
            yield {**shared, "window": None}


def read_rollouts(path: Path) -> list[Rollout]:
    """The ledgers that `write_rollouts` was given."""
    rollouts: dict[str, Rollout] = {}
    for row in pq.read_table(path, schema=SCHEMA).to_pylist():
        fields = {name: row[f"rollout_{name}"] for name in ROLLOUT}
        rollout = rollouts.setdefault(row["rollout_id"], Rollout(**fields, details=json.loads(row["rollout_details"])))
        if row["window"] is not None:
            parts = {name: [kind(**part) for part in row[name]] for name, (kind, _) in PARTS.items()}
            rollout.windows.append(Window(**{name: row[name] for name in TOKENS}, **parts))
    return list(rollouts.values())
