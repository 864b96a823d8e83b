"""Servers over HTTP: which one is asked, how long and how often, and what its errors mean."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import math
import os
import random
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Generic, TypeVar

import httpx

from compactionrl.config import ConfigError, ServerConfig
from compactionrl.samplers.protocol import SamplerError, SamplerRefused

T = TypeVar("T")
S = TypeVar("S", bound="Server")

LOG = logging.getLogger(__name__)

LONGEST_PAUSE = 30.0
"""Most seconds between two tries of a request, unless the server asks for more."""
LONGEST_DOWN = 60.0
"""Most seconds for which a server that fails is left alone while others are there."""
KEEP_ALIVE = 2.0
"""Seconds that an unused connection is kept: less than servers keep it (5 by default), or they would close it under us."""
SMALL = 1 << 20
"""Bytes of a reply that holds no tokens."""
QUOTED = 500
"""Characters of a server's own words in an error message."""


class ServerUnreachable(SamplerError):
    """No connection, or one that broke off."""


class ServerTimeout(SamplerError):
    """The whole answer was not there in time."""


class ServerFailed(SamplerError):
    """The server says that it cannot answer now (500, 503, 429, ...); `retry_after` seconds may help."""

    def __init__(self, message: str, retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class MalformedReply(SamplerError):
    """An answer that is not what was asked for."""


class CutOff(Exception):
    """This process gave up a request for reasons of its own; it is asked again."""


class Server:
    """One server, as this process knows it. What `ready` asks for is up to its user; a broken connection takes it back."""

    def __init__(self, url: str) -> None:
        address = httpx.URL(url)
        if address.scheme not in ("http", "https") or not address.host:
            raise ConfigError(f"server.urls: {hide_login(url)!r} is no address such as http://127.0.0.1:8000")
        self.url = url.rstrip("/")
        self.name = str(address.copy_with(userinfo=b"")).rstrip("/")
        self.ready = False
        self.failures = 0
        self.failed_at = self.down_until = -math.inf
        self.opened_at = -math.inf
        """When a connection to it was last opened, by the clock of the event loop."""

    def bind(self, in_flight: int) -> None:
        """Forget what belonged to another event loop."""
        self.slots = asyncio.Semaphore(in_flight)
        self.lock = asyncio.Lock()
        self._cuts: set[asyncio.Timeout] = set()
        self.failed_at = self.down_until = self.opened_at = -math.inf

    def worked(self, asked_at: float) -> None:
        """It answered what it was asked at that time."""
        if asked_at > self.failed_at:
            self.failures, self.down_until = 0, -math.inf

    def failed(self, error: SamplerError, asked_at: float, pause: float) -> None:
        """Leave it alone for a while that doubles with every failure; those of requests in flight together are one."""
        if isinstance(error, ServerUnreachable):
            self.ready = False
        now = asyncio.get_running_loop().time()
        if asked_at > self.failed_at:
            self.failures, self.failed_at = self.failures + 1, now
        away = min(pause * 2 ** (self.failures - 1), LONGEST_DOWN)
        self.down_until = max(self.down_until, now + max(away, getattr(error, "retry_after", 0.0)))

    @asynccontextmanager
    async def in_flight(self) -> AsyncIterator[None]:
        """A request that `drain` waits for, and cuts off if need be: it then raises CutOff."""
        try:
            async with asyncio.timeout(None) as cut:
                self._cuts.add(cut)
                try:
                    yield
                finally:
                    self._cuts.discard(cut)
        except TimeoutError:
            if not cut.expired():
                raise
            raise CutOff from None

    async def drain(self, seconds: float) -> None:
        """Until no request is in flight; those that take longer than `seconds` are cut off."""
        clock = asyncio.get_running_loop().time
        patience = clock() + seconds
        while self._cuts:
            if clock() >= patience:
                for cut in self._cuts:
                    if not cut.expired():
                        cut.reschedule(clock())
            await asyncio.sleep(0.01)

    async def trace(self, event: str, _: Any) -> None:
        if event == "connection.connect_tcp.complete":
            self.opened_at = asyncio.get_running_loop().time()


class ServerPool(Generic[S]):
    """The servers of `[server]`, over one HTTP client; what belongs to an event loop is made anew in each.

    Requests of one affinity go to the same server while it answers, the others stand in for it. Each server has at most
    `config.in_flight` of them at a time. `first_pause`: seconds before the first retry; later ones double.
    """

    def __init__(self, config: ServerConfig, kind: type[S], *, first_pause: float = 1.0) -> None:
        if not config.urls:
            raise ConfigError("server.urls is empty: give the address of at least one server")
        self.config = config
        self.first_pause = first_pause
        self.servers = [kind(url) for url in config.urls]
        self.key = read_key(config.key_variable, config.named["key_variable"])
        self._loop: asyncio.AbstractEventLoop | None = None

    async def ask(self, affinity: str, work: Callable[[S], Awaitable[T]]) -> T:
        """What `work` gets from a server, of all that may be asked the first that answers.

        After an error the next living server is asked. Once all have failed, or too often, there is a pause, and at most
        `config.retries` of them; then the last error is raised. SamplerRefused is raised at once.
        """
        self._bind()
        clock = asyncio.get_running_loop().time
        tried: set[S] = set()
        tries = 0
        while True:
            server, chosen_at = self._choose(affinity, tried), clock()
            try:
                async with server.slots:
                    asked_at = clock()
                    if server.failed_at > chosen_at and self._living(tried):
                        continue  # it went down while this request was waiting for its turn
                    result = await work(server)
            except SamplerRefused:
                raise
            except SamplerError as error:
                server.failed(error, asked_at, self.first_pause)
                tried.add(server)
                elsewhere = bool(self._living(tried))
                # To learn that a server is down costs no try, as long as there is another.
                tries += not (elsewhere and isinstance(error, ServerUnreachable))
                if tries > self.config.retries:
                    raise
                if not elsewhere:
                    await self.pause(tries - 1, error)
                    tried.clear()
            else:
                server.worked(asked_at)
                return result

    async def everywhere(self, work: Callable[[S], Awaitable[None]]) -> None:
        """Do `work` with every server that is not known to be down; with one it must succeed, after retries if need be."""
        self._bind()
        for attempt in range(self.config.retries + 1):
            asked_at = asyncio.get_running_loop().time()
            servers = self._living() or self.servers
            results = await asyncio.gather(*(work(server) for server in servers), return_exceptions=True)
            errors = [result for result in results if isinstance(result, BaseException)]
            for error in errors:
                if not isinstance(error, SamplerError) or isinstance(error, SamplerRefused):
                    raise error
            for server, result in zip(servers, results, strict=True):
                if isinstance(result, SamplerError):
                    LOG.warning("going on without a server: %s", result)
                    server.failed(result, asked_at, self.first_pause)
                else:
                    server.worked(asked_at)
            if len(errors) < len(servers):
                return
            if attempt < self.config.retries:
                await self.pause(attempt, errors[0])  # type: ignore[arg-type]
        raise errors[0]

    async def pause(self, number: int, error: SamplerError) -> None:
        """The pause before retry `number` (from 0), or longer if the server asks for it; raises `error` if that is too long."""
        asked = getattr(error, "retry_after", 0.0)
        if asked > self.config.request_seconds:
            raise error
        await asyncio.sleep(max(asked, min(self.first_pause * 2**number, LONGEST_PAUSE)) * random.uniform(1.0, 1.5))

    async def call(
        self,
        server: Server,
        method: str,
        path: str,
        body: Any = None,
        *,
        affinity: str = "",
        limit: int = SMALL,
        seconds: float = math.inf,
        parse: bool = True,
    ) -> Any:
        """The JSON in the answer to one request, of at most `limit` bytes; None if it is empty, or not to be parsed.

        Raises one of the SamplerErrors of this module, or SamplerRefused where trying again cannot help.
        """
        self._bind()
        seconds = min(seconds, self.config.request_seconds)
        try:
            async with (
                asyncio.timeout(seconds),
                self._client.stream(
                    method,
                    server.url + path,
                    content=None if body is None else encoded(body),
                    headers=self._headers(affinity),
                    extensions={"trace": server.trace},
                ) as response,
            ):
                content = await read(response, limit)
        except TimeoutError:
            raise ServerTimeout(self._says(server, f"no whole answer to {path} within {seconds:g} s")) from None
        except httpx.HTTPError as error:
            what = f"{type(error).__name__} {error}".strip()
            raise ServerUnreachable(self._says(server, f"no answer to {path}: {what}")) from None
        if content is None:
            raise MalformedReply(self._says(server, f"its answer to {path} is longer than {limit} bytes"))
        if not response.is_success:
            raise self._failure(server, path, response, content)
        try:
            return json.loads(content) if parse and content.strip() else None
        except (ValueError, RecursionError):
            raise MalformedReply(self._says(server, f"its answer to {path} is no JSON", content)) from None

    async def close(self) -> None:
        if self._loop is asyncio.get_running_loop():
            self._loop = None
            await self._client.aclose()

    def _failure(self, server: Server, path: str, response: httpx.Response, content: bytes) -> SamplerError:
        status = response.status_code
        what = f"{path} failed with {status}"
        if status in (408, 425, 429) or status >= 500:
            return ServerFailed(self._says(server, what, content), retry_after(response.headers.get("retry-after")))
        named = self.config.named
        key = f"set {named['key_variable']} to the environment variable that holds the API key"
        remedy = {401: key, 403: key, 404: f"check {named['urls']} and {named['model']}"}
        return SamplerRefused(
            self._says(server, f"{what}; {remedy.get(status, 'the same request cannot work')}", content)
        )

    def _says(self, server: Server, what: str, content: bytes = b"") -> str:
        """An error message, with the server's own words, on one line and without the key."""
        words = " ".join(self._scrub(content.decode(errors="replace"))[: 8 * QUOTED].split())[:QUOTED]
        words = "".join(c if c.isprintable() else "?" for c in words)
        return f"{server.name}: {self._scrub(what)}" + (f": {words}" if words else "")

    def _scrub(self, text: str) -> str:
        return text.replace(self.key, "***") if self.key else text

    def _headers(self, affinity: str) -> dict[str, str]:
        headers = {"Content-Type": "application/json"}
        headers["Accept-Encoding"] = "identity"  # a bomb must not unfold in our memory
        if affinity:
            headers["X-Session-ID"] = hashlib.sha256(affinity.encode(errors="replace")).hexdigest()[:32]
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        return headers

    def _choose(self, affinity: str, tried: set[S]) -> S:
        """The first in the affinity's order (rendezvous hashing) of those that live and were not tried; else the next that may.

        A server that is to be tried again after a failure gets one request; the others wait for how it does.
        """
        if living := self._living(tried):
            chosen = min(living, key=lambda server: rank(affinity, server.url))
        else:
            rest = [server for server in self.servers if server not in tried]
            chosen = min(rest or self.servers, key=lambda server: server.down_until)
        if chosen.failures:
            until = asyncio.get_running_loop().time() + self.config.connect_seconds
            chosen.down_until = max(chosen.down_until, until)
        return chosen

    def _living(self, tried: Collection[S] = ()) -> list[S]:
        now = asyncio.get_running_loop().time()
        return [server for server in self.servers if server.down_until <= now and server not in tried]

    def _bind(self) -> None:
        loop = asyncio.get_running_loop()
        if loop is self._loop:
            return
        self._loop = loop
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=self.config.connect_seconds),
            limits=httpx.Limits(max_connections=None, keepalive_expiry=KEEP_ALIVE),
        )
        for server in self.servers:
            server.bind(self.config.in_flight)


