"""What the tests of sandboxes need of the machine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import cache
from typing import Any, TypeVar

import pytest

from compactionrl.sandboxes.bwrap import BwrapSandbox
from compactionrl.sandboxes.protocol import SandboxError

T = TypeVar("T")


@cache
def why_not() -> str:
    """Why no sandbox can run here; empty if one can."""

    async def attempt() -> None:
        sandbox = BwrapSandbox()
        await sandbox.start()
        await sandbox.stop()

    try:
        asyncio.run(attempt())
    except SandboxError as error:
        return str(error)
    return ""


@pytest.fixture(scope="session")
def bwrap() -> None:
    """A machine on which sandboxes run."""
    if reason := why_not():
        pytest.skip(reason)


@pytest.fixture
def play() -> Callable[[Coroutine[Any, Any, T]], T]:
    return asyncio.run
