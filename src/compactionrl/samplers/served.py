"""What samplers on servers have in common, whatever protocol the servers speak: checks, retries, versions of the weights."""

from __future__ import annotations

import asyncio
import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Literal

from compactionrl.config import ServerConfig
from compactionrl.samplers.http import CutOff, MalformedReply, Server, ServerPool
from compactionrl.samplers.protocol import Sampled, SamplerError, SamplerRefused

if TYPE_CHECKING:
    from compactionrl.samplers.push import Reading, WeightPush, Weights

PROBE_SECONDS = 300.0
"""Most seconds of a request of one token; a server's first may have to compile."""
DRAIN_SECONDS = 30.0
"""Most seconds until a paused server has returned what it had sampled."""
ROUNDING = 1e-4
"""A log-probability may be above 0 by this much: servers compute in float32."""
LOG_ZERO = -9999.0
"""What servers write for the logarithm of 0, which JSON does not have."""


@dataclass(frozen=True)
class Request:
    """One request to a server; see `Sampler.sample`."""

    token_ids: Sequence[int]
    max_tokens: int
    stop_token_ids: Sequence[int] = ()
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0


@dataclass(frozen=True)
class Part:
    """The tokens that one request brought. `stamp`: of the weights that sampled them, if the reply says so."""

    token_ids: list[int]
    logprobs: list[float]
    finish: Literal["stop", "length", "abort"]
    stamp: str | None = None


class ServerRestarted(SamplerError):
    """The server has lost the weights that were pushed to it; what it answered was sampled with others."""


class Served(Server):
    """A server, and what is known about its weights."""

    model = ""
    """The name of the model there."""
    weights: Weights | None = None
    """Pushed to it, and proved to be there; None if nothing was, or if a new process may have taken its place."""
    reading: tuple[Weights, Reading] | None = None
    """What it answered to the latest probe."""
    half_pushed = False
    """Whether a push began and did not end: it may be paused, or have cached what other weights computed, whatever its stamp."""
    known_at = -math.inf
    """When `weights` were last known to be there, by the clock of the event loop."""

    def bind(self, in_flight: int) -> None:
        super().bind(in_flight)
        self.known_at = -math.inf


