"""Commands as plain processes of this machine, of this user: no isolation at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compactionrl.sandboxes.entrance import Place
from compactionrl.sandboxes.inside import Inside, Mode
from compactionrl.sandboxes.limits import DEFAULT, Limits


class ProcessSandbox(Inside):
    """For machines where nothing else works, and trusted commands: they can read, change and kill whatever this user can.

    Paths of `cwd`, `upload_*` and `download_*` are below a temporary folder; paths in commands are the machine's, so that only
    tasks with relative paths work. Time and output are limited, processes and memory for ordinary users only, each process by
    itself. What a command leaves in the background stays when the sandbox stops.
    """

    def __init__(
        self,
        *,
        unsafe_no_isolation: bool = False,
        shell: Mode = "exec",
        limits: Limits | Mapping[str, Any] = DEFAULT,
        workdir: str = "/app",
        env: Mapping[str, str] | None = None,
    ) -> None:
        if unsafe_no_isolation is not True:
            raise ValueError(
                "this sandbox isolates nothing: its commands are yours. Use 'bwrap' (`compactionrl doctor` says what it needs), "
                "or say unsafe_no_isolation=True if every command is trusted"
            )
        super().__init__(shell=shell, limits=limits, workdir=workdir, env=dict(env or {}))
        self.folder: Path | None = None

    def path(self, path: str) -> str:
        below = super().path(path)
        return below if below.startswith(f"{self.folder}/") else f"{self.folder}{below}"

    async def start(self, force_build: bool = False) -> None:
        if self.place:
            return
        self.folder = Path(tempfile.mkdtemp(prefix="compactionrl-"))
        Path(self.path(".")).mkdir(parents=True)
        self.env = self.env | {"HOME": str(self.folder)}
        limits = {
            name: most for name, most in self.limits.rlimits().items() if name != "RLIMIT_NPROC"
        }  # counts all of ours
        self.place = Place(holder=os.pidfd_open(os.getpid()), namespaces=(), rlimits=limits)

    async def stop(self, delete: bool = True) -> None:
        self.leave()
        if self.place:
            os.close(self.place.holder)
            self.place = None
        if self.folder and delete:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder = None
