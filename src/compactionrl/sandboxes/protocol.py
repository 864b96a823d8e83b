"""Where commands run. The shapes are Harbor's `BaseEnvironment`'s: each of its back ends is a `Sandbox` as it is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

TIMED_OUT = 124
"""The return code of a command that ran out of time, as coreutils' `timeout` has it."""


class SandboxError(RuntimeError):
    """The sandbox, not the command, failed: the rollout ends with an error and is never scored."""


class ExecResult(Protocol):
    stdout: str | None
    stderr: str | None
    return_code: int


@dataclass
class Executed:
    """What a command did. Each stream is text (invalid UTF-8 replaced), at most the cap of the sandbox long: a longer one keeps
    its head and its tail, and a mark between them says how many bytes are gone."""

    stdout: str = ""
    stderr: str = ""
    return_code: int = 0


class Sandbox(Protocol):
    """A place with a file system and processes of its own. Every method raises `SandboxError` if the place itself fails."""

    async def start(self, force_build: bool = False) -> None: ...

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        """Run a bash command. One that is out of time has return code 124 and its output so far; that is no exception."""
        ...

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        """Copy a file of ours to a path inside; folders on the way are made."""
        ...

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        """Copy what is in a folder of ours into a folder inside."""
        ...

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        """Copy a regular file from inside to a path of ours."""
        ...

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        """Copy what is in a folder inside into a folder of ours."""
        ...

    async def stop(self, delete: bool = True) -> None:
        """End every process inside and remove what the sandbox made. May be called again, and before `start`."""
        ...