def rank(affinity: str, url: str) -> bytes:
    return hashlib.blake2b(f"{affinity}\n{url}".encode(errors="replace"), digest_size=8).digest()


def encoded(body: Any) -> bytes:
    """As JSON. Halves of surrogate pairs (file names that are no UTF-8, say), which cannot be sent, become question marks."""
    return json.dumps(body, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode(errors="replace")


async def read(response: httpx.Response, limit: int) -> bytes | None:
    """The body as it was sent; None if it is longer than `limit` bytes."""
    content = bytearray()
    async for chunk in response.aiter_raw():
        content += chunk
        if len(content) > limit:
            return None
    return bytes(content)


def retry_after(header: str | None) -> float:
    """Seconds that a Retry-After header asks for: a number or a date; 0 if it says nothing useful."""
    try:
        seconds = float(header or 0)
    except ValueError:
        try:
            seconds = (parsedate_to_datetime(header or "") - datetime.now(UTC)).total_seconds()
        except (ValueError, TypeError):
            return 0.0
    return seconds if 0 < seconds < math.inf else 0.0


def read_key(variable: str, named_by: str) -> str:
    """The API key in the environment variable that the configuration's key `named_by` names, if it names one.

    It is in no message of ours, whatever is wrong with it.
    """
    if not variable:
        return ""
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ConfigError(f"{named_by}: the environment variable {variable} is not set")
    if not key.isascii() or not key.isprintable():
        raise ConfigError(f"{named_by}: what is in the environment variable {variable} cannot be an API key")
    return key


def hide_login(url: str) -> str:
    return re.sub(r"//[^/@]*@", "//", url)
