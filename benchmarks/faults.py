"""A thousand rollouts on two servers that fail in every way: errors, timeouts, broken connections, garbage, slow answers, kills.

The packaged base plays training tasks of `recipes/demo.toml` with compaction, on two processes of `compactionrl serve`. Between
them and the rollouts stands a proxy that spoils a share of the answers; each server is killed once and started again seconds
later. The same rollouts run once more without faults: what comes out must be the same tokens and rewards. Then some run with a
single retry of a request instead of five, so that rollouts do break down.

python benchmarks/faults.py [--rollouts 1000] [--output docs]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import httpx
import torch

from compactionrl.build import build_chat, build_sampler, build_tasks, model_folder
from compactionrl.config import Config, load_config
from compactionrl.evaluation.modes import for_mode
from compactionrl.rollout.collect import Collected, Job, collect
from compactionrl.rollout.ledger import Rollout
from compactionrl.rollout.loop import RolloutSettings
from compactionrl.samplers.http import Server
from compactionrl.samplers.protocol import SamplerError
from compactionrl.training.batch import build_batch

HERE = Path(__file__).parent
RECIPE = HERE.parent / "recipes" / "demo.toml"
CONCURRENCY = 32
SERVER = {"server.request_seconds": 5.0, "server.connect_seconds": 2.0, "server.in_flight": CONCURRENCY}
SHARES = {
    "status 500": 0.02,
    "status 503": 0.01,
    "status 429 with Retry-After": 0.01,
    "connection closed without an answer": 0.02,
    "connection broken in the middle of the body": 0.02,
    "garbage bytes": 0.01,
    "a web page": 0.01,
    "a log-probability missing": 0.01,
    "NaN for a log-probability": 0.01,
    "slow, but whole": 0.005,
    "slower than the timeout, byte by byte": 0.002,
    "no answer at all": 0.002,
}
"""Of the requests that sample."""
KILLS = (0.3, 0.6)
"""Shares of the rollouts after which the first and the second server are killed."""
AWAY = 4.0
"""Seconds until a killed server is started again."""
HARSH = 0.3
"""Share of the rollouts that run again with a single retry."""
SCRIPT = """
import sys
from pathlib import Path
from compactionrl.config import load_config
from compactionrl.serving.serve import serve
serve(load_config(Path(sys.argv[1])), Path(sys.argv[2]), port=int(sys.argv[3]), name="demo")
"""


class Process:
    """A server of ours, in a process that can be killed and started again on the same port."""

    def __init__(self, model: Path) -> None:
        self.model = model
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-c", SCRIPT, str(RECIPE), str(self.model), str(self.port)]
        self.process = subprocess.Popen(command, stderr=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"})

    def wait(self) -> None:
        while True:
            try:
                httpx.get(f"{self.url}/health", timeout=5)
            except httpx.HTTPError:
                time.sleep(0.1)
            else:
                return

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def sockets(self) -> int:
        """Open connections, the one that listens left out."""
        links = [os.readlink(path) for path in Path(f"/proc/{self.process.pid}/fd").iterdir() if path.is_symlink()]
        known = {
            line.split()[9]
            for line in Path(f"/proc/{self.process.pid}/net/tcp").read_text().splitlines()
            if " 01 " in line
        }
        return sum(link.startswith("socket:") and link[8:-1] in known for link in links)


class Proxy:
    """Stands before a server, in a thread with an event loop of its own, and spoils answers as `plan` says."""

    def __init__(self, upstream: int, plan: Callable[[], str]) -> None:
        self.upstream, self.plan = upstream, plan
        self.met: Counter[str] = Counter()
        self.open: set[asyncio.Task[None]] = set()
        started: threading.Event = threading.Event()
        threading.Thread(target=lambda: asyncio.run(self.run(started)), daemon=True).start()
        started.wait()

    async def run(self, started: threading.Event) -> None:
        self.loop = asyncio.get_running_loop()
        self.listener = await asyncio.start_server(self.connection, "127.0.0.1", 0, backlog=256)
        self.port = self.listener.sockets[0].getsockname()[1]
        started.set()
        with contextlib.suppress(asyncio.CancelledError):
            await self.listener.serve_forever()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.open.add(task)
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                body = await reader.readexactly(int(header(head, b"content-length") or 0))
                fault = self.plan() if head.startswith(b"POST /v1/completions") else ""
                self.met[fault] += bool(fault)
                if not await self.answer(fault, head + body, reader, writer):
                    return
        except (OSError, asyncio.IncompleteReadError):
            pass  # one of the two has gone
        finally:
            self.open.discard(task)
            writer.transport.abort()

    async def answer(
        self, fault: str, request: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        """Answer a request; False if nothing can follow on this connection."""
        match fault:
            case "status 500" | "status 503":
                writer.write(reply(b'{"error": "injected"}', int(fault[-3:])))
            case "status 429 with Retry-After":
                writer.write(reply(b"{}", 429, b"Retry-After: 0.3\r\n"))
            case "connection closed without an answer":
                return False
            case "garbage bytes":
                writer.write(reply(random.randbytes(300)))
            case "a web page":
                writer.write(reply(b"<html><body>502 Bad Gateway</body></html>"))
            case "no answer at all":
                await reader.read(1)  # until the client has had enough
                return False
            case "slower than the timeout, byte by byte":
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
                while not reader.at_eof():
                    writer.write(b" ")
                    await writer.drain()
                    await asyncio.sleep(0.1)
                return False
            case _:
                return await self.forward(fault, request, writer)
        await writer.drain()
        return True

    async def forward(self, fault: str, request: bytes, writer: asyncio.StreamWriter) -> bool:
        upstream, out = await asyncio.open_connection("127.0.0.1", self.upstream)
        try:
            out.write(request)
            head = await upstream.readuntil(b"\r\n\r\n")
            body = await upstream.readexactly(int(header(head, b"content-length") or 0))
        finally:
            out.transport.abort()
        match fault:
            case "connection broken in the middle of the body":
                writer.write(head + body[: len(body) // 2])
                await writer.drain()
                return False
            case "a log-probability missing" | "NaN for a log-probability":
                writer.write(reply(spoil(body, fault)))
            case "slow, but whole":
                writer.write(head)
                for i in range(0, len(body), len(body) // 8 + 1):
                    writer.write(body[i : i + len(body) // 8 + 1])
                    await writer.drain()
                    await asyncio.sleep(0.1)
            case _:
                writer.write(head + body)
        await writer.drain()
        return True


def header(head: bytes, name: bytes) -> bytes:
    found = re.search(rb"(?im)^" + name + rb":\s*(.*?)\r$", head)
    return found[1] if found else b""


def reply(content: bytes, status: int = 200, more: bytes = b"") -> bytes:
    return b"HTTP/1.1 %d Reply\r\n%sContent-Length: %d\r\n\r\n%s" % (status, more, len(content), content)


def spoil(body: bytes, fault: str) -> bytes:
    parsed = json.loads(body)
    logprobs = parsed["choices"][0]["logprobs"]["token_logprobs"]
    if fault == "a log-probability missing":
        logprobs.pop()
    else:
        logprobs[0] = float("nan")
    return json.dumps(parsed).encode()


def plan_of(shares: dict[str, float], seed: int) -> Callable[[], str]:
    """The fault that the next request meets; "" for none."""
    rng = random.Random(seed)
    names, weights = ["", *shares], [1 - sum(shares.values()), *shares.values()]
    return lambda: rng.choices(names, weights)[0]


async def play(
    config: Config, urls: list[str], count: int, after: Callable[[int], Awaitable[None]] | None = None, retries: int = 5
) -> tuple[Collected, Counter[str], float]:
    """The rollouts, by what their requests failed (a try each), and the seconds that all took. `retries`: of a request."""
    server_settings = config.server.model_copy(update={"urls": urls, "retries": retries})
    config = config.model_copy(update={"server": server_settings})
    sampler: Any = build_sampler(config, None)
    failed: Counter[str] = Counter()
    for server in sampler.pool.servers:
        count_failures(server, failed)
    chat, tasks = build_chat(config, model_folder(config)), build_tasks(config)
    settings = RolloutSettings(for_mode(config, "x4"), config.limits)
    jobs = iter([Job("train", i, f"rollout-{i}", seed=i)] for i in range(10 * count))
    background: set[asyncio.Task[None]] = set()
    done = 0

    def ended(_: Rollout) -> None:
        nonlocal done
        done += 1
        if after:
            background.add(asyncio.ensure_future(after(done)))

    began = time.perf_counter()
    async with asyncio.timeout(1800):  # a deadlock would end here
        await sampler.start(config.context.budget)
        found = await collect(
            tasks, sampler, chat, settings, jobs, count, concurrency=CONCURRENCY, retries=2, on_rollout=ended
        )
        await sampler.close()
        await asyncio.gather(*background)
    return found, failed, time.perf_counter() - began


def count_failures(server: Server, failed: Counter[str]) -> None:
    original = server.failed

    def counted(error: SamplerError, *rest: float) -> None:
        failed[type(error).__name__] += 1
        original(error, *rest)

    server.failed = counted  # type: ignore[method-assign]


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def run(count: int) -> dict[str, Any]:
    config = load_config(RECIPE, {"sampling.sampler": "vllm", "server.urls": ["http://127.0.0.1:1"], **SERVER})
    model = model_folder(config)
    processes = [Process(model), Process(model)]
    try:
        for process in processes:
            process.wait()
        plain = asyncio.run(play(config, [process.url for process in processes], count))
        plan = plan_of(SHARES, 0)
        proxies = [Proxy(process.port, plan) for process in processes]
        kills = dict(zip((int(share * count) for share in KILLS), processes, strict=True))
        restarts = []

        async def after(done: int) -> None:
            if process := kills.pop(done, None):
                await asyncio.to_thread(process.kill)
                await asyncio.sleep(AWAY)
                process.start()
                restarts.append(process)

        files = open_files()

        async def main(count: int, *options: Any) -> tuple[Any, ...]:
            found = await play(config, [proxy.url for proxy in proxies], count, *options)
            return *found, len(asyncio.all_tasks()) - 1

        collected, failed, seconds, tasks = asyncio.run(main(count, after))
        met: Counter[str] = sum((proxy.met for proxy in proxies), Counter())
        harsh = asyncio.run(main(int(HARSH * count), None, 1))
        time.sleep(1.0)
        return {
            "collected": collected,
            "failed": failed,
            "seconds": seconds,
            "plain": plain[0],
            "plain seconds": plain[2],
            "met": met,
            "harsh": harsh[0],
            "restarts": len(restarts),
            "tasks": tasks + harsh[-1],
            # The proxies' own connections are in this process, too.
            "files": open_files() - files - sum(len(proxy.open) for proxy in proxies),
            "server sockets": [process.sockets() for process in processes],
            "rows": asyncio.run(rows_left(config, [process.url for process in processes])),
            "trained": build_batch(collected.rollouts + harsh[0].rollouts, config.train).accounting,
        }
    finally:
        for process in processes:
            process.kill()


async def rows_left(config: Config, urls: list[str]) -> list[int]:
    """Requests at a time that each server still answers, of as many as it has rows."""
    body = {"model": "demo", "prompt": [5, 6, 7], "max_tokens": 4, "seed": 0}
    found = []
    async with httpx.AsyncClient(timeout=20) as client:
        for url in urls:
            requests = (
                client.post(f"{url}/v1/completions", json=body, headers={"X-Session-ID": f"check-{i}"})
                for i in range(config.sampling.concurrency)
            )
            found.append(sum(reply.status_code == 200 for reply in await asyncio.gather(*requests)))
    return found


def windows(rollout: Rollout) -> list[list[int]]:
    return [window.token_ids for window in rollout.windows]


def judge(r: dict[str, Any]) -> dict[str, str]:
    """How many rollouts have the tokens that they have without faults. Raises AssertionError if anything is not as it must be."""
    for found in (r["collected"], r["harsh"]):
        assert {rollout.end for rollout in found.rollouts} <= {"submitted", "turns", "budget", "time"}
        assert all(rollout.end == "error" and rollout.error and not rollout.reward for rollout in found.dropped)
        assert all(segment.excluded for rollout in found.dropped for w in rollout.windows for segment in w.segments)
    assert r["tasks"] == 0
    assert r["files"] <= 0
    plain = {rollout.task_id: rollout for rollout in r["plain"].rollouts}
    result = {}
    for name in ("collected", "harsh"):
        first = [rollout for rollout in r[name].rollouts if "-retry" not in rollout.id and rollout.task_id in plain]
        same = [rollout for rollout in first if windows(rollout) == windows(plain[rollout.task_id])]
        assert all(rollout.reward == plain[rollout.task_id].reward for rollout in same)
        result[name] = f"{len(same)} of {len(first)}"
    return result


def fates(found: Collected, same: str) -> dict[str, str]:
    """What became of the rollouts."""
    ends = Counter(rollout.end for rollout in found.rollouts)
    return {
        "rollouts": f"{len(found.rollouts)}",
        **{end: f"{ends[end]}" for end in ("submitted", "turns", "budget", "time")},
        "error, tried again": f"{found.retried}",
        "error, dropped and replaced by another task's": f"{len(found.dropped)}",
        "mean reward": f"{fmean(rollout.reward or 0.0 for rollout in found.rollouts):.3f}",
        "the very tokens that it has without faults, of those not tried again": same,
    }


def page(r: dict[str, Any], same: dict[str, str]) -> str:
    columns = [fates(r["plain"], ""), fates(r["collected"], same["collected"]), fates(r["harsh"], same["harsh"])]
    causes = Counter(str(rollout.error).partition(":")[0] for rollout in r["collected"].dropped + r["harsh"].dropped)
    rows = load_config(RECIPE).sampling.concurrency
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    lines = [
        "# Rollouts on servers that fail",
        "",
        f"Measured by `benchmarks/faults.py` on {os.cpu_count()} cores: {len(r['collected'].rollouts)} rollouts,",
        f"{CONCURRENCY} at a time, on two processes of `compactionrl serve`, each behind a proxy that spoils answers; each was",
        f"killed once and started again {AWAY:g} s later. A request may take {SERVER['server.request_seconds']:g} s.",
        f"{r['seconds']:.0f} s in all, {r['plain seconds']:.0f} s for the same rollouts without faults; {memory:.0f} MB.",
        "",
        "| injected | times |",
        "|---|---|",
        *(f"| {name} | {r['met'][name]} |" for name in SHARES),
        f"| a server killed, and started again | {r['restarts']} |",
        "",
        "| what the sampler called it, and overcame | times |",
        "|---|---|",
        *(f"| `{name}` | {times} |" for name, times in sorted(r["failed"].items())),
        "",
        "| what became of the rollouts | without faults | with faults | with faults, a single retry |",
        "|---|---|---|---|",
        *(f"| {name} | {' | '.join(column[name] for column in columns)} |" for name in columns[0]),
        "",
        *(
            ["Dropped for: " + ", ".join(f"`{name}` {n}" for name, n in causes.most_common()) + ".", ""]
            if causes
            else []
        ),
        "Whatever the servers answered, a rollout has the tokens that it has without faults, or it ended as an error. (A",
        "server's rounding depends a little on which rollouts it computes together; that may change a token.) Of those that",
        "ended as an error, no token is trained and no reward counted; of the others,",
        f"{r['trained']['trained']} of {r['trained']['sampled']} sampled tokens are.",
        "",
        "| left behind | |",
        "|---|---|",
        f"| tasks in the event loop | {r['tasks']} |",
        f"| open files and connections of the client | {max(0, r['files'])} |",
        f"| open connections of the servers | {', '.join(map(str, r['server sockets']))} |",
        f"| rows that the servers still fill at a time, of {rows} | {', '.join(map(str, r['rows']))} |",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rollouts", type=int, default=1000)
    parser.add_argument("--output", type=Path, default=HERE.parent / "docs", metavar="FOLDER")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    result = run(arguments.rollouts)
    text = page(result, judge(result))
    (arguments.output / "faults.md").write_text(text)
    print(text, file=sys.stderr)


if __name__ == "__main__":
    main()
