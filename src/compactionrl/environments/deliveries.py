"""Deliveries: several turns of plain English that the smallest chat models can follow at least in part; graded reward.

Each turn tells what a ship brought and asks for it; the last question is what came in all, which after a compaction only
the summary can tell. No commands, no sandbox: a check that a real model runs through everything, with rewards that differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from compactionrl.environments.logbook import GOODS, SHIPS, SPLITS, Draws
from compactionrl.environments.protocol import Message, Observation, Response, Verdict

SYSTEM = "You help in a harbour. Answer every question in one short sentence."
LAST = "That was the last ship. Which goods came in all?"

Delivery = tuple[str, tuple[str, str]]
"""A ship and what it brought."""


class DeliveriesEnvironment:
    """An Environment: one question for each delivery, then one about all of them."""

    def __init__(self, deliveries: Sequence[Delivery]) -> None:
        self.deliveries = deliveries
        self.shares: list[float] = []
        """Of the goods asked for, by turn: how many the response named."""

    async def start(self) -> list[Message]:
        return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": self.question(0)}]

    async def step(self, response: Response) -> Observation:
        turn = len(self.shares)
        if turn > len(self.deliveries):
            raise RuntimeError("All questions have been answered, no step may follow. Start a new environment.")
        asked = self.deliveries[turn : turn + 1] or self.deliveries
        goods = {good for _, pair in asked for good in pair}
        self.shares.append(sum(good in response.text.lower() for good in goods) / len(goods))
        return Observation(self.question(turn + 1), done=turn == len(self.deliveries))

    def question(self, turn: int) -> str:
        if turn >= len(self.deliveries):
            return LAST
        ship, goods = self.deliveries[turn]
        return f"The {ship} brought {' and '.join(goods)}. Which goods did the {ship} bring?"

    async def verify(self) -> Verdict:
        """Reward: the mean share of the goods asked for that were named, questions that were not reached included."""
        return Verdict(sum(self.shares) / (len(self.deliveries) + 1), {"shares": self.shares})

    async def close(self) -> None:
        """Nothing is held outside this object."""


@dataclass
class DeliveriesTasks:
    """A TaskSet: `deliveries` of each task, two goods each, no good twice. At most six: there are twelve goods."""

    seed: int = 0
    deliveries: int = 5
    n_train: int = 10_000
    n_heldout: int = 500

    def __post_init__(self) -> None:
        if not 1 <= self.deliveries <= len(GOODS) // 2:
            raise ValueError(f"deliveries must be 1 to {len(GOODS) // 2}, not {self.deliveries}.")

    def size(self, split: str) -> int:
        if split not in SPLITS:
            raise ValueError(f"There is no split {split!r}: choose one of {', '.join(SPLITS)}.")
        return self.n_train if split == "train" else self.n_heldout

    def task_id(self, split: str, index: int) -> str:
        if not 0 <= index < self.size(split):
            raise IndexError(f"There is no task {index} in {split!r}: it has {self.size(split)} tasks.")
        return f"deliveries-{split}-{index}"

    def environment(self, split: str, index: int) -> DeliveriesEnvironment:
        draws = Draws(f"{self.seed}/{self.task_id(split, index)}")
        goods, ships = draws.sample(GOODS, 2 * self.deliveries), draws.sample(SHIPS, self.deliveries)
        pairs = zip(goods[::2], goods[1::2], strict=True)
        return DeliveriesEnvironment(list(zip(ships, pairs, strict=True)))
