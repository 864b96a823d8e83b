"""Blocking code behind an async face: everything of one environment runs in one thread of its own, call after call."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


class OwnThread:
    """A call waits for the one before, also where nobody waits for that one any more (it was cancelled)."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="environment")

    async def call(self, function: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *arguments)

    def close(self) -> None:
        """No call may follow; one that runs is not waited for."""
        self._pool.shutdown(wait=False)
