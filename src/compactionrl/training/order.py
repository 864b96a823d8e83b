"""Which task comes when, and with which random stream: functions of the run's seed alone, so nothing needs to be stored."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator, Sequence
from functools import lru_cache

from compactionrl.rollout.collect import Job
from compactionrl.rollout.loop import RolloutSettings


def derive(*parts: int | str) -> int:
    """A seed of 63 bits from what it is for; different parts give unrelated seeds."""
    return int.from_bytes(hashlib.sha256(json.dumps(parts).encode()).digest()[:8]) >> 1


@lru_cache(maxsize=2)
def task_order(seed: int, epoch: int, size: int) -> Sequence[int]:
    """The permutation of 0..size-1 in which an epoch takes the tasks."""
    # random() is the one method whose sequence Python promises to keep.
    rng = random.Random(derive("order", seed, epoch))
    keys = [rng.random() for _ in range(size)]
    return tuple(sorted(range(size), key=keys.__getitem__))


def units(
    seed: int, size: int, group_size: int, start: int = 0, settings: Sequence[RolloutSettings | None] = (None,)
) -> Iterator[list[Job]]:
    """Groups of jobs on one train task each, from unit `start` on, without end; each task once per epoch of `size` units.

    Each unit draws one of `settings`, the same for all its jobs: a group is compared under equal conditions.
    """
    epoch, place = divmod(start, size)
    while True:
        order = task_order(seed, epoch, size)
        for number in range(place, size):
            unit = epoch * size + number
            drawn = settings[derive("mode", seed, unit) % len(settings)]
            yield [
                Job("train", order[number], f"train-{unit}-{member}", derive("rollout", seed, unit, member), drawn)
                for member in range(group_size)
            ]
        epoch, place = epoch + 1, 0