class ServedSampler(ABC):
    """Samples from servers; implements `samplers.protocol.Sampler`. A subclass speaks the servers' protocol.

    Before a server's first request, and again after a connection to it broke, it is checked: that it serves the model, that
    a request of `start`'s budget fits, that it returns token ids and log-probabilities. With `push`, it also gets the latest
    weights and must prove that it samples from them. So a server that was away for some pushes, or has been restarted, never
    answers with other weights; what it may have answered is thrown away and sampled again.

    A push ends what is being sampled; it goes on behind what there is, with the new weights. `Sampled.versions` says exactly
    which token had which. The log-probabilities are those of the temperature-scaled softmax, as the protocol says. Only an
    evaluation, without `push`, takes what the servers compute where the temperature is not 1 or top_p is below 1.
    """

    options_for_scaled = ""
    """What to do if a server's log-probabilities leave out the temperature."""

    def __init__(
        self,
        config: ServerConfig,
        *,
        vocab_size: int | None = None,
        temperature: float = 1.0,
        push: WeightPush | None = None,
        first_pause: float = 1.0,
    ) -> None:
        self.config, self.vocab_size, self.temperature, self.push = config, vocab_size, temperature, push
        self.pool = ServerPool(config, Served, first_pause=first_pause)
        self.budget = 0
        self._mismatch: SamplerError | None = None

    async def start(self, budget: int) -> None:
        """Raises SamplerRefused if the servers cannot serve requests of `budget` tokens, prompt and response together."""
        self.budget = budget
        if self.push:
            self.push.fit(budget)
        for server in self.pool.servers:
            server.ready = False
        await self.pool.everywhere(self._prepare)

    async def close(self) -> None:
        await self.pool.close()

    async def release(self, affinity: str) -> None:
        """Servers forget by themselves what they cached for it."""
        return

    async def weights_changed(self, version: int) -> None:
        """Push the policy's weights, those of `version`, to every server, and have each prove that it samples from them.

        Raises WeightMismatch if one does not. Those that are down get them when they are back.
        """
        if self.push is None:
            raise SamplerRefused("this sampler was made without a policy, for evaluation: it has no weights to push")
        self._check_mismatch()
        await self.push.publish(version)
        await self.pool.everywhere(self._prepare)

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
        """See `Sampler.sample`. Raises SamplerError by name; SamplerRefused for what no retry can mend."""
        if self.push is not None and self.push.current is None:
            raise SamplerRefused("weights_changed must come first: nothing says which weights the servers have")
        sampled = Sampled([], [], "abort", [])
        for number in count():
            self._check_mismatch()
            request = Request(
                [*token_ids, *sampled.token_ids],
                max_tokens - len(sampled.token_ids),
                stop_token_ids,
                temperature,
                top_p,
                stream_seed(seed, number),
            )
            try:
                version, part = await self.pool.ask(affinity, partial(self._part, request=request, affinity=affinity))
            except CutOff:
                continue
            sampled.token_ids += part.token_ids
            sampled.logprobs += part.logprobs
            sampled.versions += [version] * len(part.token_ids)
            sampled.finish = part.finish
            if part.finish != "abort":
                return sampled
        raise AssertionError("unreachable: a response ends, or an error does")

    async def _part(self, server: Served, request: Request, affinity: str) -> tuple[int, Part]:
        """What a server samples for `request`, all of it with the weights of one version."""
        if not server.ready or server.lock.locked() or server.weights is not self.wanted:
            await self._prepare(server)
        weights = server.weights
        async with server.in_flight():
            part = await self._send(server, request, affinity)
            if weights is not None:
                await self._check_weights(server, weights, part)
        if part.finish == "abort" and not part.token_ids and server.weights is weights and not server.lock.locked():
            raise SamplerError(f"{server.name}: it aborted the request, and not for a push of ours")
        return weights.version if weights else 0, part

    async def _send(self, server: Served, request: Request, affinity: str = "", seconds: float = math.inf) -> Part:
        path, body = self.request(server, request)
        reply = await self.pool.call(
            server, "POST", path, body, affinity=affinity, limit=reply_limit(request), seconds=seconds
        )
        return self.part(server, reply, request)

    async def _check_weights(self, server: Served, weights: Weights, part: Part) -> None:
        """Raise ServerRestarted if this part may have been sampled by a new process, without the weights that were pushed.

        One that does not say so is asked, but only if a connection was opened since the last time: a process that ends takes
        its connections with it.
        """
        asked_at = asyncio.get_running_loop().time()
        if part.stamp is None and server.opened_at < server.known_at:
            return
        stamp = await self.stamp(server) if part.stamp is None else part.stamp
        if stamp != weights.stamp:
            server.ready, server.weights = False, None
            raise ServerRestarted(
                f"{server.name} has no longer the weights that were pushed to it: has it been restarted?"
            )
        server.known_at = max(server.known_at, asked_at)

    @property
    def wanted(self) -> Weights | None:
        return self.push.current if self.push else None

    def _check_mismatch(self) -> None:
        """A server with wrong weights ends the run, wherever it was found."""
        if self._mismatch is not None:
            raise self._mismatch

    async def _prepare(self, server: Served) -> None:
        """Check a server and give it the latest weights, if need be; one request does, the others wait."""
        async with server.lock:
            if not server.ready:
                await self._check(server)
            if self.push and (wanted := self.push.current) and server.weights is not wanted:
                await self._deliver(server, self.push, wanted)
            server.ready = True

    async def _check(self, server: Served) -> None:
        if self.push:
            await self.resume(server)  # a trainer that died may have left it paused
        server.weights = None
        listed = await self.pool.call(server, "GET", "/v1/models", seconds=PROBE_SECONDS)
        server.model = choose_model(server, listed, self.config, self.budget)
        await self._send(server, Request([0, 1], 1), seconds=PROBE_SECONDS)
        if self.push and self.temperature not in (0.0, 1.0) and not await self._scales(server):
            raise SamplerRefused(
                f"{server.name}: its log-probabilities leave out the temperature, {self.temperature}, and cannot be trained: "
                f"{self.options_for_scaled}, or set sampling.temperature to 1"
            )

    async def _scales(self, server: Served) -> bool:
        """Whether its log-probabilities are of the temperature-scaled softmax: at 1/2, they lie twice as far apart."""
        plain, scaled = [await self.gap(server, temperature) for temperature in (1.0, 0.5)]
        return scaled > 1.5 * plain

    async def _deliver(self, server: Served, push: WeightPush, weights: Weights) -> None:
        """Push `weights` to a server, unless it says that it has them, and have it prove that it samples from them."""
        began = asyncio.get_running_loop().time()
        if server.half_pushed or await self.stamp(server) != weights.stamp:
            server.weights, server.half_pushed = None, True
            await self.pause(server)
            try:
                await server.drain(DRAIN_SECONDS)
                await self.load(server, weights)
            finally:
                await self.resume(server)
            server.half_pushed = False
        reading = await self.probe(server, weights)
        try:
            push.judge(server.name, weights, reading, server.reading)
        except SamplerRefused as error:
            self._mismatch = error
            raise
        server.weights, server.reading, server.known_at = weights, (weights, reading), began

    @abstractmethod
    def request(self, server: Served, request: Request) -> tuple[str, dict[str, Any]]:
        """The path and the body of a request that samples."""

    @abstractmethod
    def part(self, server: Served, reply: Any, request: Request) -> Part:
        """What its reply holds. Raises MalformedReply or SamplerRefused; see `check_part`."""

    @abstractmethod
    async def gap(self, server: Served, temperature: float) -> float:
        """Between the log-probabilities of the two most likely tokens after the token 0, as the server gives them."""

    @abstractmethod
    async def stamp(self, server: Served) -> str:
        """The stamp of the weights that were pushed last; any other text if none were."""

    @abstractmethod
    async def pause(self, server: Served) -> None:
        """End every request with what it has, and begin no other."""

    @abstractmethod
    async def resume(self, server: Served) -> None:
        """Go on; nothing happens if it is not paused."""

    @abstractmethod
    async def load(self, server: Served, weights: Weights) -> None:
        """Have it load the weights, under their stamp, and forget what it cached with others."""

    @abstractmethod
    async def probe(self, server: Served, weights: Weights) -> Reading:
        """Its log-probabilities of the probe."""


