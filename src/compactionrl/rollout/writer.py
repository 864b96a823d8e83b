"""Who writes in a rollout: the policy its responses, the policy or another summariser the summaries."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from compactionrl.config import ConfigError
from compactionrl.environments.protocol import Message, Response
from compactionrl.rollout.chat import ChatFormat, Span
from compactionrl.rollout.conversation import conversation
from compactionrl.rollout.ledger import Rollout
from compactionrl.rollout.spoken import parse_reply
from compactionrl.samplers.protocol import Completer, Reply, Sampled, Sampler, Summariser

T = TypeVar("T")


class Writer:
    """The requests of one rollout: timed, each with a random stream of its own, and held to the sampler's contract.

    A `summariser` that samples continues the window's ids, as the policy does; one that completes chats (`Completer`) is
    given the window's messages. Raises ConfigError for one that can do neither.
    """

    def __init__(
        self,
        rollout: Rollout,
        sampler: Sampler,
        summariser: Summariser | None,
        chat: ChatFormat,
        *,
        temperature: float,
        top_p: float,
        seed: int,
    ) -> None:
        if chat.approximate and summariser is not None and not isinstance(summariser, Completer):
            raise ConfigError("the policy's windows are text: its summariser must be a chat endpoint, too")
        self.rollout, self.sampler, self.summariser, self.chat = rollout, sampler, summariser, chat
        self.temperature, self.top_p, self.seed = temperature, top_p, seed
        self.requests = 0
        self.stops = frozenset(chat.stop_token_ids)

    @property
    def samplers(self) -> dict[str, Summariser]:
        """Those that write, by their part."""
        both = {"sampler": self.sampler, "summariser": self.summariser}
        return {name: sampler for name, sampler in both.items() if sampler is not None}

    async def respond(self, prompt: Sequence[int], max_tokens: int) -> Sampled:
        return await self._sample(self.sampler, prompt, max_tokens)

    async def summarise(
        self,
        window: Sequence[int],
        spans: Sequence[Span],
        messages: Sequence[Message],
        max_tokens: int,
        tools: list[Any] | None,
    ) -> tuple[Sampled, Response]:
        """A summary of `window` and the `spans` behind it, of at most `max_tokens` tokens. `messages`: what both say."""
        if isinstance(self.summariser, Completer):
            reply = await self._timed(self.summariser.complete(conversation(messages), **self._request(max_tokens)))
            return encoded(reply, self.chat, max_tokens)
        prompt = [*window, *(token for span in spans for token in span.ids)]
        sampled = await self._sample(self.summariser or self.sampler, prompt, max_tokens)
        # By the count of text it may be longer than was asked for, and would not fit into the next window.
        cut = sampled.finish == "length" or len(sampled.token_ids) > max_tokens
        return sampled, self.chat.parse(spans[-1].ids, sampled.token_ids, cut, tools)

    async def _sample(self, sampler: Sampler, prompt: Sequence[int], max_tokens: int) -> Sampled:
        request = self._request(max_tokens)
        sampled = await self._timed(sampler.sample(prompt, stop_token_ids=self.chat.stop_token_ids, **request))
        if sampled.finish == "abort":
            raise RuntimeError("the sampler aborted the request")
        if not sampled.token_ids or sampled.tokens > max_tokens:
            raise RuntimeError(f"the sampler returned {sampled.tokens} tokens, asked for 1 to {max_tokens}")
        if not self.stops.isdisjoint(sampled.token_ids[:-1]):
            raise RuntimeError("the sampler went on behind a stop token")
        return sampled

    def _request(self, max_tokens: int) -> dict[str, Any]:
        number, self.requests = self.requests, self.requests + 1
        return {
            "max_tokens": max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "seed": random_stream(self.seed, number),
            "affinity": self.rollout.id,
        }

    async def _timed(self, request: Awaitable[T]) -> T:
        started = time.perf_counter()
        try:
            return await request
        finally:
            self.rollout.sampler_seconds += time.perf_counter() - started


def encoded(reply: Reply, chat: ChatFormat, max_tokens: int) -> tuple[Sampled, Response]:
    """A summary written as text, in the policy's tokens: at most `max_tokens`, or it is cut. Its thinking is not kept."""
    response = parse_reply(reply)
    ids = [*chat.encode(response.text), chat.stop_token_ids[0]]
    if len(ids) > max_tokens:
        response = replace(response, text=chat.decode(ids[:max_tokens]), cut=True)
    if response.cut:
        ids = ids[: min(len(ids) - 1, max_tokens)] or ids
    finish = "length" if response.cut else "stop"
    return Sampled(ids, [0.0] * len(ids), finish, [0] * len(ids), reply.reported), response  # type: ignore[arg-type]


def random_stream(seed: int, *path: object) -> int:
    """The seed of one of the random streams below `seed`: far from those of its neighbours."""
    digest = hashlib.blake2b(":".join(map(str, (seed, *path))).encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1
