"""Files and folders as a stream, written and read without ever following a link.

Each entry is a line of JSON, `{"path": [names], "mode": bits, "size": bytes}`, then its bytes; a folder has no size, a link has
a target instead. An empty line ends the stream; anything else is a stream that was cut. `pack` opens what it reads, and `unpack`
what it writes, one name at a time below an open folder with O_NOFOLLOW: whoever swaps a folder for a link gets an error.
Only folders and regular files are carried, and links where asked for (as links, into a sandbox). Fifos, sockets and devices
are left out; hard links become files; setuid bits are dropped.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

CHUNK = 1 << 18
MOST_ENTRIES = 100_000
DEEPEST = 100
LONGEST_HEADER = 1 << 17
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
WRITE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class TransferError(OSError):
    """What is not carried: too large, too deep, not a file, a stream that was cut, a name that leads elsewhere."""


@contextmanager
def opened(path: str | Path, flags: int, folder: int | None = None) -> Iterator[int]:
    descriptor = os.open(path, flags, dir_fd=folder)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def pack_file(path: str | Path, name: str, out: BinaryIO, most: int) -> None:
    """One regular file, whose path may be a link, under `name`; `most`: bytes that are taken at most."""
    with opened(path, READ & ~os.O_NOFOLLOW) as file:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise TransferError(f"{path} is no regular file")
        Packer(out, most).file([name], file, status)
    out.write(b"\n")


def pack_folder(path: str | Path, out: BinaryIO, most: int, *, links: bool) -> None:
    """Everything below a folder, whose path may be a link. `links`: also the links below it, as links."""
    with opened(path, FOLDER & ~os.O_NOFOLLOW) as folder:
        Packer(out, most, links).folder([], folder)
    out.write(b"\n")


class Packer:
    def __init__(self, out: BinaryIO, most: int, links: bool = False) -> None:
        self.out, self.left, self.entries, self.links = out, most, 0, links

    def head(self, path: list[str], **fields: object) -> None:
        self.entries += 1
        if self.entries > MOST_ENTRIES or len(path) > DEEPEST:
            raise TransferError(f"more than {MOST_ENTRIES} files, or folders more than {DEEPEST} deep")
        self.out.write(json.dumps({"path": path, **fields}).encode() + b"\n")

    def folder(self, path: list[str], folder: int) -> None:
        for name in sorted(os.listdir(folder)):
            status = os.stat(name, dir_fd=folder, follow_symlinks=False)
            if stat.S_ISDIR(status.st_mode):
                with opened(name, FOLDER, folder) as inner:
                    self.head([*path, name], mode=stat.S_IMODE(status.st_mode))
                    self.folder([*path, name], inner)
            elif stat.S_ISREG(status.st_mode):
                with opened(name, READ, folder) as file:
                    if stat.S_ISREG((status := os.fstat(file)).st_mode):
                        self.file([*path, name], file, status)
            elif stat.S_ISLNK(status.st_mode) and self.links:
                self.head([*path, name], link=os.readlink(name, dir_fd=folder))

    def file(self, path: list[str], file: int, status: os.stat_result) -> None:
        self.left -= status.st_size
        if self.left < 0:
            raise TransferError(f"more bytes than are carried at most, at {'/'.join(path)}")
        self.head(path, mode=stat.S_IMODE(status.st_mode), size=status.st_size)
        for size in chunks(status.st_size):
            part = os.read(file, size)
            self.out.write(part.ljust(size, b"\0"))  # it may have shrunk meanwhile


def chunks(size: int) -> Iterator[int]:
    while size > 0:
        yield min(size, CHUNK)
        size -= CHUNK


def unpack(stream: BinaryIO, folder: str | Path, most: int, *, links: bool, only: str | None = None) -> None:
    """Write the entries below `folder`, which is made if it is missing. What stands in the way of an entry is replaced.

    `only`: the one name that the stream may hold, a file's. `most`: bytes that are written at most.
    """
    os.makedirs(folder, exist_ok=True)
    entries = 0
    with opened(folder, FOLDER & ~os.O_NOFOLLOW) as root:
        while (line := stream.readline(LONGEST_HEADER)) != b"\n":
            entries += 1
            if not line.endswith(b"\n") or entries > MOST_ENTRIES:
                raise TransferError("the stream was cut, or holds too many entries")
            head = json.loads(line)
            path = checked(head["path"])
            if only is not None and (path != [only] or "size" not in head):
                raise TransferError(f"the stream holds {'/'.join(path)}, not {only}")
            most -= head.get("size", 0)
            if most < 0:
                raise TransferError(f"more bytes than are carried at most, at {'/'.join(path)}")
            with beneath(root, path[:-1]) as parent:
                place(stream, head, parent, path[-1], links)


def checked(path: list[str]) -> list[str]:
    if not path or len(path) > DEEPEST or any(name in ("", ".", "..") or "/" in name or "\0" in name for name in path):
        raise TransferError(f"a name that leads elsewhere: {path}")
    return path


@contextmanager
def beneath(root: int, path: list[str]) -> Iterator[int]:
    """The folder at `path` below `root`, every step a real folder."""
    folder = os.dup(root)
    try:
        for name in path:
            inner = os.open(name, FOLDER, dir_fd=folder)
            os.close(folder)
            folder = inner
        yield folder
    finally:
        os.close(folder)


def place(stream: BinaryIO, head: dict, parent: int, name: str, links: bool) -> None:
    mode = head.get("mode", 0) & 0o777
    if "link" in head:
        if not links:
            raise TransferError(f"a link in a stream without links: {name}")
        clear(parent, name)
        os.symlink(head["link"], name, dir_fd=parent)
    elif "size" in head:
        clear(parent, name)
        with opened(name, WRITE, parent) as file:
            for size in chunks(head["size"]):
                part = stream.read(size)
                if len(part) != size:
                    raise TransferError(f"the stream was cut at {name}")
                write_all(file, part)
            os.fchmod(file, mode | 0o600)
    else:
        if not is_folder(parent, name):
            clear(parent, name)
            os.mkdir(name, dir_fd=parent)
        with opened(name, FOLDER, parent) as folder:
            os.fchmod(folder, mode | 0o700)


def write_all(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]


def is_folder(parent: int, name: str) -> bool:
    try:
        return stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return False


def clear(parent: int, name: str) -> None:
    """Remove a file or link that stands in the way; a folder is not removed for a file."""
    if is_folder(parent, name):
        raise TransferError(f"a folder stands where the file {name} should go")
    with suppress(FileNotFoundError):
        os.unlink(name, dir_fd=parent)
