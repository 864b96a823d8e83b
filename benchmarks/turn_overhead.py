"""What our own Python costs around the sampler: per turn, per rollout, and next to a model.

The demo's tasks are played at 1, 16, 64 and 256 rollouts at a time, always the same 256 rollouts of some fifteen turns and two
compactions. With a script, the sampler answers at once with the tokens of an expert, so that all that is measured is the
prompt, the reading of the response, the task's own step, the ledger, compaction and the event loop. `turn_overhead_turn_*`:
milliseconds of CPU time per turn; `turn_overhead_rollout_*`: per rollout. `turn_overhead_share_*`: the packaged base plays the
same tasks on the local sampler, and a percentage of the CPU time is spent outside of the sampler's steps. That model is tiny
(a quarter of a million parameters): with larger ones the share only falls. `turn_overhead_long`: milliseconds per turn with the
default context of 65,536 tokens and some 480 tokens a turn, 16 rollouts at a time.

Every repeat measures all sizes, one after the other, in another order.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from compactionrl import build
from compactionrl.config import Config, load_config
from compactionrl.environments.demonstrator import Demonstrator
from compactionrl.environments.notes import NotesTasks
from compactionrl.environments.protocol import Message, Observation, Response, TaskSet, Verdict
from compactionrl.models import load_policy
from compactionrl.rollout.chat import ChatFormat
from compactionrl.rollout.collect import Job, collect
from compactionrl.rollout.ledger import Rollout
from compactionrl.rollout.loop import RolloutSettings
from compactionrl.samplers.local import LocalSampler
from compactionrl.samplers.protocol import Sampled, Sampler

RECIPE = Path(__file__).parents[1] / "recipes" / "demo.toml"
SIZES = (1, 16, 64, 256)
ROLLOUTS = 256
LONG_TURNS, LONG_ROLLOUTS = 200, 16


class Script:
    """Answers at once: what `source` sampled for the same request of the same rollout in a run before."""

    def __init__(self, source: Sampler) -> None:
        self.source = source
        self.replies: dict[tuple[str, int], Sampled] = {}
        self.asked: Counter[str] = Counter()

    async def sample(self, token_ids: Sequence[int], *, affinity: str, **options: Any) -> Sampled:
        key = (affinity, self.asked[affinity])
        self.asked[affinity] += 1
        if key not in self.replies:
            self.replies[key] = await self.source.sample(token_ids, affinity=affinity, **options)
        await asyncio.sleep(0)  # the other rollouts take their turns meanwhile, as with a model
        return self.replies[key]

    async def release(self, affinity: str) -> None:
        self.asked.pop(affinity, None)


class TimedSampler(LocalSampler):
    """Knows the CPU seconds of its steps."""

    cpu_seconds = 0.0

    def _step(self) -> int:
        began = time.process_time()
        answered = super()._step()
        self.cpu_seconds += time.process_time() - began
        return answered


class LongTask:
    """Always the same observation, for `LONG_TURNS` turns."""

    def __init__(self, text: str) -> None:
        self.text, self.turns = text, 0

    async def start(self) -> list[Message]:
        return [{"role": "user", "content": self.text}]

    async def step(self, response: Response) -> Observation:
        self.turns += 1
        return Observation(self.text, done=self.turns == LONG_TURNS)

    async def verify(self) -> Verdict:
        return Verdict(1.0)

    async def close(self) -> None:
        pass


@dataclass
class LongTasks:
    text: str

    def size(self, split: str) -> int:
        return LONG_ROLLOUTS

    def task_id(self, split: str, index: int) -> str:
        return f"{split}-{index}"

    def environment(self, split: str, index: int) -> LongTask:
        return LongTask(self.text)


@dataclass
class Parrot:
    """Says `ids`, and then the stop token."""

    ids: list[int]

    async def sample(self, token_ids: Sequence[int], *, stop_token_ids: Sequence[int], **_: Any) -> Sampled:
        await asyncio.sleep(0)
        ids = [*self.ids, stop_token_ids[0]]
        return Sampled(ids, [0.0] * len(ids), "stop", [0] * len(ids))

    async def release(self, affinity: str) -> None:
        pass


@dataclass
class Setting:
    """Rollouts to play."""

    config: Config
    tasks: TaskSet
    chat: ChatFormat
    count: int

    def play(self, sampler: Sampler, concurrency: int) -> tuple[list[Rollout], float]:
        """The rollouts, `concurrency` at a time, and the CPU seconds of this process that they took."""
        return asyncio.run(self._play(sampler, concurrency))

    async def _play(self, sampler: Sampler, concurrency: int) -> tuple[list[Rollout], float]:
        settings = RolloutSettings(self.config.context, self.config.limits)
        jobs = ([Job("train", i, f"rollout-{i}", i)] for i in range(self.count))
        began = time.process_time()
        collected = await collect(
            self.tasks, sampler, self.chat, settings, jobs, self.count, concurrency=concurrency, retries=0
        )
        seconds = time.process_time() - began
        assert set(collected.ends) <= {"submitted", "budget", "turns"}, collected.ends
        return collected.rollouts, seconds


def measure(repeats: int, sizes: Sequence[int] = SIZES, rollouts: int = ROLLOUTS) -> dict[str, dict[str, Any]]:
    config = load_config(RECIPE)
    folder = build.model_folder(config)
    chat, tasks = build.build_chat(config, folder), build.build_tasks(config)
    assert isinstance(tasks, NotesTasks)
    demo = Setting(config, tasks, chat, rollouts)
    script = Script(Demonstrator(tasks, chat.tokenizer.base))
    policy = load_policy(folder)
    long = long_setting(chat)
    parrot = Parrot(chat.encode(" next" * 40))
    demo.play(script, sizes[-1])  # writes the script
    found: dict[str, list[float]] = {}

    def note(key: str, value: float) -> None:
        found.setdefault(f"turn_overhead_{key}", []).append(value)

    for repeat in range(repeats):
        for size in random.Random(repeat).sample(sizes, len(sizes)):
            played, seconds = demo.play(script, size)
            note(f"turn_{size}", 1e3 * seconds / sum(rollout.turns for rollout in played))
            note(f"rollout_{size}", 1e3 * seconds / len(played))
            model = TimedSampler(policy, max_rows=size, max_tokens_per_row=config.context.budget)
            _, seconds = demo.play(model, size)
            note(f"share_{size}", 100 * (1 - model.cpu_seconds / seconds))
        played, seconds = long.play(parrot, LONG_ROLLOUTS)
        note("long", 1e3 * seconds / sum(rollout.turns for rollout in played))
    return {
        key: {"median": statistics.median(values), "spread": [min(values), max(values)]}
        for key, values in found.items()
    }


def long_setting(chat: ChatFormat) -> Setting:
    config = load_config(None, {"limits.turns": 2 * LONG_TURNS})
    return Setting(config, LongTasks(" open n7 found" * 85), chat, LONG_ROLLOUTS)


def main() -> None:
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    print(json.dumps(measure(parser.parse_args().repeats), indent=2))


if __name__ == "__main__":
    main()
