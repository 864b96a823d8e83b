"""What this machine can do: tried, not guessed."""

from __future__ import annotations

import asyncio
import getpass
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from compactionrl.sandboxes.bwrap import BwrapSandbox, bwrap_path, overlay_works
from compactionrl.sandboxes.limits import Limits, enforcement
from compactionrl.sandboxes.protocol import SandboxError

TOOLS = {"unshare": "util-linux", "mount": "mount", "bash": "bash"}
PYTHON_FOR_HARBOR = (3, 12)
NOT_LIMITED = "NOT limited"


@dataclass(frozen=True)
class Capability:
    """`says`: what was found, or what to do so that it works."""

    name: str
    works: bool
    says: str


def probe() -> list[Capability]:
    """Everything that sandboxes, Harbor, games and training need, one after the other. Nothing is installed or left behind."""
    return [bwrap(), *tools(), isolation(), overlay(), *limits(), *pythons(), java(), *packages()]


def bwrap() -> Capability:
    try:
        path = bwrap_path()
    except SandboxError as error:
        return Capability("bwrap", False, str(error))
    version = subprocess.run([path, "--version"], capture_output=True, text=True).stdout.strip()
    return Capability("bwrap", True, f"{version}, {path}")


def tools() -> list[Capability]:
    missing = {name: package for name, package in TOOLS.items() if shutil.which(name) is None}
    return [Capability(name, False, f"install the package {package}") for name, package in missing.items()]


def isolation() -> Capability:
    """Start a sandbox as this user, look at its network, stop it."""
    who = "root" if os.geteuid() == 0 else f"the ordinary user {user()}"
    try:
        networks = asyncio.run(networks_inside())
    except SandboxError as error:
        remedy = (
            "user namespaces may be switched off: sysctl user.max_user_namespaces, kernel.unprivileged_userns_clone, "
        )
        remedy += "kernel.apparmor_restrict_unprivileged_userns; in a container, they are its runtime's to allow"
        return Capability("sandbox", False, f"{error} ({who}; {remedy})")
    return Capability("sandbox", networks == ["lo"], f"a sandbox runs for {who}; its networks: {', '.join(networks)}")


async def networks_inside() -> list[str]:
    sandbox = BwrapSandbox(limits=Limits(disk_mb=16))
    try:
        await sandbox.start()
        result = await sandbox.exec("tail -n +3 /proc/net/dev", timeout_sec=30)
        return [line.split(":")[0].strip() for line in result.stdout.splitlines()]
    finally:
        await sandbox.stop()


def user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.geteuid())


def overlay() -> Capability:
    if shutil.which("unshare") is None or not overlay_works():
        return Capability(
            "overlay", False, "images of your own need Linux 5.11 (6.6 for ordinary users); this machine's /usr works"
        )
    means = (
        "/usr can be written to inside"
        if os.geteuid() == 0
        else "as an ordinary user, this machine's /usr stays read-only"
    )
    return Capability("overlay", True, f"folders with whole systems can be images; {means}")


def limits() -> list[Capability]:
    return [Capability(f"limit: {name}", NOT_LIMITED not in how, how) for name, how in enforcement().items()]


def pythons() -> list[Capability]:
    own = f"{platform.python_version()}, {sys.executable}"
    if sys.version_info >= PYTHON_FOR_HARBOR:
        return [Capability("python", True, own), Capability("python for Harbor", True, "this one")]
    names = [f"python3.{minor}" for minor in range(PYTHON_FOR_HARBOR[1], PYTHON_FOR_HARBOR[1] + 5)]
    found = next((path for name in names if (path := shutil.which(name)) and runs(path, "--version")), None)
    says = found or "Harbor itself needs Python 3.12 or later; our own loader of its tasks does not"
    return [Capability("python", True, own), Capability("python for Harbor", found is not None, says)]


def java() -> Capability:
    path = shutil.which("java")
    works = path is not None and runs(path, "-version")
    return Capability(
        "java",
        works,
        path if path and works else "ScienceWorld needs it (Debian, Ubuntu: apt install default-jre-headless)",
    )


def runs(*command: str) -> bool:
    return subprocess.run(command, capture_output=True).returncode == 0


def packages() -> list[Capability]:
    """Whether extras are there. (torch is not imported for that: what devices it sees, a run says.)"""
    extras = {"torch": "train", "harbor": "harbor", "textworld": "games", "scienceworld": "games"}
    return [
        Capability(
            name,
            (there := find_spec(name) is not None),
            "installed" if there else f"pip install 'compactionrl[{extra}]'",
        )
        for name, extra in extras.items()
    ] + [gpu()]


def gpu() -> Capability:
    there = any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/kfd").exists()
    return Capability("GPU", there, "there is one" if there else "none seen; everything runs on the CPU, more slowly")


def report(found: list[Capability]) -> list[str]:
    width = max(len(each.name) for each in found)
    return [f"{'yes' if each.works else 'no ':3}  {each.name:{width}}  {each.says}" for each in found]
