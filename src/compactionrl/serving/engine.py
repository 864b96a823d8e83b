"""The local sampler with what a server needs of it: it can be paused, and ended."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Literal, get_args

from compactionrl.samplers.local import LocalSampler
from compactionrl.samplers.protocol import Sampled

PauseMode = Literal["abort", "keep", "wait"]
MODES: tuple[str, ...] = get_args(PauseMode)
PASSES = 12
"""Passes of the event loop between two steps: enough for a request to be read and to join the next one."""
POLL_SECONDS = 0.005


class Closed(Exception):
    """The server is shutting down."""


class Engine(LocalSampler):
    """A LocalSampler that can be paused in vLLM's three ways. While it is, new requests wait."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.closed = False
        self._admitting, self._stepping = asyncio.Event(), asyncio.Event()
        self.resume()

    async def sample(
        self,
        token_ids: Sequence[int],
        *,
        max_tokens: int,
        stop_token_ids: Sequence[int],
        temperature: float,
        top_p: float,
        seed: int,
        affinity: str,
    ) -> Sampled:
        """See `LocalSampler.sample`. Its finish may be "abort", with the tokens so far. Raises Closed."""
        await self._admitting.wait()
        if self.closed:
            raise Closed
        return await super().sample(
            token_ids,
            max_tokens=max_tokens,
            stop_token_ids=stop_token_ids,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            affinity=affinity,
        )

    async def pause(self, mode: PauseMode) -> None:
        """Stop sampling. What is open is answered as far as it is ("abort"), frozen ("keep"), or finished first ("wait")."""
        self._admitting.clear()
        if mode == "wait":
            self._stepping.set()
            while self.open and self.paused:
                await asyncio.sleep(POLL_SECONDS)
            if not self.paused:
                return  # resumed meanwhile
        self._stepping.clear()
        if mode == "abort":
            self.abort()

    @property
    def paused(self) -> bool:
        return not self._admitting.is_set()

    def resume(self) -> None:
        self._admitting.set()
        self._stepping.set()

    def close(self) -> None:
        """End: what is open is aborted, what waits is refused."""
        self.closed = True
        self.abort()
        self.resume()

    def forget(self) -> None:
        """Nothing that was computed is used again."""
        self.weights_changed(self.policy_version)

    async def between_steps(self, answered: int) -> None:
        for _ in range(PASSES):
            await asyncio.sleep(0)
        await self._stepping.wait()
