"""Requests and the rows of the key-value cache that their rollouts own: who runs, who waits, whose row is given up."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from compactionrl.models.policy import Chunk
from compactionrl.samplers.protocol import Sampled


@dataclass(eq=False)
class Request:
    """One call of `sample`; `sampled` grows until `future` gets it."""

    token_ids: list[int]
    max_tokens: int
    stop: frozenset[int]
    temperature: float
    top_p: float
    seed: int
    affinity: str
    future: asyncio.Future[Sampled]
    sampled: Sampled = field(default_factory=lambda: Sampled([], [], "length", []))

    def add(self, token: int, logprob: float, version: int) -> bool:
        """Append a sampled token; True if it was the last."""
        self.sampled.token_ids.append(token)
        self.sampled.logprobs.append(logprob)
        self.sampled.versions.append(version)
        if token in self.stop:
            self.sampled.finish = "stop"
            return True
        return len(self.sampled.token_ids) == self.max_tokens


@dataclass(eq=False)
class Row:
    """A row of the cache: it holds keys and values of `tokens[:cached]`; the rest is still to be computed."""

    slot: int
    tokens: list[int] = field(default_factory=list)
    cached: int = 0
    request: Request | None = None
    last_used: int = 0

    @property
    def pending(self) -> int:
        """Tokens to compute before the next one can be sampled."""
        return len(self.tokens) - self.cached

    def begin(self, request: Request, cuttable: bool) -> None:
        """Take a request on: keep the longest common prefix, but compute the last token, which gives the logits.

        A row that is not `cuttable` is kept whole or not at all.
        """
        prompt = request.token_ids
        known = min(self.cached, len(prompt) - 1)
        if self.tokens[:known] != prompt[:known]:
            known = next(i for i in range(known) if self.tokens[i] != prompt[i])
        if known < self.cached and not cuttable:
            known = 0
        self.tokens, self.cached, self.request = list(prompt), known, request


class Rows:
    """The table of rows by affinity, and the requests that wait for one.

    An affinity keeps its row until it is dropped. Waiting requests whose rollout owns a row are served first. When all
    rows are taken, a newcomer gets the one that has been idle longest; while none is idle, it waits. Some request can
    always run: a row is either busy or to be had.
    """

    def __init__(self, max_rows: int, cuttable: bool = True) -> None:
        self.cuttable = cuttable
        self.waiting: list[Request] = []
        self._by_affinity: dict[str, Row] = {}
        self._free = list(range(max_rows))[::-1]

    def __getitem__(self, affinity: str) -> Row | None:
        return self._by_affinity.get(affinity)

    @property
    def busy(self) -> list[Row]:
        return [row for row in self._by_affinity.values() if row.request]

    @property
    def open(self) -> list[Request]:
        """Every request that has not been answered."""
        return self.waiting + [row.request for row in self.busy if row.request]

    def admit(self) -> list[Row]:
        """Give waiting requests rows, in order of arrival, and return those rows; rollouts that own one come first."""
        admitted, others = [], []
        for request in self.waiting:
            row = self._by_affinity.get(request.affinity)
            if row is not None and row.request is None:
                row.begin(request, self.cuttable)
                admitted.append(row)
            else:
                others.append(request)
        idle = [name for name, row in self._by_affinity.items() if row.request is None]
        idle.sort(key=lambda name: self._by_affinity[name].last_used, reverse=True)
        self.waiting = []
        for request in others:
            if request.affinity in self._by_affinity or not (self._free or idle):
                self.waiting.append(request)
                continue
            if not self._free:
                self.drop(idle.pop())
            row = self._by_affinity[request.affinity] = Row(self._free.pop())
            row.begin(request, self.cuttable)
            admitted.append(row)
        return admitted

    def due(self, most_tokens: int) -> list[tuple[Row, Chunk]]:
        """What the next step computes: rows with a single new token first, in slot order, then the longer chunks."""
        due, room = [], most_tokens
        for row in sorted(self.busy, key=lambda row: (row.pending > 1, row.slot)):
            length = min(row.pending, room)
            if length > 0:
                due.append((row, Chunk(row.slot, row.cached, length)))
                room -= length
        due.sort(key=lambda item: (item[1].length > 1, item[1].row))  # the last one may have been cut to a single token
        return due

    def withdraw(self, request: Request) -> None:
        """Take back a request whose caller has gone; nothing to do for one that was answered."""
        if request in self.waiting:
            self.waiting.remove(request)
        row = self._by_affinity.get(request.affinity)
        if row is not None and row.request is request:
            row.request = None

    def drop(self, affinity: str) -> None:
        """Free the row of `affinity`, if it has one."""
        row = self._by_affinity.pop(affinity, None)
        if row is not None:
            self._free.append(row.slot)
            self._free.sort(reverse=True)  # low slots first: the live rows stay close together

    def forget(self) -> None:
        """Nothing that was computed may be used again: every row starts over, busy ones in the middle of their request."""
        for row in self._by_affinity.values():
            row.cached = 0

    def clear(self) -> list[Request]:
        """Drop every row and every request, and return those that were open."""
        requests, self.waiting = self.open, []
        for affinity in list(self._by_affinity):
            self.drop(affinity)
        return requests
