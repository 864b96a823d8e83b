"""What sandboxes with a `Place` have in common: commands and transfers."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Literal

from compactionrl.sandboxes.entrance import Place, carry, run
from compactionrl.sandboxes.limits import MEGABYTE, Limits
from compactionrl.sandboxes.output import Leftovers
from compactionrl.sandboxes.protocol import Executed, SandboxError
from compactionrl.sandboxes.shell import Shell
from compactionrl.sandboxes.transfer import pack_file, pack_folder, unpack

Mode = Literal["exec", "persistent"]
MODES = ("exec", "persistent")
BASE_ENV = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "LANG": "C.UTF-8",
    "TERM": "xterm",
}
"""All that commands see of an environment: nothing of ours."""
BROKEN = BrokenPipeError.__name__


class Inside:
    """Commands in a `Place`, which `start` of a subclass makes, and files in and out of it."""

    place: Place | None = None

    def __init__(self, *, shell: Mode, limits: Limits | Mapping[str, Any], workdir: str, env: dict[str, str]) -> None:
        if shell not in MODES:
            raise ValueError(f"shell={shell!r}: choose 'exec' (a new process for every command) or 'persistent'")
        if not workdir.startswith("/"):
            raise ValueError(f"workdir={workdir!r} must be an absolute path inside")
        self.mode = shell
        self.limits = limits if isinstance(limits, Limits) else Limits(**limits)
        self.workdir = workdir
        self.env = BASE_ENV | env
        self.leftovers = Leftovers()
        self.shell: Shell | None = None

    def path(self, path: str) -> str:
        """Where a path of the sandbox is for `door`; relative ones are below the working directory."""
        return str(PurePosixPath(self.workdir, path))

    def opened(self) -> Place:
        if self.place is None:
            raise SandboxError("the sandbox is not running: start it first")
        return self.place

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: float | None = None,
        user: str | int | None = None,
    ) -> Executed:
        """See `Sandbox.exec`. With shell="persistent", commands go to one shell, one after the other; a command that comes with
        a directory, an environment or a user of its own is a new process all the same, out of the shell's reach."""
        place = self.opened()
        if self.mode == "persistent" and cwd is None and env is None and user is None:
            if self.shell is None:
                home, most = self.path("."), self.limits.output_bytes
                self.shell = Shell(place, self.leftovers, cwd=home, env=self.env, most=most)
            return await self.shell.run(command, timeout_sec)
        return await run(
            place,
            command,
            cwd=self.path(cwd or "."),
            env=self.env | (env or {}),
            timeout=timeout_sec,
            user=user,
            most=self.limits.output_bytes,
            leftovers=self.leftovers,
        )

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        source, target = Path(source_path), PurePosixPath(self.path(target_path))
        await self.inwards(str(target.parent), lambda out: pack_file(source, target.name, out, self.most))

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        """Links below the folder are carried as links; they are not followed."""
        source = Path(source_dir)
        await self.inwards(self.path(target_dir), lambda out: pack_folder(source, out, self.most, links=True))

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        target = Path(target_path)
        fields = {"do": "pack_file", "path": self.path(source_path), "name": target.name}
        await self.outwards(
            fields, lambda stream: unpack(stream, target.parent, self.most, links=False, only=target.name)
        )

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        """Files and folders alone: links are not carried."""
        fields = {"do": "pack_folder", "path": self.path(source_dir)}
        await self.outwards(fields, lambda stream: unpack(stream, target_dir, self.most, links=False))

    @property
    def most(self) -> int:
        return int(self.limits.transfer_mb * MEGABYTE)

    async def inwards(self, folder: str, pack: Callable[[BinaryIO], None]) -> None:
        request = self.opened().request("unpack", path=folder, most=self.most)
        await self.transfer(request, pack, inwards=True)

    async def outwards(self, fields: dict[str, Any], unpack: Callable[[BinaryIO], None]) -> None:
        request = self.opened().request(**fields, most=self.most)
        await self.transfer(request, unpack, inwards=False)

    async def transfer(self, request: dict[str, Any], here: Callable[[BinaryIO], None], *, inwards: bool) -> None:
        """Our half in a thread, the sandbox's half behind the door, a pipe between them."""
        reading, writing = os.pipe()
        ours, theirs = (writing, reading) if inwards else (reading, writing)

        def half() -> None:
            with open(ours, "wb" if inwards else "rb") as stream:
                here(stream)

        halves = [asyncio.to_thread(half), carry(self.opened(), request, theirs, inwards=inwards)]
        outcomes = await asyncio.gather(*(halves if inwards else halves[::-1]), return_exceptions=True)
        errors = [each for each in outcomes if isinstance(each, BaseException)]
        # The sender's error comes first: that the stream was cut is all that the receiver knows. A sender that was cut off
        # knows as little.
        for error in sorted(errors, key=lambda each: isinstance(each, BrokenPipeError) or BROKEN in str(each)):
            if isinstance(error, SandboxError) or not isinstance(error, OSError):
                raise error
            raise SandboxError(f"{type(error).__name__}: {error}") from error

    def leave(self) -> None:
        """Give up what is open on our side."""
        if self.shell:
            self.shell.close()
            self.shell = None
        self.leftovers.close()
