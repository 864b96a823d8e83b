"""The environment's own time: what a sampler computes in this process meanwhile is not the environment's."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection
from typing import Any, TypeVar

T = TypeVar("T")


class OutOfTime(Exception):
    """The environment did not answer in time."""


def stopwatch(samplers: Collection[Any]) -> Callable[[], float]:
    """Seconds since this call, less those for which one of `samplers` held the event loop (its `busy_seconds`, if any)."""

    def now() -> float:
        return time.perf_counter() - sum(getattr(sampler, "busy_seconds", 0.0) for sampler in samplers)

    started = now()
    return lambda: max(0.0, now() - started)


async def within(seconds: float, elapsed: Callable[[], float], call: Awaitable[T]) -> T:
    """What `call` gives; raises OutOfTime and cancels it when `elapsed` reaches `seconds`."""
    loop = asyncio.get_running_loop()
    watch: asyncio.TimerHandle
    try:
        async with asyncio.timeout(None) as timer:

            def check() -> None:
                nonlocal watch
                left = seconds - elapsed()
                if left > 0:
                    watch = loop.call_later(left, check)
                else:
                    timer.reschedule(loop.time())

            watch = loop.call_later(seconds, check)
            try:
                return await call
            finally:
                watch.cancel()
    except TimeoutError:
        if timer.expired():
            raise OutOfTime(f"the environment took longer than limits.environment_seconds ({seconds:g} left)") from None
        raise
