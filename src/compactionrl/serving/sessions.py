"""Which row of the sampler a request uses."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count

from compactionrl.samplers.protocol import Sampler

IDLE_SECONDS = 600.0
"""After this time without a request, a session's row is given up."""


class Sessions:
    """A session, such as a rollout, keeps its row: what its next request has in common with it is not computed again.

    A request without a session, or whose session is busy with another one, gets a row for itself and gives it up at its end.
    Sessions that have been idle for `idle_seconds` lose theirs, and so do the oldest beyond `limit`.
    """

    def __init__(self, sampler: Sampler, limit: int, idle_seconds: float = IDLE_SECONDS) -> None:
        self.sampler, self.limit, self.idle_seconds = sampler, limit, idle_seconds
        self.idle: OrderedDict[str, float] = OrderedDict()
        """Affinity -> when its last request ended, the oldest first."""
        self.busy: set[str] = set()
        self._numbers = count()

    @asynccontextmanager
    async def row(self, name: str | None) -> AsyncIterator[str]:
        """The affinity of one request."""
        affinity = f"session {name}"
        if name is None or affinity in self.busy:
            affinity = f"request {next(self._numbers)}"
        else:
            self.idle.pop(affinity, None)
        self.busy.add(affinity)
        try:
            yield affinity
        finally:
            self.busy.discard(affinity)
            if affinity.startswith("request"):
                await self.sampler.release(affinity)
            else:
                self.idle[affinity] = time.monotonic()
            await self._sweep()

    async def _sweep(self) -> None:
        """Give up the rows of sessions that are not likely to come back."""
        oldest = time.monotonic() - self.idle_seconds
        while self.idle and (len(self.idle) > self.limit or next(iter(self.idle.values())) < oldest):
            affinity, _ = self.idle.popitem(last=False)
            await self.sampler.release(affinity)
