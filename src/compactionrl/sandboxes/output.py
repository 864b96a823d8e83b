"""What commands print: read as it comes, kept up to a cap."""

from __future__ import annotations

import asyncio
import os
from collections import deque

READ = 1 << 16
PAUSE = 0.001
"""Seconds between reads once a stream is over its cap: endless output costs us little, and the command waits for us."""
IDLE_PAUSE = 0.05
MOST_LEFT = 32


class Capture:
    """The head and the tail of a stream, at most `most` bytes together, whatever its length."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.head = bytearray()
        self.tail: deque[bytes] = deque()
        self.in_tail = 0
        self.total = 0

    def add(self, data: bytes) -> None:
        self.total += len(data)
        room = self.most - self.most // 2 - len(self.head)
        self.head += data[:room]
        if rest := data[room:]:
            self.tail.append(rest)
            self.in_tail += len(rest)
        while self.tail and self.in_tail - len(self.tail[0]) >= self.most // 2:
            self.in_tail -= len(self.tail.popleft())

    @property
    def over(self) -> bool:
        return self.total > self.most

    def text(self) -> str:
        tail = b"".join(self.tail)
        if not self.over:
            return (bytes(self.head) + tail).decode(errors="replace")
        tail = tail[len(tail) - self.most // 2 :]
        gone = self.total - len(self.head) - len(tail)
        return f"{self.head.decode(errors='replace')}\n[{gone} bytes left out]\n{tail.decode(errors='replace')}"


class Reader:
    """Reads a pipe into a capture while the event loop runs."""

    def __init__(self, descriptor: int, most: int) -> None:
        self.descriptor = descriptor
        self.capture = Capture(most)
        self.ended = asyncio.Event()
        self.pause = PAUSE
        self.loop = asyncio.get_running_loop()
        self.timer: asyncio.TimerHandle | None = None
        os.set_blocking(descriptor, False)
        self.listen()

    def listen(self) -> None:
        self.timer = None
        self.loop.add_reader(self.descriptor, self.ready)

    def ready(self) -> None:
        if self.read() and self.capture.over:
            self.loop.remove_reader(self.descriptor)
            self.timer = self.loop.call_later(self.pause, self.listen)

    def read(self) -> bool:
        """Whether there was anything to read."""
        try:
            data = os.read(self.descriptor, READ)
        except BlockingIOError:
            return False
        if data:
            self.capture.add(data)
        else:
            self.loop.remove_reader(self.descriptor)
            self.ended.set()
        return bool(data)

    def drain(self) -> None:
        """Take what is in the pipe now. A pipe's size bounds it, whatever is written meanwhile."""
        for _ in range(64):
            if self.ended.is_set() or not self.read():
                break

    def take(self) -> str:
        """What was read since the last time."""
        self.drain()
        text, self.capture = self.capture.text(), Capture(self.capture.most)
        return text

    def idle(self) -> None:
        """Go on reading, at leisure and for nothing, so that who still writes is neither stopped nor killed."""
        self.capture, self.pause = Capture(0), IDLE_PAUSE

    def close(self) -> None:
        if self.descriptor < 0:
            return
        if self.timer:
            self.timer.cancel()
        if not self.loop.is_closed():
            self.loop.remove_reader(self.descriptor)
        os.close(self.descriptor)
        self.descriptor = -1
        self.ended.set()


class Leftovers:
    """Pipes that processes in the background still hold when their command has ended; the oldest go first."""

    def __init__(self) -> None:
        self.readers: deque[Reader] = deque()

    def keep(self, reader: Reader) -> None:
        if reader.ended.is_set():
            reader.close()
            return
        reader.idle()
        for ended in [each for each in self.readers if each.ended.is_set()]:
            ended.close()
            self.readers.remove(ended)
        self.readers.append(reader)
        if len(self.readers) > MOST_LEFT:
            self.readers.popleft().close()

    def close(self) -> None:
        while self.readers:
            self.readers.pop().close()
