"""A bash that stays: the working directory, variables and functions of one command are there for the next."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
import time
from contextlib import ExitStack, suppress
from pathlib import Path

from compactionrl.sandboxes.entrance import Place, Porter, door, pipe_to, stragglers
from compactionrl.sandboxes.output import Leftovers, Reader
from compactionrl.sandboxes.protocol import TIMED_OUT, Executed

LOOP = 'while IFS= builtin read -r -u 9; do builtin eval "$REPLY"; done'
"""The shell. Requests come in on descriptor 9, which commands do not get to see, and answers go out there: nothing that a command
prints is taken for an answer, and a command that reads its input finds nothing."""
ENDED = "[the shell has ended; the next command starts in a new one]\n"
KILLED = "[out of time; the shell was killed, the next command starts in a new one]\n"
LENIENCE = 0.3
"""Seconds that a shell has to come back once the processes of a command that ran out of time were killed."""
TICKS = os.sysconf("SC_CLK_TCK")
PRINTABLE = frozenset(range(0x20, 0x7F)) - frozenset(b"\\'")


def quoted(command: str) -> str:
    """The command as one line of bash."""
    data = command.encode(errors="surrogateescape")
    return "$'" + "".join(chr(byte) if byte in PRINTABLE else f"\\x{byte:02x}" for byte in data) + "'"


class Shell:
    """One bash in a place. Commands go one at a time; whoever calls from elsewhere waits."""

    def __init__(self, place: Place, leftovers: Leftovers, *, cwd: str, env: dict[str, str], most: int) -> None:
        self.place, self.leftovers = place, leftovers
        self.cwd, self.env, self.most = cwd, env, most
        self.lock = asyncio.Lock()
        self.control: socket.socket | None = None

    async def run(self, command: str, timeout: float | None) -> Executed:
        if "\0" in command:
            return Executed(stderr="a command cannot hold the character NUL\n", return_code=2)
        async with self.lock:
            if self.control is None:
                await self.open()
            try:
                return await self.answer(command, timeout)
            except asyncio.CancelledError:
                self.close()
                raise

    async def open(self) -> None:
        request = self.place.request("run", command=LOOP, cwd=self.cwd, env=self.env, timeout=None, user=None)
        with ExitStack() as close:
            out, their_out = pipe_to(close)
            err, their_err = pipe_to(close)
            self.streams = [Reader(out, self.most), Reader(err, self.most)]
            null = os.open(os.devnull, os.O_RDONLY)
            close.callback(os.close, null)
            self.control, theirs = socket.socketpair()
            close.enter_context(theirs)
            self.control.setblocking(False)
            self.porter = Porter(door.ask(request, null, their_out, their_err, theirs.fileno(), self.place.holder))
        self.process = int(await self.porter.line())
        self.ended = asyncio.ensure_future(self.porter.line())

    async def answer(self, command: str, timeout: float | None) -> Executed:
        nonce = secrets.token_hex(8)
        began = time.clock_gettime(time.CLOCK_BOOTTIME)
        request = f"eval {quoted(command)} 9<&-; builtin printf '%s %s\\n' {nonce} \"$?\" >&9\n"
        outcome = asyncio.ensure_future(self.outcome(request, nonce))
        try:
            await asyncio.wait({outcome}, timeout=timeout)
            if outcome.done():
                code, note = outcome.result()
            else:
                kill_since(self.process, began)
                await asyncio.wait({outcome}, timeout=LENIENCE)
                code, note = TIMED_OUT, outcome.result()[1] if outcome.done() else KILLED
        finally:
            outcome.cancel()
        if note:
            self.porter.kill()
            await self.ended
            await stragglers(self.streams)
        stdout, stderr = (stream.take() for stream in self.streams)
        if note:
            self.close()
        return Executed(stdout, stderr + note, code)

    async def outcome(self, request: str, nonce: str) -> tuple[int, str]:
        """The return code, and what to say if the shell is gone."""
        answer = asyncio.ensure_future(self.exchange(request, nonce))
        try:
            await asyncio.wait({answer, self.ended}, return_when=asyncio.FIRST_COMPLETED)
            if answer.done() and (code := answer.result()) is not None:
                return code, ""
            return int(await asyncio.shield(self.ended)), ENDED
        finally:
            answer.cancel()

    async def exchange(self, request: str, nonce: str) -> int | None:
        """Send a request and wait for its answer; None if the shell has closed its end. Other lines are none of ours."""
        assert self.control is not None
        loop = asyncio.get_running_loop()
        received = b""
        try:
            await loop.sock_sendall(self.control, request.encode())
            while data := await loop.sock_recv(self.control, 4096):
                *lines, rest = (received + data).split(b"\n")
                received = rest[-4096:]
                for line in lines:
                    answer, _, code = line.decode(errors="replace").partition(" ")
                    if answer == nonce and code.isdigit():
                        return int(code)
        except ConnectionError:
            pass  # the same as its end
        return None

    def close(self) -> None:
        """End the shell, if it runs. What it left in the background stays, and may go on writing."""
        if self.control is None:
            return
        self.control.close()
        self.control = None
        self.ended.cancel()
        self.porter.close()
        for stream in self.streams:
            self.leftovers.keep(stream)


def kill_since(process: int, began: float) -> None:
    """Kill the descendants of a process that began since (in seconds since boot)."""
    for child in children(process):
        kill_since(child, began)
        if started(child) >= began - 1 / TICKS:
            with suppress(ProcessLookupError):  # it may just have ended
                os.kill(child, signal.SIGKILL)


def children(process: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def started(process: int) -> float:
    try:
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]) / TICKS
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
