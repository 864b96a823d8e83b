"""Logbook: a harbour's stock, to be worked out from many pages of plain English. For real language models; no sandbox.

The agent asks for pages one by one and answers with the crates of each good that are in store at the end. Pages mix what
counts (deliveries, shipments, corrections of earlier pages) with what does not (weather, visitors, goods that nobody asked
for). A model that keeps a running count in its summaries solves it in a window that holds a few pages at a time.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeGuard, TypeVar, get_args

from compactionrl.environments.protocol import Message, Observation, Response, ToolCall, Verdict

T = TypeVar("T")
Calls = Literal["native", "text"]
SPLITS = ("train", "heldout")

GOODS = (
    "copper wire", "lamp oil", "oak planks", "salted cod", "raw wool", "pine tar", "hemp rope", "window glass",
    "iron nails", "black pepper", "tin plate", "sail cloth",
)  # fmt: skip
SHIPS = ("Marlin", "Heron", "Providence", "Swift", "Northern Star", "Adelaide", "Cormorant", "Good Hope")
TOWNS = ("Varde", "Ostmark", "Kilrush", "Porthaven", "Lindau", "Saltash", "Brekke", "Tarbert")
PEOPLE = ("Anna", "the harbour master", "old Piet", "the clerk", "Signe", "the pilot", "Captain Rowe", "Mr Hollis")
CHATTER = (
    "The wind came from the {side} and {person} complained about the cold.",
    "{person} found the north gate open again and shut it.",
    "A fog stood over the pier until {hour} and nothing could be seen of the {ship}.",
    "The {ship} lay at anchor all day with a torn sail.",
    "{person} asked whether the letters from {town} had come, which they had not.",
    "Two gulls nested under the roof, and {person} let them be.",
    "The lamp at the end of the mole was lit at {hour}.",
    "{person} counted the mooring lines and was content.",
    "There was talk of a new road to {town}, as there is every year.",
    "Rain until {hour}, then sun.",
)
MOST = 30
"""Crates of one delivery."""
READ = re.compile(r"read\s+(?:page\s+)?(\d{1,6})", re.IGNORECASE)
COMMAND = re.compile(r"^[\s`>*]*((?:read|answer)\b.*)$", re.IGNORECASE | re.MULTILINE)
NO_COMMAND = "That is no command. Write one line: read 1 (a page's number), or answer with every good and its number."

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "read",
            "description": "Read one page of the logbook.",
            "parameters": {"type": "object", "properties": {"page": {"type": "integer"}}, "required": ["page"]},
        },
    },
    {
        "type": "function",
        "function": {
            "name": "answer",
            "description": "Give the stock at the end, once: every good that was asked for and its number of crates.",
            "parameters": {
                "type": "object",
                "properties": {"stock": {"type": "object", "additionalProperties": {"type": "integer"}}},
                "required": ["stock"],
            },
        },
    },
]


@dataclass(frozen=True)
class LogbookTask:
    """`pages[i]` is the text of page i + 1; `stock`: crates of each good that is asked for, at the end."""

    pages: tuple[str, ...]
    stock: dict[str, int]


class LogbookEnvironment:
    """An Environment: one logbook. A malformed call or command costs a turn and is answered with what to do."""

    def __init__(self, task: LogbookTask, calls: Calls) -> None:
        self.task = task
        self.tools: list[Any] | None = TOOLS if calls == "native" else None
        self.read: set[int] = set()
        self.answered: dict[str, int] | None = None

    async def start(self) -> list[Message]:
        how = (
            "Use the tools: read gives a page, answer ends the work."
            if self.tools
            else "Write one command per turn, on a line of its own, and nothing else: `read 1` gives page 1; "
            f"`answer {', '.join(f'{good} 0' for good in self.task.stock)}` ends the work."
        )
        task = (
            f"The store was empty before page 1. The logbook has {len(self.task.pages)} pages. How many crates of each of "
            f"these are in store after the last page: {', '.join(self.task.stock)}? A correction changes what an earlier "
            "page said."
        )
        system = f"You keep the stock of a harbour store from its logbook. {how}"
        return [{"role": "system", "content": system}, {"role": "user", "content": task}]

    async def step(self, response: Response) -> Observation:
        if self.answered is not None:
            raise RuntimeError("The task has been answered, no step may follow. Start a new environment.")
        if self.tools and response.calls:
            texts = [self.call(call) for call in response.calls]
            return Observation(texts, done=self.answered is not None)
        if self.tools:
            return Observation("Call a tool: read with a page's number, or answer with the stock.")
        text = self.command(response.text)
        return Observation(text, done=self.answered is not None)

    def call(self, call: ToolCall) -> str:
        if call.error:
            return f"{call.error}. Call read with a page's number, or answer with the stock."
        if call.name == "read":
            page = call.arguments.get("page")
            return self.page(page) if is_integer(page) else "page must be an integer."
        if call.name == "answer":
            return self.answer(call.arguments.get("stock"))
        return f"There is no tool {call.name!r}: the tools are read and answer."

    def command(self, text: str) -> str:
        """The first line of `text` that is a command; fences, quotes and what stands around it do not matter."""
        match = COMMAND.search(text)
        if match is None:
            return NO_COMMAND
        line = match[1].strip().strip("`")
        if line.lower().startswith("read"):
            number = READ.match(line)
            return self.page(int(number[1])) if number else NO_COMMAND
        found = {good: re.findall(rf"\b{good}\W+(-?\d{{1,9}})\b", line, re.IGNORECASE) for good in self.task.stock}
        return self.answer({good: int(numbers[0]) for good, numbers in found.items() if len(numbers) == 1})

    def page(self, number: int) -> str:
        if not 1 <= number <= len(self.task.pages):
            return f"There is no page {number}: the pages are 1 to {len(self.task.pages)}."
        self.read.add(number)
        return self.task.pages[number - 1]

    def answer(self, stock: Any) -> str:
        if not isinstance(stock, dict) or not all(map(is_integer, stock.values())):
            return "stock must be an object: every good that was asked for, and its number of crates."
        if missing := [good for good in self.task.stock if good not in stock]:
            return f"The answer lacks the number of: {', '.join(missing)}."
        self.answered = {good: stock[good] for good in self.task.stock}
        return "Thank you."

    async def verify(self) -> Verdict:
        """Reward 1.0 if every number is right; else, or without an answer, 0.0."""
        answered = self.answered or {}
        details = {
            "right": sum(answered.get(good) == number for good, number in self.task.stock.items()),
            "goods": len(self.task.stock),
            "expected": self.task.stock,
            "answered": self.answered,
            "pages": len(self.task.pages),
            "pages_read": len(self.read),
        }
        return Verdict(float(answered == self.task.stock), details)

    async def close(self) -> None:
        """Nothing is held outside this object."""


@dataclass
class LogbookTasks:
    """A TaskSet. Its dials:

    pages: fewest and most pages of a logbook; every length is equally frequent.
    goods: how many are asked for; as many others occur, up to the twelve that there are.
    chatter: sentences per page that do not matter.
    corrections: share of the entries that correct an earlier page.
    calls: "native" (tools `read` and `answer`) or "text" (one command per turn).

    Each task is drawn from a random stream of its own, keyed by seed, split and index.
    """

    seed: int = 0
    pages: Sequence[int] = (10, 30)
    goods: int = 3
    chatter: int = 3
    corrections: float = 0.15
    calls: Calls = "native"
    n_train: int = 100_000
    n_heldout: int = 500

    def __post_init__(self) -> None:
        if self.calls not in get_args(Calls):
            raise ValueError(f"calls must be one of {', '.join(get_args(Calls))}, not {self.calls!r}.")
        if len(self.pages) != 2 or not 1 <= self.pages[0] <= self.pages[1] <= 10_000:
            raise ValueError(f"pages must be two numbers, fewest and most, from 1 to 10000, not {self.pages!r}.")
        if not 1 <= self.goods <= len(GOODS) or not 0 <= self.chatter <= 1000 or not 0 <= self.corrections <= 1:
            raise ValueError(f"goods must be 1 to {len(GOODS)}, chatter 0 to 1000, corrections a share from 0 to 1.")

    def size(self, split: str) -> int:
        if split not in SPLITS:
            raise ValueError(f"There is no split {split!r}: choose one of {', '.join(SPLITS)}.")
        return self.n_train if split == "train" else self.n_heldout

    def task_id(self, split: str, index: int) -> str:
        if not 0 <= index < self.size(split):
            raise IndexError(f"There is no task {index} in {split!r}: it has {self.size(split)} tasks.")
        return f"logbook-{split}-{index}"

    def environment(self, split: str, index: int) -> LogbookEnvironment:
        return LogbookEnvironment(self.task(split, index), self.calls)

    def task(self, split: str, index: int) -> LogbookTask:
        return _Writer(self, Draws(f"{self.seed}/{self.task_id(split, index)}")).write()


def is_integer(value: Any) -> TypeGuard[int]:
    """JSON's true is no number, though Python's is."""
    return isinstance(value, int) and not isinstance(value, bool)


class Draws:
    """A random stream that every Python version draws alike: `random()` is the one method that is promised to stay."""

    def __init__(self, key: str) -> None:
        self.random = random.Random(key).random

    def between(self, low: int, high: int) -> int:
        return low + int(self.random() * (high - low + 1))

    def choice(self, items: Sequence[T]) -> T:
        return items[self.between(0, len(items) - 1)]

    def sample(self, items: Iterable[T], count: int | None = None) -> list[T]:
        """`count` of the items (default: all), in random order."""
        left = list(items)
        return [left.pop(self.between(0, len(left) - 1)) for _ in range(len(left) if count is None else count)]


class _Writer:
    """Writes one logbook and keeps its books."""

    def __init__(self, tasks: LogbookTasks, rng: Draws) -> None:
        self.tasks, self.rng = tasks, rng
        goods = rng.sample(GOODS, min(2 * tasks.goods, len(GOODS)))
        self.asked, self.stock = goods[: tasks.goods], dict.fromkeys(goods, 0)
        self.deliveries: list[tuple[int, str, int]] = []
        """Page, good, crates: what a later page may correct, each once."""

    def write(self) -> LogbookTask:
        length = self.rng.between(*self.tasks.pages)
        pages = tuple(f"Page {number} of {length}. {' '.join(self.page(number))}" for number in range(1, length + 1))
        return LogbookTask(pages, {good: self.stock[good] for good in self.asked})

    def page(self, number: int) -> list[str]:
        """Its sentences: one or two entries, none of two that change the same good, among the chatter."""
        goods = self.rng.sample(self.stock, min(self.rng.choice((1, 1, 2)), len(self.stock)))
        return self.rng.sample([*(self.entry(number, good) for good in goods), *self.chatter()])

    def entry(self, page: int, good: str) -> str:
        earlier = [item for item in self.deliveries if item[1] == good and item[0] < page]
        if earlier and self.rng.random() < self.tasks.corrections and (text := self.correction(earlier)):
            return text
        if self.stock[good] and self.rng.random() < 0.45:
            crates = self.rng.between(1, self.stock[good])
            self.stock[good] -= crates
            return f"Shipped {crates} crates of {good} to {self.rng.choice(TOWNS)}."
        crates = self.rng.between(2, MOST)
        self.stock[good] += crates
        self.deliveries.append((page, good, crates))
        return f"Received {crates} crates of {good} from the {self.rng.choice(SHIPS)}."

    def correction(self, earlier: list[tuple[int, str, int]]) -> str | None:
        """One that keeps the stock above zero, if there is one."""
        page, good, crates = delivery = self.rng.choice(earlier)
        possible = [n for n in range(max(1, crates - self.stock[good]), MOST + 1) if n != crates]
        if not possible:
            return None
        actual = self.rng.choice(possible)
        self.stock[good] += actual - crates
        self.deliveries.remove(delivery)
        return f"Correction to page {page}: the delivery there was {actual} crates of {good}, not {crates}."

    def chatter(self) -> Iterator[str]:
        for _ in range(self.tasks.chatter):
            sentence = self.rng.choice(CHATTER).format(
                side=self.rng.choice(("north", "south", "east", "west")),
                person=self.rng.choice(PEOPLE),
                hour=self.rng.choice(("noon", "six", "dusk", "nine")),
                ship=self.rng.choice(SHIPS),
                town=self.rng.choice(TOWNS),
            )
            yield sentence[0].upper() + sentence[1:]
