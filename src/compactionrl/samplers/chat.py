"""Any OpenAI-style chat endpoint: text in and text out, so for evaluation and as a summariser only, never for training.

Endpoints differ. What is needed is a POST to /v1/chat/completions that takes a model, messages and a limit of tokens and answers
with choices. Other parameters are left out where a server does not take them, as long as that changes nothing but the seed.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from typing import Any

from compactionrl.config import ServerConfig
from compactionrl.samplers.http import Server, ServerPool
from compactionrl.samplers.protocol import Reply, SamplerRefused
from compactionrl.samplers.reply import context_too_short, read_reply
from compactionrl.samplers.served import PROBE_SECONDS, choose_model

LOG = logging.getLogger(__name__)
COMPLETIONS = "/v1/chat/completions"
PROBE = [{"role": "user", "content": "Say hello."}]
PROBE_TOKENS = 16
LISTING = 1 << 24
"""Bytes of a list of models: some endpoints have thousands."""
CONTEXT = re.compile(
    r"context_length|exceed_context|(maximum|available) (context|input|prompt|sequence)|context (length|window|size|limit)"
    r"|(prompt|input|request|messages?) (is|are) too long|reduce the length|too many (input |prompt )?tokens",
    re.IGNORECASE,
)
"""How servers say that a request is longer than their context."""
INVALID = re.compile(r"failed with 4(?:00|13|22);[^:]*(:.*)", re.DOTALL)
"""A request to which a server objects, and its words."""


class ChatServer(Server):
    """A server, the name of the model there, and the parameters that it does not take."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.model = ""
        self.omitted: set[str] = set()


class ChatEndpoint:
    """The endpoint at some servers: a `Completer` (`samplers.protocol`).

    A server is checked before its first request: that it serves the model, that the key is good, that its context is no shorter
    than `start`'s budget, if it says.
    """

    def __init__(self, config: ServerConfig, *, first_pause: float = 1.0) -> None:
        self.config = config
        self.pool = ServerPool(config, ChatServer, first_pause=first_pause)
        self.budget = 0

    async def start(self, budget: int) -> None:
        """Raises SamplerRefused if the servers do not serve the model, or say that `budget` tokens are too many for it."""
        self.budget = budget
        for server in self.pool.servers:
            server.model = ""
        await self.pool.everywhere(self._prepare)

    async def close(self) -> None:
        await self.pool.close()

    async def complete(
        self,
        messages: Sequence[Any],
        *,
        max_tokens: int,
        temperature: float,
        top_p: float,
        seed: int,
        affinity: str,
        tools: Sequence[Any] | None = None,
    ) -> Reply:
        """See `Completer.complete`. Raises SamplerError by name; SamplerRefused for what no retry can mend."""
        body = {
            "messages": list(messages),
            "max_tokens": max_tokens,
            "temperature": temperature,
            "top_p": top_p,
            "seed": seed % 2**31,  # some servers have no more bits
            **({"tools": list(tools)} if tools else {}),
        }
        return await self.pool.ask(affinity, partial(self._complete, body=body, affinity=affinity))

    async def _complete(self, server: ChatServer, body: dict[str, Any], affinity: str) -> Reply:
        await self._prepare(server)
        return await self._post(server, body, affinity)

    async def _prepare(self, server: ChatServer) -> None:
        """Check a server that has not been; one request does, the others wait."""
        async with server.lock:
            if server.model:
                return
            name = await self._find_model(server)
            await self._post(server, {"messages": PROBE, "max_tokens": PROBE_TOKENS}, model=name, seconds=PROBE_SECONDS)
            server.model = name

    async def _find_model(self, server: ChatServer) -> str:
        """The name to ask for; an endpoint that lists no models is asked for the configured one."""
        try:
            listed = await self.pool.call(server, "GET", "/v1/models", limit=LISTING, seconds=PROBE_SECONDS)
        except SamplerRefused as error:
            return unlisted(error, self.config)
        return choose_model(server, listed, self.config, self.budget)

    async def _post(
        self, server: ChatServer, body: dict[str, Any], affinity: str = "", *, model: str = "", seconds: float = 1e9
    ) -> Reply:
        """Ask until the server takes the parameters: each is left out, and so objected to, once."""
        limit = (1 << 16) + 1024 * body["max_tokens"]
        while True:
            sent = adapted(body, server.omitted) | {"model": model or server.model}
            try:
                data = await self.pool.call(
                    server, "POST", COMPLETIONS, sent, affinity=affinity, limit=limit, seconds=seconds
                )
                return read_reply(server, data, sum(len(message["content"]) for message in sent["messages"]))
            except SamplerRefused as error:
                server.omitted.add(self._objection(server, error, sent))

    def _objection(self, server: ChatServer, error: SamplerRefused, sent: dict[str, Any]) -> str:
        """The parameter that can be left out to mend `error`; raises what says more where there is none."""
        objection = INVALID.search(str(error))
        if objection is None:
            raise error
        words = objection[1]
        if CONTEXT.search(words):
            raise context_too_short(server, words) from None
        for name in optional_parameters(sent):
            if re.search(rf"\b{name}\b", words) and (name != "max_tokens" or "max_completion_tokens" in words):
                LOG.warning("%s does not take %s; it is left out", server.name, name)
                return name
        if "max_tokens" in words or "max_completion_tokens" in words:
            raise SamplerRefused(f"{error}; lower context.response_tokens and context.summary_tokens") from None
        raise error


def unlisted(error: SamplerRefused, config: ServerConfig) -> str:
    """The model's name, if an endpoint does not list any and one is configured; raises `error` otherwise."""
    if config.model and re.search(r"failed with 40[45]", str(error)):
        return config.model
    raise error


def optional_parameters(sent: dict[str, Any]) -> Iterator[str]:
    """What can be left out of a body: the model then does what it would have done, but for the seed."""
    yield from (name for name in ("max_tokens", "seed") if name in sent)
    yield from (name for name in ("temperature", "top_p") if sent.get(name) == 1)
    if any("reasoning_content" in message for message in sent["messages"]):
        yield "reasoning_content"


def adapted(body: dict[str, Any], omitted: Collection[str]) -> dict[str, Any]:
    """A body without what a server does not take; the limit of tokens has a second name."""
    sent = {key: value for key, value in body.items() if key not in omitted}
    if "max_tokens" in omitted:
        sent["max_completion_tokens"] = body["max_tokens"]
    sent["messages"] = [
        {key: value for key, value in message.items() if key not in omitted} for message in body["messages"]
    ]
    return sent
