"""A bash that stays: the working directory, variables and functions of one command are there for the next."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
from collections.abc import Collection
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from compactionrl.sandboxes.entrance import Place, Porter, door, pipe_to, stragglers
from compactionrl.sandboxes.output import Leftovers, Reader
from compactionrl.sandboxes.protocol import TIMED_OUT, Executed

LOOP = 'while IFS= builtin read -r -u 9; do builtin eval "$REPLY"; done'
"""The shell. Requests come in on descriptor 9, and answers go out there; commands are in the file behind descriptor 10. Commands
do not get to see either: nothing that they print is taken for an answer, and who reads its input finds nothing."""
TAKE = "IFS= builtin read -r -d '' < /proc/self/fd/10; builtin eval \"$REPLY\" 9<&- 10<&-"
ANSWER = "builtin printf '%s %s\\n' {nonce} \"$?\" >&9"
ENDED = "[the shell has ended; the next command starts in a new one]\n"
CLOSED = "[the shell has closed its output; the next command starts in a new one]\n"
KILLED = "[out of time; the shell was killed, the next command starts in a new one]\n"
LENIENCE = 0.3
"""Seconds that a shell has to come back once the processes of a command that ran out of time were killed."""


class Shell:
    """One bash in a place. Commands go one at a time; whoever calls from elsewhere waits."""

    def __init__(self, place: Place, leftovers: Leftovers, *, cwd: str, env: dict[str, str], most: int) -> None:
        self.place, self.leftovers = place, leftovers
        self.cwd, self.env, self.most = cwd, env, most
        self.lock = asyncio.Lock()
        self.control: socket.socket | None = None
        self.ended: asyncio.Future[str]

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
            self.file = os.memfd_create("command")
            control = (theirs.fileno(), self.file)
            self.porter = Porter(door.ask(request, null, their_out, their_err, *control, self.place.holder))
        self.ended = asyncio.get_running_loop().create_future()
        try:
            self.process = int(await self.porter.line())
        except BaseException:
            self.close()
            raise
        self.ended = asyncio.ensure_future(self.porter.line())

    async def answer(self, command: str, timeout: float | None) -> Executed:
        nonce = secrets.token_hex(8)
        before = children(self.process)
        os.ftruncate(self.file, 0)
        os.pwrite(self.file, command.encode(errors="replace"), 0)
        request = f"{TAKE}; {ANSWER.format(nonce=nonce)}\n"
        outcome = asyncio.ensure_future(self.outcome(request, nonce))
        try:
            await asyncio.wait({outcome}, timeout=timeout)
            if outcome.done():
                code, note = outcome.result()
            else:
                kill_tree(self.process, spared=before)
                await asyncio.wait({outcome}, timeout=LENIENCE)
                code, note = TIMED_OUT, outcome.result()[1] if outcome.done() else KILLED
        finally:
            outcome.cancel()
        if not note and any(stream.ended.is_set() for stream in self.streams):
            note = CLOSED
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
            waiting: list[asyncio.Future[Any]] = [answer, self.ended]
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
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
        os.close(self.file)
        self.ended.cancel()
        self.porter.close()
        for stream in self.streams:
            self.leftovers.keep(stream)


def kill_tree(process: int, spared: Collection[int] = ()) -> None:
    """Kill the descendants of a process, but for the children that are spared and what is below them."""
    for child in set(children(process)) - set(spared):
        kill_tree(child)
        with suppress(ProcessLookupError):  # it may just have ended
            os.kill(child, signal.SIGKILL)


def children(process: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []
