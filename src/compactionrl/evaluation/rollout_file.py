"""Finished rollouts in one file that only grows: gzipped JSON lines, each line a gzip member of its own.

`zcat rollouts.jsonl.gz` prints them. A line holds a rollout's fields and, in its windows, every turn: role, note, token ids
and, of sampled ones, the segment, log-probabilities, versions and what the server counted. A line is there or it is not: what a
killed process left half written is cut off when the file is opened again.
"""

from __future__ import annotations

import fcntl
import gzip
import json
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, Self

from compactionrl.config import ConfigError
from compactionrl.rollout.ledger import CONTEXT, Attempt, Rollout, Segment, Window
from compactionrl.samplers.protocol import Reported

CHUNK = 1 << 20
GZIP = 31
"""zlib's `wbits` for a gzip member."""
LEVEL = 5


class RolloutFile:
    """Open for reading and appending, by one process at a time. Raises ConfigError if another one has it, or if it is damaged."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = path.open("a+b")
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.file.close()
            raise ConfigError(
                f"{path}: another evaluation is writing here; wait for it, or choose another --output"
            ) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.file.close()

    def recover(self, keep: Callable[[Rollout], None]) -> None:
        """Give every rollout to `keep`, in the order of writing; cut off what is half written behind the last one."""
        whole = 0
        for line, end in members(self.file, self.path):
            keep(from_json(json.loads(line)))
            whole = end
        self.file.truncate(whole)

    def append(self, rollout: Rollout) -> None:
        """Bring a rollout to disk."""
        line = json.dumps(to_json(rollout), default=str, separators=(",", ":")) + "\n"
        self.file.write(gzip.compress(line.encode(), LEVEL, mtime=0))
        self.file.flush()
        os.fsync(self.file.fileno())


def read_rollouts(path: Path) -> Iterator[Rollout]:
    """Every whole rollout of a file, which may still be growing."""
    with path.open("rb") as file:
        for line, _ in members(file, path):
            yield from_json(json.loads(line))


def members(file: IO[bytes], path: Path) -> Iterator[tuple[bytes, int]]:
    """What each whole gzip member holds, and where it ends. Raises ConfigError for bytes that were never written so."""
    file.seek(0)
    rest, end = b"", 0
    while True:
        unpack, parts = zlib.decompressobj(GZIP), []
        while not unpack.eof:
            chunk = rest or file.read(CHUNK)
            if not chunk:
                return
            rest = b""
            end += len(chunk)
            try:
                parts.append(unpack.decompress(chunk))
            except zlib.error as error:
                raise ConfigError(
                    f"{path} is damaged ({error}): move it away; what it holds is evaluated again"
                ) from None
        rest = unpack.unused_data
        end -= len(rest)
        yield b"".join(parts), end


def to_json(rollout: Rollout) -> dict[str, Any]:
    return {**vars(rollout), "windows": [window_json(window) for window in rollout.windows]}


def window_json(window: Window) -> dict[str, Any]:
    segments = {segment.index: segment for segment in window.segments}
    turns = []
    for turn in window.turns:
        span = slice(turn.start, turn.end)
        data: dict[str, Any] = {"role": turn.role, "note": turn.note, "token_ids": window.token_ids[span]}
        index = window.segment_ids[turn.start] if turn.end > turn.start else CONTEXT
        if index != CONTEXT:
            data |= {
                "segment": vars(segments[index]),
                "logprobs": window.logprobs[span],
                "versions": window.versions[span],
                "reported": turn.reported,
            }
        turns.append(data)
    return {"turns": turns, "rejected": [vars(attempt) for attempt in window.rejected]}


def from_json(data: dict[str, Any]) -> Rollout:
    return Rollout(**{**data, "windows": [window_from_json(window) for window in data["windows"]]})


def window_from_json(data: dict[str, Any]) -> Window:
    rejected = [Attempt(**{**attempt, "reported": counted(attempt["reported"])}) for attempt in data["rejected"]]
    window = Window(rejected=rejected)
    for turn in data["turns"]:
        role, note, ids = turn["role"], turn["note"], turn["token_ids"]
        if "segment" in turn:
            segment, reported = Segment(**turn["segment"]), counted(turn["reported"])
            window.append_sampled(ids, turn["logprobs"], turn["versions"], segment, note, reported)
        else:
            window.append_context(ids, role, note)
    return window


def counted(reported: list[int] | None) -> Reported | None:
    return None if reported is None else Reported(*reported)
