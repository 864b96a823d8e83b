"""Notes: long tasks that can only be solved by remembering, generated from a seed.

A folder of short notes is read one at a time, each once. Some notes hold a *fact* (one value of one slot), the others are
noise; a later note may give a slot a new value. After the last note the agent answers with the latest fact of every slot,
in the slots' order. Every turn costs a handful of tokens, so a tiny policy with a window of some hundred tokens meets in
seconds what a large one meets in hours: what its own summary leaves out is gone.

    agent: next        agent: next        agent: next        agent: next    agent: answer cup3 map0
    env:   note map0   env:   note rain   env:   note cup3   env:   end
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from compactionrl.environments.protocol import Message, Observation, Response, Verdict

Style = Literal["token", "pairs"]
Mode = Literal["scan", "chain"]
SPLITS = ("train", "heldout")

SLOTS = ("cup", "map", "key", "hat", "pen", "box", "gem", "bag", "net", "jar", "fan", "log")
NOISE = (
    "rain",
    "wind",
    "snow",
    "dust",
    "fog",
    "sand",
    "moss",
    "mud",
    "ice",
    "dew",
    "hail",
    "ash",
    "soot",
    "mist",
    "haze",
)
NAMES = tuple(f"n{i}" for i in range(40))

Content = tuple[int | None, int]
"""What a note holds: a slot and its value, or None and the number of its noise."""

END, UNKNOWN, MISSING = "end", "unknown", "missing"
"""Observations: no note is left; that is not a command; there is no such note to open now."""

NOTES_PROMPTS = {
    "summary_request": "summarise",
    "retry_request": "again",
    "resume_template": "you {summary}",
    "placeholder": "later",
}
"""Prompts for a tiny policy, in place of those written for large ones. A summary reads "found cup3 hat1"."""


@dataclass(frozen=True)
class NotesTask:
    """One task. `commands[i]` reveals `notes[i]`; `answer` holds the expected facts in the slots' order."""

    system: str
    prompt: str
    commands: tuple[str, ...]
    notes: tuple[str, ...]
    answer: tuple[str, ...]


class NotesEnvironment:
    """An Environment: the folder of one task. A malformed command costs a turn and gets a one-word answer."""

    def __init__(self, task: NotesTask) -> None:
        self.task = task
        self.read = 0
        self.answered: str | None = None

    async def start(self) -> list[Message]:
        return [{"role": "system", "content": self.task.system}, {"role": "user", "content": self.task.prompt}]

    async def step(self, response: Response) -> Observation:
        if self.answered is not None:
            raise RuntimeError("The task has been answered, no step may follow. Start a new environment.")
        command, *words = response.text.split() or [""]
        if command == "answer":
            self.answered = " ".join(words)
            return Observation("", done=True)
        return Observation(self._reveal(" ".join([command, *words])))

    def _reveal(self, command: str) -> str:
        if self.read < len(self.task.notes) and command == self.task.commands[self.read]:
            self.read += 1
            return self.task.notes[self.read - 1]
        verb, *words = command.split(" ")
        if verb != self.task.commands[0].split()[0] or len(words) != (verb == "open"):
            return UNKNOWN
        return MISSING if verb == "open" else END

    async def verify(self) -> Verdict:
        """Reward 1.0 if the answer is exactly the expected one, word for word; else, or without an answer, 0.0."""
        expected, answered = " ".join(self.task.answer), self.answered
        details = {
            "facts_right": sum(f" {fact} " in f" {answered} " for fact in self.task.answer),
            "facts": len(self.task.answer),
            "expected": expected,
            "answered": None if answered is None else answered[:200],
            "notes": len(self.task.notes),
            "notes_read": self.read,
        }
        return Verdict(float(answered == expected), details)

    async def close(self) -> None:
        """Nothing is held outside this object."""


