"""The way into a sandbox: our end of `door`, one for all sandboxes of a process."""

from __future__ import annotations

import asyncio
import atexit
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from compactionrl.sandboxes.output import Leftovers, Reader
from compactionrl.sandboxes.protocol import Executed, SandboxError
from compactionrl.sandboxes.seccomp import program

STARTER = "import sys; sys.path.append(sys.argv[1]); from compactionrl.sandboxes.door import main; main()"
SOURCE = Path(__file__).parents[2]
STRAGGLERS = 0.02
"""Seconds that we wait for the end of a command's output when the command has ended; who still holds it is in the background."""


@dataclass(frozen=True)
class Place:
    """Where commands are let in. `holder`: a descriptor of the process whose namespaces they join."""

    holder: int
    namespaces: tuple[str, ...]
    capabilities: tuple[int, ...] = ()
    rlimits: dict[str, int] = field(default_factory=dict)
    groups: tuple[str, ...] = ()

    def request(self, do: str, **fields: Any) -> dict[str, Any]:
        return {
            "do": do,
            "namespaces": self.namespaces,
            "capabilities": self.capabilities,
            "rlimits": self.rlimits,
            "groups": self.groups,
            "seccomp": program().hex() if self.namespaces else "",
            "user": None,
            **fields,
        }


class Door:
    """Our end. The other one lives exactly as long as this process, and is made anew if something ends it before."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.owner = 0
        self.socket: socket.socket | None = None
        self.process: subprocess.Popen[bytes] | None = None

    def ask(self, request: dict[str, Any], *descriptors: int) -> socket.socket:
        """Our end of the porter's socket. The descriptors stay the caller's to close."""
        ours, theirs = socket.socketpair()
        with ExitStack() as close:
            close.enter_context(theirs)
            file = os.memfd_create("request")
            close.callback(os.close, file)
            os.write(file, json.dumps(request).encode())
            passed = [file, theirs.fileno(), *descriptors]
            with self.lock:
                try:
                    socket.send_fds(self.opened(), [b"\0"], passed)
                except (BrokenPipeError, ConnectionResetError):
                    self.owner = 0
                    socket.send_fds(self.opened(), [b"\0"], passed)
        ours.setblocking(False)
        return ours

    def opened(self) -> socket.socket:
        if self.socket is None or self.owner != os.getpid():  # a forked child has a door of its own
            self.socket, theirs = socket.socketpair()
            self.owner = os.getpid()
            with theirs:
                self.process = subprocess.Popen(
                    [sys.executable, "-I", "-S", "-c", STARTER, str(SOURCE)],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    cwd="/",
                    env={},
                    start_new_session=True,
                )
        return self.socket

    def close(self) -> None:
        if self.socket and self.process and self.owner == os.getpid():
            self.socket.close()
            self.process.wait(timeout=10)
            self.socket = None


door = Door()
atexit.register(door.close)


class Porter:
    """Our end of the socket of one command."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.received = b""

    async def line(self) -> str:
        loop = asyncio.get_running_loop()
        while b"\n" not in self.received:
            try:
                data = await loop.sock_recv(self.connection, 4096)
            except ConnectionError:
                data = b""
            if not data:
                raise SandboxError("the process that watches over a command was killed")
            self.received += data
        line, _, self.received = self.received.partition(b"\n")
        text = line.decode(errors="replace")
        if text.startswith("!"):
            raise SandboxError(text[2:])
        return text

    def kill(self) -> None:
        """Have the command killed, if it still runs; then `line` says how it ended."""
        with suppress(OSError):  # the porter may have gone already
            self.connection.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Kills the command if it still runs."""
        self.connection.close()


def pipe_to(close: ExitStack) -> tuple[int, int]:
    """A new pipe; the end for the command is closed with `close`."""
    ours, theirs = os.pipe()
    close.callback(os.close, theirs)
    return ours, theirs


async def run(
    place: Place,
    command: str,
    *,
    cwd: str,
    env: dict[str, str],
    timeout: float | None,
    user: str | int | None,
    most: int,
    leftovers: Leftovers,
) -> Executed:
    """A command as a new process. See `Sandbox.exec`; `most`: bytes kept of each stream."""
    if "\0" in command:
        return Executed(stderr="a command cannot hold the character NUL\n", return_code=2)
    request = place.request("run", command=command, cwd=cwd, env=env, timeout=timeout, user=user)
    with ExitStack() as close:
        out, their_out = pipe_to(close)
        err, their_err = pipe_to(close)
        streams = [Reader(out, most), Reader(err, most)]
        close_streams = ExitStack()
        for stream in streams:
            close_streams.callback(stream.close)
        with close_streams:
            null = os.open(os.devnull, os.O_RDONLY)
            close.callback(os.close, null)
            porter = Porter(door.ask(request, null, their_out, their_err, place.holder))
            close.close()
            try:
                await porter.line()
                code = int(await porter.line())
            finally:
                porter.close()
            await stragglers(streams)
            stdout, stderr = (stream.take() for stream in streams)
            close_streams.pop_all()
    for stream in streams:
        leftovers.keep(stream)
    return Executed(stdout, stderr, code)


async def stragglers(streams: Sequence[Reader]) -> None:
    for stream in streams:
        stream.drain()
    waiting = [asyncio.ensure_future(stream.ended.wait()) for stream in streams if not stream.ended.is_set()]
    if waiting:
        _, late = await asyncio.wait(waiting, timeout=STRAGGLERS)
        for task in late:
            task.cancel()


async def carry(place: Place, request: dict[str, Any], descriptor: int, *, inwards: bool) -> None:
    """Let `door.carry` read from, or write to, the descriptor, which is closed. Raises `SandboxError` as it says."""
    null = os.open(os.devnull, os.O_RDWR)
    try:
        streams = (descriptor, null) if inwards else (null, descriptor)
        porter = Porter(door.ask(request, *streams, null, place.holder))
    finally:
        os.close(null)
        os.close(descriptor)
    try:
        await porter.line()
    finally:
        porter.close()
