"""What a Dockerfile's steps changed in a sandbox, kept as an archive: they run once, every other sandbox unpacks it."""

from __future__ import annotations

import asyncio
import shlex
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from compactionrl.sandboxes.protocol import Sandbox, SandboxError

SCRATCH = "/run/.image"
"""A folder in the sandbox that no image holds."""
MOST_BYTES = 200 << 20
LISTED = "find / \\( -path /proc -o -path /sys -o -path /dev -o -path /run \\) -prune -o"
"""Some folders of a system may not be readable; what is in them is not changed either, so find's complaints do not matter."""
BEGIN = f"""\
set -e
rm -rf {SCRATCH} && mkdir -p {SCRATCH}
{LISTED} -fprint0 {SCRATCH}/listed || :
LC_ALL=C sort -z {SCRATCH}/listed > {SCRATCH}/before
touch {SCRATCH}/begun
sleep 0.02
"""
END = f"""\
set -eo pipefail
cd {SCRATCH}
{LISTED} -fprint0 after -cnewer begun -fprint0 new || :
LC_ALL=C sort -z after | LC_ALL=C comm -z -23 before - > gone
tar --null --no-recursion --numeric-owner -T new -cPf changed
tar -cf image gone changed
[ "$(stat -c %s image)" -le {MOST_BYTES} ]
"""
UNPACK = f"""\
set -e
cd {SCRATCH}
tar -xf image
xargs -0 -r rm -rf -- < gone
tar -xpPf changed --numeric-owner
rm -rf {SCRATCH}
"""
SECONDS = 300


class ImageCache:
    """One image, made by whoever comes first; who comes meanwhile waits. It lives as long as this object.

    Nothing is kept, and the steps run in every sandbox, if they took less than `worth_seconds`, if the archive is larger than
    200 MiB, and where there is no GNU find, tar, sort and comm.
    """

    def __init__(self, worth_seconds: float = 1.0) -> None:
        self.worth_seconds = worth_seconds
        self.worth = True
        self.folder: tempfile.TemporaryDirectory[str] | None = None
        self.making: asyncio.Lock | None = None

    async def provide(self, sandbox: Sandbox, build: Callable[[Sandbox], Awaitable[None]]) -> None:
        """Make the image in a sandbox that has just started: by `build`, or from what that once did."""
        if self.worth and self.folder is None:
            self.making = self.making or asyncio.Lock()
            async with self.making:
                if self.worth and self.folder is None:
                    await self.make(sandbox, build)
                    return
        await (build(sandbox) if self.folder is None else self.unpack(sandbox, Path(self.folder.name)))

    async def make(self, sandbox: Sandbox, build: Callable[[Sandbox], Awaitable[None]]) -> None:
        try:
            listed = await self.script(sandbox, BEGIN)
            begun = time.monotonic()
            await build(sandbox)
            self.worth = listed and time.monotonic() - begun >= self.worth_seconds and await self.script(sandbox, END)
            if self.worth:
                folder = tempfile.TemporaryDirectory(prefix="compactionrl-image-")
                await sandbox.download_file(f"{SCRATCH}/image", Path(folder.name, "image"))
                self.folder = folder
            await self.script(sandbox, f"rm -rf {SCRATCH}")
        finally:
            self.making = None  # a lock belongs to one event loop; after trouble, the next one to come tries again

    async def unpack(self, sandbox: Sandbox, folder: Path) -> None:
        await sandbox.upload_file(folder / "image", f"{SCRATCH}/image")
        if not await self.script(sandbox, UNPACK):
            raise SandboxError("the image of the task, which another sandbox has built, cannot be unpacked in this one")

    async def script(self, sandbox: Sandbox, script: str) -> bool:
        result = await sandbox.exec(f"bash -c {shlex.quote(script)}", "/", timeout_sec=SECONDS, user="root")
        return result.return_code == 0