@dataclass
class NotesTasks:
    """A TaskSet. Its dials:

    notes: fewest and most notes of a task; every length is equally frequent. Short tasks fit into one window.
    facts, values: slots to remember, and possible values of each.
    style: "token": a fact is one word ("cup3"), to be copied; "pairs": a key and a value ("cup v3"), to be associated.
    updates: notes per task that give a slot seen before another value; the latest one counts.
    noise: words of a note that holds no fact.
    repeats: how often a word of noise stands in its note, by its place among them, cyclic: notes of unequal lengths.
    early: share of the notes, from the first on, that hold all facts; what follows is noise.
    mode: "scan": `next` reads the next note; "chain": each note names the next one, `open n7` reads it.

    All distinct tasks of one length are numbered, a permutation keyed by `seed` shuffles the numbers, and each index takes
    its own: no task occurs twice, within or across the splits, by construction. ValueError if there are not enough.
    """

    seed: int = 0
    notes: Sequence[int] = (5, 18)
    facts: int = 4
    values: int = 8
    style: Style = "token"
    updates: int = 0
    noise: int = 1
    repeats: Sequence[int] = (1,)
    early: float = 1.0
    mode: Mode = "scan"
    n_train: int = 100_000
    n_heldout: int = 1_000

    def __post_init__(self) -> None:
        self._check_dials()
        self._lengths = range(self.notes[0], self.notes[1] + 1)
        noises = len(NOISE) ** self.noise
        self._folders = _Folders(self.notes[1], self.facts, self.values, self.updates, noises, self.early)
        self._fact = re.compile(rf"\b({'|'.join(SLOTS[: self.facts])}){'' if self.style == 'token' else ' v'}\d+\b")
        self._check_sizes()

    def _check_dials(self) -> None:
        for name, choices in (("style", get_args(Style)), ("mode", get_args(Mode))):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, not {getattr(self, name)!r}.")
        ranges: dict[str, tuple[int, float]] = {
            "facts": (1, len(SLOTS)),
            "values": (2 if self.updates else 1, 1000),
            "updates": (0, 100),
            "noise": (0, 100),
            "n_train": (0, math.inf),
            "n_heldout": (0, math.inf),
        }
        for name, (least, most) in ranges.items():
            value = getattr(self, name)
            if not isinstance(value, int) or not least <= value <= most:
                raise ValueError(f"{name} must be an integer from {least} to {most}, not {value!r}.")
        if not 0 <= self.early <= 1:
            raise ValueError(f"early is a share from 0 to 1, not {self.early!r}.")
        if not self.repeats or not all(isinstance(times, int) and 1 <= times <= 1000 for times in self.repeats):
            raise ValueError(f"repeats must be integers from 1 to 1000, not {self.repeats!r}.")
        fewest, most = self.facts + self.updates, len(NAMES) if self.mode == "chain" else 500
        if len(self.notes) != 2 or not fewest <= self.notes[0] <= self.notes[1] <= most:
            raise ValueError(
                f"notes must be [fewest, most] with facts + updates = {fewest} <= fewest <= most <= {most} "
                f"(mode {self.mode}), not {list(self.notes)}."
            )

    def _check_sizes(self) -> None:
        needed = -(-(self.n_train + self.n_heldout) // len(self._lengths))
        for length in self._lengths:
            if self.distinct(length) < needed:
                raise ValueError(
                    f"These dials give {self.distinct(length)} distinct tasks with {length} notes, but n_train and "
                    f"n_heldout need {needed}: ask for fewer tasks, or raise facts, values, noise or notes."
                )

    def distinct(self, length: int) -> int:
        """How many different tasks have `length` notes."""
        return self._folders.count(length) * (math.perm(len(NAMES), length) if self.mode == "chain" else 1)

    def size(self, split: str) -> int:
        if split not in SPLITS:
            raise ValueError(f"split must be one of {', '.join(SPLITS)}, not {split!r}.")
        return self.n_train if split == "train" else self.n_heldout

    def task_id(self, split: str, index: int) -> str:
        if not 0 <= index < self.size(split):
            raise IndexError(f"There is no task {index} in {split!r}: it has {self.size(split)} tasks.")
        return f"notes-{split}-{index}"

    def environment(self, split: str, index: int) -> NotesEnvironment:
        return NotesEnvironment(self.task(split, index))

    def task(self, split: str, index: int) -> NotesTask:
        self.task_id(split, index)  # refuses an index that does not exist
        number, offset = divmod(index + (self.n_train if split == "heldout" else 0), len(self._lengths))
        length = self._lengths[offset]
        task = _shuffle(number, self.distinct(length), f"{self.seed}/{length}")
        rank, folder = divmod(task, self._folders.count(length))
        return self._write(list(self._folders.unrank(length, folder)), rank)

    def _write(self, contents: list[Content], rank: int) -> NotesTask:
        """`rank` is the number of a chain's names among all their choices and orders."""
        notes = [self._note(*content) for content in contents]
        commands, prompt = ["next"] * len(notes), "begin"
        if self.mode == "chain":
            names = _arrange(rank, list(NAMES), len(notes))
            pointers = [f"next {name}" for name in names] + [END]
            notes = [f"{note} {pointer}" for note, pointer in zip(notes, pointers[1:], strict=True)]
            commands, prompt = [f"open {name}" for name in names], f"begin {pointers[0]}"
        latest = dict(content for content in contents if content[0] is not None)
        answer = tuple(self.fact(slot, latest[slot]) for slot in range(self.facts))
        return NotesTask(self.system, prompt, tuple(commands), tuple(notes), answer)

    def _note(self, slot: int | None, number: int) -> str:
        if slot is not None:
            return f"note {self.fact(slot, number)}"
        digits = [number // len(NOISE) ** i % len(NOISE) for i in range(self.noise)]
        times = [self.repeats[digit % len(self.repeats)] for digit in digits]
        return " ".join(["note", *(NOISE[digit] for digit, n in zip(digits, times, strict=True) for _ in range(n))])

    @property
    def system(self) -> str:
        """The rules: with the summary all that is left after a compaction."""
        command = "next" if self.mode == "scan" else "open with the next name"
        latest = "latest " if self.updates else ""
        value = "v of " if self.style == "pairs" else ""
        return f"say {command} until end then answer {latest}{value}{' '.join(SLOTS[: self.facts])}"

    def fact(self, slot: int, value: int) -> str:
        return f"{SLOTS[slot]}{value}" if self.style == "token" else f"{SLOTS[slot]} v{value}"

    def read_facts(self, text: str) -> dict[int, str]:
        """The facts that `text` mentions, by slot and in the slots' order; of two facts of one slot the later one."""
        found = {SLOTS.index(match[1]): match[0] for match in self._fact.finditer(text)}
        return dict(sorted(found.items()))

    @property
    def texts(self) -> list[str]:
        """Every word of a task, a command or a summary: what a tokenizer for a tiny policy is built from."""
        facts = [self.fact(slot, value) for slot in range(self.facts) for value in range(self.values)]
        words = ["begin next open answer note found", END, UNKNOWN, MISSING, *(NOISE if self.noise else ())]
        return [self.system, *words, *(NAMES if self.mode == "chain" else ()), *facts]


class _Folders:
    """All folders (contents of the notes, in order), counted and numbered: `count(length)` and `unrank(length, rank)`.

    A folder is written note by note. (left, facts, unseen) says what is still to come: that many notes, that many of them
    with a fact, that many slots without one so far. Ways to go on depend on nothing else, so they can be counted. Behind
    the `early` share of the notes, which holds all facts, every note is noise.
    """

    def __init__(self, longest: int, slots: int, values: int, updates: int, noises: int, early: float) -> None:
        self.slots, self.values, self.noises, self.facts = slots, values, noises, slots + updates
        self.early = early
        self._ways = {(0, 0, 0): 1}
        for left in range(1, longest + 1):
            for facts in range(min(left, self.facts) + 1):
                for unseen in range(min(facts, slots) + 1):
                    branches = self._branches(left, facts, unseen)
                    self._ways[left, facts, unseen] = sum(ways * self._ways[rest] for ways, rest in branches)

    def _branches(self, left: int, facts: int, unseen: int) -> Iterator[tuple[int, tuple[int, int, int]]]:
        """The next note may be noise, a slot's first fact or an update: (ways to write it, what is to come) each."""
        if left > facts:
            yield self.noises, (left - 1, facts, unseen)
        if unseen:
            yield unseen * self.values, (left - 1, facts - 1, unseen - 1)
        if facts > unseen:
            yield (self.slots - unseen) * (self.values - 1), (left - 1, facts - 1, unseen)

    def head(self, length: int) -> int:
        """Notes of which any may hold a fact."""
        share = round(self.early * length, 9)  # 0.56 of 25 is 14, not a little more
        return max(self.facts, math.ceil(share))

    def tails(self, length: int) -> int:
        return self.noises ** (length - self.head(length))

    def count(self, length: int) -> int:
        return self._ways[self.head(length), self.facts, self.slots] * self.tails(length)

    def unrank(self, length: int, rank: int) -> Iterator[Content]:
        """Folder number `rank` of [0, count(length)): every choice takes a digit off the number, in a mixed radix."""
        latest: dict[int, int] = {}
        rank, tail = divmod(rank, self.tails(length))
        left, facts, unseen = self.head(length), self.facts, self.slots
        while left:
            for ways, rest in self._branches(left, facts, unseen):
                if rank < ways * self._ways[rest]:
                    break
                rank -= ways * self._ways[rest]
            rank, choice = divmod(rank, ways)
            if rest[1] == facts:
                yield None, choice
            else:
                yield self._fact(choice, latest, first=rest[2] < unseen)
            left, facts, unseen = rest
        for _ in range(length - self.head(length)):
            tail, choice = divmod(tail, self.noises)
            yield None, choice

    def _fact(self, choice: int, latest: dict[int, int], first: bool) -> tuple[int, int]:
        """Fact number `choice` of those that may come next; recorded in `latest`."""
        index, value = divmod(choice, self.values if first else self.values - 1)
        slot = [slot for slot in range(self.slots) if (slot in latest) != first][index]
        if not first and value >= latest[slot]:
            value += 1  # an update changes the value
        latest[slot] = value
        return slot, value


def _arrange(rank: int, items: list[str], length: int) -> list[str]:
    """Arrangement number `rank` of `length` of the items."""
    arranged = []
    for _ in range(length):
        rank, choice = divmod(rank, len(items))
        arranged.append(items.pop(choice))
    return arranged


def _shuffle(number: int, size: int, key: str) -> int:
    """Where a keyed pseudo-random permutation of [0, size) takes `number`: a Feistel network, walked until it is inside."""
    half = max(1, (size - 1).bit_length() + 1 >> 1)
    while True:
        left, right = number >> half, number & (1 << half) - 1
        for turn in range(4):
            digest = hashlib.shake_128(f"{key}/{turn}/{right}".encode()).digest((half + 7) // 8)
            left, right = right, left ^ int.from_bytes(digest, "big") & (1 << half) - 1
        number = left << half | right
        if number < size:
            return number