def stream_seed(seed: int, number: int) -> int:
    """The seed of part `number` of a response, in [0, 2^63): the same again would repeat the draws of the part before."""
    if number == 0:
        return seed % 2**63
    return int.from_bytes(hashlib.blake2b(f"{seed}:{number}".encode(), digest_size=8).digest()) >> 1


def reply_limit(request: Request) -> int:
    """Bytes that a reply may have: more than any server needs, and no more than what was asked for explains."""
    return (1 << 16) + 64 * len(request.token_ids) + 1024 * request.max_tokens


def choose_model(server: Server, listed: Any, config: ServerConfig, budget: int) -> str:
    """The model to ask for: the configured one, or the only one. Raises SamplerRefused if it is not there or its context is
    too short."""
    cards = {}
    for card in dig(listed, "data") or ():
        if isinstance(dig(card, "id"), str):
            cards[card["id"]] = card
    if not cards:
        raise MalformedReply(f"{server.name}: its answer to /v1/models names no model")
    serves, key = f"{server.name} serves {', '.join(sorted(cards))}", config.named["model"]
    if not config.model and len(cards) > 1:
        raise SamplerRefused(f"{serves}: choose one with {key}")
    name = config.model or next(iter(cards))
    if name not in cards:
        raise SamplerRefused(f"{serves}, not {name}: correct {key}")
    length = cards[name].get("max_model_len")
    if isinstance(length, int) and length < budget:
        raise SamplerRefused(
            f"{server.name} serves contexts of {length} tokens, but {budget} are needed: start it with a longer one, "
            "or lower context.budget (long windows in evaluation.modes need more)"
        )
    return name


def dig(value: Any, *path: str | int) -> Any:
    """What is at `path` inside of parsed JSON; None if it is not there."""
    for key in path:
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError):
            return None
    return value


def check_logprob(value: Any, where: str) -> float:
    """A finite log-probability. Raises MalformedReply."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not LOG_ZERO < value <= ROUNDING:
        raise MalformedReply(f"{where}: {str(value)[:40]} is no log-probability of a sampled token")
    return min(float(value), 0.0)


def check_part(
    server: Server,
    request: Request,
    token_ids: Any,
    logprobs: Any,
    finish: Any,
    *,
    vocab_size: int | None,
    stamp: str | None = None,
) -> Part:
    """A reply's tokens, if they keep the sampler's contract. Raises MalformedReply, or SamplerRefused for what is always so."""
    where = f"{server.name}: a malformed reply"
    size = math.inf if vocab_size is None else vocab_size
    if not isinstance(token_ids, list) or not isinstance(logprobs, list):
        raise MalformedReply(f"{where}: no lists of token ids and log-probabilities")
    if any(type(i) is not int or not 0 <= i < size for i in token_ids):
        raise MalformedReply(f"{where}: token ids outside of the vocabulary")
    if len(logprobs) != len(token_ids):
        raise MalformedReply(f"{where}: {len(logprobs)} log-probabilities for {len(token_ids)} tokens")
    if len(token_ids) > request.max_tokens or (not token_ids and finish != "abort"):
        raise MalformedReply(f"{where}: {len(token_ids)} tokens, asked for 1 to {request.max_tokens}")
    checked = [check_logprob(logprob, where) for logprob in logprobs]
    stops = set(request.stop_token_ids)
    if not stops.isdisjoint(token_ids[:-1]):
        raise MalformedReply(f"{where}: it went on behind a stop token")
    stopped = bool(token_ids) and token_ids[-1] in stops
    match finish:
        case "stop" | "length" | "abort" if stopped:
            return Part(token_ids, checked, "stop", stamp)
        case "stop":
            raise SamplerRefused(
                f"{server.name}: it ended a response without returning the stop token, or at one that nobody asked for"
            )
        case "length" | "abort" if len(token_ids) == request.max_tokens:  # an abort that came too late
            return Part(token_ids, checked, "length", stamp)
        case "length":
            raise SamplerRefused(
                f"{server.name}: it cut a response at {len(token_ids)} tokens, where {request.max_tokens} were asked for: "
                "start it with a longer context"
            )
        case "abort":
            return Part(token_ids, checked, "abort", stamp)
    raise MalformedReply(f"{where}: unknown finish reason {str(finish)[:40]}")
