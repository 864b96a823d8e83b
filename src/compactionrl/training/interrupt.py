"""Ctrl-C and SIGTERM, without ever stopping in the middle of an update."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from types import FrameType
from typing import Any, Self, TypeVar

T = TypeVar("T")


class Interrupted(Exception):
    """The user asked to stop."""


class Interrupt:
    """Within this context the first signal cancels what `guard` awaits, and is noticed by `check`; a second one kills.

    Rollouts can be thrown away, an update cannot: it is finished first.
    """

    def __init__(self) -> None:
        self.requested = False
        self.task: asyncio.Task[Any] | None = None
        self.previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM):
            self.previous[number] = signal.signal(number, self.handle)
        return self

    def __exit__(self, *exception: object) -> None:
        self.restore()

    def restore(self) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)
        self.previous = {}

    def handle(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        self.restore()
        if self.task is not None:
            self.task.get_loop().call_soon_threadsafe(self.task.cancel)

    async def guard(self, work: Coroutine[Any, Any, T]) -> T:
        """What `work` gives; raises Interrupted when a signal came before or while it ran."""
        self.task = asyncio.create_task(work)
        try:
            if self.requested:
                self.task.cancel()
            return await self.task
        except asyncio.CancelledError:
            self.check()
            raise
        finally:
            self.task = None

    def check(self) -> None:
        if self.requested:
            raise Interrupted
