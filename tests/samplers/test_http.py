"""The pool of servers: who is asked, how often and how long, and what every kind of trouble is called."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest
from fake_servers import FakeVLLM, Fault, disconnect, drip, flood, half, hang, raw, running, settings, status

from compactionrl.config import ConfigError, ServerConfig
from compactionrl.samplers.http import (
    MalformedReply,
    Server,
    ServerFailed,
    ServerPool,
    ServerTimeout,
    ServerUnreachable,
    rank,
    retry_after,
)
from compactionrl.samplers.protocol import SamplerError, SamplerRefused

BODY = {
    "model": "tiny",
    "prompt": [1, 2],
    "max_tokens": 2,
    "temperature": 1.0,
    "seed": 1,
    "stop_token_ids": [],
    "logprobs": 0,
}

FAULTS: dict[str, tuple[Fault, type[SamplerError]]] = {
    "500": (status(500), ServerFailed),
    "503": (status(503), ServerFailed),
    "429": (status(429), ServerFailed),
    "disconnect": (disconnect, ServerUnreachable),
    "half a body": (half, ServerUnreachable),
    "no answer": (hang, ServerTimeout),
    "slow drip": (drip, ServerTimeout),
    "garbage": (raw(b"\x00\xff\xfe garbage \x80"), MalformedReply),
    "a web page": (raw(b"<html>proxy</html>"), MalformedReply),
    "deep nesting": (raw(b"[" * 500_000), MalformedReply),
    "a number of a million digits": (raw(b"1" * 1_000_000), MalformedReply),
    "endless": (flood, MalformedReply),
}


def pool(*servers: FakeVLLM, first_pause: float = 0.01, **options: Any) -> ServerPool[Server]:
    return ServerPool(settings(*servers, **options), Server, first_pause=first_pause)


def ask(pool: ServerPool[Server], affinity: str = "rollout") -> Callable[[], Any]:
    async def work(server: Server) -> str:
        await pool.call(server, "POST", "/v1/completions", BODY, affinity=affinity)
        return server.url

    return lambda: pool.ask(affinity, work)


def run(pool: ServerPool[Server], *affinities: str) -> list[Any]:
    async def main() -> list[Any]:
        try:
            return await asyncio.gather(*(ask(pool, affinity)() for affinity in affinities))
        finally:
            await pool.close()

    return asyncio.run(main())


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_overcome(name: str) -> None:
    server = FakeVLLM()
    with running(server):
        server.faults.extend([FAULTS[name][0]] * 2)
        assert run(pool(server, request_seconds=0.5), "a") == [server.url]
        assert len(server.samples) == 3


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_that_stays_is_named(name: str) -> None:
    fault, kind = FAULTS[name]
    server = FakeVLLM()
    with running(server):
        server.faults.extend([fault] * 9)
        with pytest.raises(kind) as caught:
            run(pool(server, retries=1, request_seconds=0.3), "a")
        assert type(caught.value) is kind
        assert caught.value.retryable
        assert server.url in str(caught.value)
        assert len(server.samples) == 2


@pytest.mark.parametrize(
    ("code", "word"), [(400, "on purpose"), (401, "key_variable"), (404, "server.model"), (307, "307")]
)
def test_what_no_retry_can_mend_is_refused_at_once(code: int, word: str) -> None:
    server = FakeVLLM()
    with running(server):
        server.faults.append(status(code))
        with pytest.raises(SamplerRefused, match=word):
            run(pool(server), "a")
        assert len(server.samples) == 1


def test_a_server_that_is_down_costs_nothing_while_another_lives() -> None:
    servers = [FakeVLLM(), FakeVLLM()]
    down, living = servers
    names = [f"rollout-{i}" for i in range(16)]
    with running(living):
        down.stop()
        assert run(pool(*servers, retries=0), *names) == [living.url] * 16


def test_all_servers_down_is_unreachable() -> None:
    servers = [FakeVLLM(), FakeVLLM()]
    for server in servers:
        server.stop()
    with pytest.raises(ServerUnreachable):
        run(pool(*servers, retries=1), "a")


@pytest.mark.parametrize("which", [0, 1])
def test_whichever_server_comes_back_during_the_pauses_answers(which: int) -> None:
    servers = [FakeVLLM(), FakeVLLM()]
    for server in servers:
        server.stop()

    async def main() -> str:
        p = pool(*servers, retries=6, first_pause=0.05)
        asked = asyncio.create_task(ask(p)())
        await asyncio.sleep(0.2)
        servers[which].start()
        try:
            return await asked
        finally:
            await p.close()

    with running(servers[which]):
        assert asyncio.run(main()) == servers[which].url


def test_rollouts_keep_to_their_server_and_come_back_to_it() -> None:
    servers = [FakeVLLM() for _ in range(3)]
    names = [f"rollout-{i}" for i in range(45)]
    with running(*servers):

        async def main() -> tuple[list[Any], ...]:
            p = pool(*servers)

            async def everyone() -> list[Any]:
                return await asyncio.gather(*(ask(p, name)() for name in names))

            before, again = await everyone(), await everyone()
            servers[0].stop()
            during = await everyone()
            servers[0].start()
            await asyncio.sleep(0.05)
            back = [await everyone() for _ in range(3)][-1]
            await p.close()
            return before, again, during, back

        before, again, during, back = asyncio.run(main())
    assert before == again == back
    assert min(Counter(before).values()) > 2  # of 15 each: the chance of fewer is 1e-6
    moved = {i for i, (x, y) in enumerate(zip(before, during, strict=True)) if x != y}
    assert moved == {i for i, url in enumerate(before) if url == servers[0].url}
    assert len(set(during)) == 2


def test_requests_name_their_rollout_without_telling_its_name() -> None:
    server = FakeVLLM()
    with running(server):
        run(pool(server), "evil\r\nX-Other: 1", "evil\r\nX-Other: 1", "other ☃")
    sessions = [headers["X-Session-ID"] for headers in server.headers]
    assert sorted(Counter(sessions).values()) == [1, 2]
    assert all(session.isalnum() for session in sessions)
    assert not any("X-Other" in headers for headers in server.headers)


def test_no_server_gets_more_than_it_may() -> None:
    server = FakeVLLM(token_seconds=0.005)
    with running(server):
        run(pool(server, in_flight=3), *(f"r{i}" for i in range(12)))
        assert server.most_sampling == 3


def test_who_waits_for_a_server_that_hangs_is_served_by_another() -> None:
    hanging, other = FakeVLLM(), FakeVLLM()
    with running(hanging, other):
        hanging.faults.extend([hang] * 99)
        mine = [f"r{i}" for i in range(99) if rank(f"r{i}", hanging.url) < rank(f"r{i}", other.url)][:8]
        began = time.perf_counter()
        assert run(pool(hanging, other, in_flight=2, request_seconds=0.5), *mine) == [other.url] * 8
        assert (
            len(hanging.samples) <= 3
        )  # the two that had their turn, and perhaps one that finds out whether it is back
        assert time.perf_counter() - began < 10


def test_a_server_is_given_the_time_it_asks_for() -> None:
    server = FakeVLLM()
    with running(server):
        server.faults.append(status(429, Retry_After="0.4"))
        began = time.perf_counter()
        run(pool(server), "a")
        assert time.perf_counter() - began >= 0.4


def test_another_server_answers_while_one_asks_for_time() -> None:
    servers = [FakeVLLM(), FakeVLLM()]
    with running(*servers):
        asks, other = servers
        asks.faults.append(status(503, Retry_After="15"))
        names = [f"r{i}" for i in range(99) if rank(f"r{i}", asks.url) < rank(f"r{i}", other.url)][:4]
        p = pool(*servers, retries=1)
        began = time.perf_counter()
        assert run(p, names[0]) == [other.url]
        assert time.perf_counter() - began < 10


def test_nobody_waits_longer_than_a_request_may_take() -> None:
    server = FakeVLLM()
    with running(server):
        server.faults.append(status(429, Retry_After="3600"))
        with pytest.raises(ServerFailed, match="429"):
            run(pool(server), "a")


def test_retry_after_is_seconds_or_a_date() -> None:
    assert retry_after("7") == 7
    soon = format_datetime(datetime.now(UTC) + timedelta(seconds=30), usegmt=True)
    assert 25 < retry_after(soon) <= 30
    assert [retry_after(text) for text in (None, "", "soon", "-5", "nan", "inf", "Mon, 99 Foo")] == [0.0] * 7


@pytest.mark.parametrize("code", [401, 500, 200])
def test_the_key_is_sent_and_never_told(code: int, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    key = "sk-very-secret"
    monkeypatch.setenv("MY_KEY", f" {key}\n")
    server = FakeVLLM(key=key if code != 401 else "another")
    with running(server):
        leak = f"Bearer {key} was not liked, {key}!"
        server.faults.extend([raw(leak.encode()) if code == 200 else status(code, " " * 3985 + leak)] * 9)
        with pytest.raises(SamplerError) as caught:
            run(pool(server, key_variable="MY_KEY", retries=1), "a")
    assert server.headers[0]["Authorization"] == f"Bearer {key}"
    shown = [str(caught.value), repr(caught.value), caplog.text]
    assert not any(key[:6] in text for text in shown)
    assert code == 500 or "***" in shown[0]  # there, what is quoted ends in the middle of the key


@pytest.mark.parametrize("value", [None, "", "  ", "two\nlines", "schlüssel"])
def test_a_key_that_is_none_is_refused_by_its_variable(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MY_KEY", raising=False)
    if value is not None:
        monkeypatch.setenv("MY_KEY", value)
    with pytest.raises(ConfigError, match="MY_KEY") as caught:
        ServerPool(ServerConfig(urls=["http://127.0.0.1:1"], key_variable="MY_KEY"), Server)
    assert "schl" not in str(caught.value)


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host", "http://", "", "file:///etc/passwd"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"server\.urls"):
        ServerPool(ServerConfig(urls=[url]), Server)


def test_a_login_in_an_address_is_not_told() -> None:
    server = FakeVLLM()
    server.stop()
    url = server.url.replace("//", "//me:secret@")
    with pytest.raises(ServerUnreachable) as caught:
        run(ServerPool(ServerConfig(urls=[url], retries=0), Server), "a")
    assert "secret" not in str(caught.value)


def test_no_servers_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"server\.urls"):
        ServerPool(ServerConfig(), Server)


def test_every_event_loop_gets_its_own_connections() -> None:
    server = FakeVLLM()
    with running(server):
        p = pool(server)
        assert [run(p, "a", "b") for _ in range(3)] == [[server.url] * 2] * 3
        abandoned = asyncio.run(ask(p)())  # without close
        assert run(p, "a") == [abandoned]


def test_a_server_that_fails_is_left_alone_longer_and_longer() -> None:
    async def main() -> list[float]:
        server = Server("http://127.0.0.1:1")
        server.bind(1)
        now = asyncio.get_running_loop().time
        away = []
        for _ in range(8):
            asked_at = now()
            for _ in range(5):  # those in flight together are one failure
                server.failed(ServerFailed("x"), asked_at, 1.0)
            away.append(server.down_until - now())
        server.worked(asked_at)  # an answer to what was asked before says nothing new
        assert server.down_until > now()
        server.worked(now())
        assert server.down_until < now()
        return away

    assert asyncio.run(main()) == pytest.approx([1, 2, 4, 8, 16, 32, 60, 60], abs=0.1)
