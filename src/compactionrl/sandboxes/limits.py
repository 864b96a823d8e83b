"""How much of the machine a sandbox may take, and what here sees to it: control groups where they can be made, else rlimits."""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass
from pathlib import Path

from compactionrl.sandboxes.door import remove
from compactionrl.sandboxes.protocol import SandboxError

MEGABYTE = 1 << 20
PREFIX = "compactionrl-"
PERIOD = 100_000
"""Microseconds over which a share of the processors is counted."""
CONTROLLERS = ("memory", "pids", "cpu")
BYTES_PER_FILE = 4096
numbers = itertools.count(1)


@dataclass(frozen=True)
class Limits:
    """`memory_mb`: of each process; where control groups work, all processes and files (which are in memory) together have
    `memory_mb` + `disk_mb`. `disk_mb`: of all files that the sandbox writes. `output_bytes`: kept of each stream of a command.
    `transfer_mb`: of one upload or download. Megabytes are 2^20 bytes."""

    memory_mb: float = 2048
    disk_mb: float = 1024
    processes: int = 256
    cpus: float = 1.0
    output_bytes: int = 1 << 18
    transfer_mb: float = 256

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise ValueError(f"limits.{name} is {value}: it must be positive")

    @property
    def most_files(self) -> int:
        return int(self.disk_mb * MEGABYTE) // BYTES_PER_FILE

    def rlimits(self) -> dict[str, int]:
        """Of each process, by the names of the module `resource`. (Processes: of a user in a sandbox; root's are not counted.)"""
        return {
            "RLIMIT_NPROC": int(self.processes),
            "RLIMIT_DATA": int(self.memory_mb * MEGABYTE),
            "RLIMIT_FSIZE": int(self.disk_mb * MEGABYTE),
            "RLIMIT_CORE": 0,
        }


DEFAULT = Limits()


def enforcement() -> dict[str, str]:
    """What holds each limit on this machine, for this user; what cannot be held is said."""
    try:
        group = Cgroups.make(Limits())
    except OSError:
        group = Cgroups({})
    kinds = {name: f"control group ({'v2' if unified else 'v1'})" for name, (_, unified) in group.folders.items()}
    group.remove()
    count = "NOT limited: root's processes are not counted" if os.geteuid() == 0 else "rlimit, of the sandbox's user"
    return {
        "memory": kinds.get("memory", "rlimit of each process's data; NOT limited: their sum"),
        "processes": kinds.get("pids", count),
        "cpus": kinds.get("cpu", "NOT limited: there is no control group that we may write"),
        "disk": "size of a tmpfs that holds all that the sandbox writes (it counts as memory)",
    }


@dataclass
class Cgroups:
    """One control group for a sandbox: by controller, its folder and whether that is of version 2."""

    folders: dict[str, tuple[Path, bool]]

    @classmethod
    def make(cls, limits: Limits) -> Cgroups:
        """With every controller of memory, pids and cpu that we may use; with none where we may not."""
        name = f"{PREFIX}{os.getpid()}-{next(numbers)}"
        made = cls({})
        try:
            for controller, (parent, unified) in parents().items():
                sweep(parent)
                folder = parent / name
                folder.mkdir(exist_ok=True)
                made.folders[controller] = (folder, unified)
                for file, value in settings(controller, limits, unified):
                    (folder / file).write_text(value)
        except OSError:
            made.remove()
            raise
        return made

    @property
    def paths(self) -> list[str]:
        return sorted({str(folder) for folder, _ in self.folders.values()})

    def join(self, process: int) -> None:
        for path in self.paths:
            try:
                Path(path, "cgroup.procs").write_text(str(process))
            except OSError as error:
                raise SandboxError(f"{path}: process {process} cannot join: {error}") from error

    def remove(self) -> None:
        remove(set(self.paths))
        self.folders = {}


def settings(controller: str, limits: Limits, unified: bool) -> list[tuple[str, str]]:
    memory = str(int((limits.memory_mb + limits.disk_mb) * MEGABYTE))
    if controller == "pids":
        return [("pids.max", str(int(limits.processes)))]
    if controller == "memory":
        return [("memory.max" if unified else "memory.limit_in_bytes", memory)]
    quota = int(limits.cpus * PERIOD)
    if unified:
        return [("cpu.max", f"{quota} {PERIOD}")]
    return [("cpu.cfs_period_us", str(PERIOD)), ("cpu.cfs_quota_us", str(quota))]


def parents() -> dict[str, tuple[Path, bool]]:
    """For each controller, the group below which this process may make groups, and whether it is of version 2."""
    found: dict[str, tuple[Path, bool]] = {}
    own = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    for mount, root, kind, options in mounts():
        for _, controllers, path in own:
            unified = kind == "cgroup2" and not controllers
            names = CONTROLLERS if unified else set(CONTROLLERS) & set(controllers.split(",")) & set(options.split(","))
            if not unified and kind != "cgroup":
                continue
            relative = os.path.relpath(path, root) if path.startswith(root) else "."
            for name in names:
                parent = writable(mount, mount / relative, name if unified else None)
                if parent and name not in found:
                    found[name] = (parent, unified)
    return found


def mounts() -> list[tuple[Path, str, str, str]]:
    """Mount point, the group that is mounted there, file system, options of every hierarchy."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    split = [(line.split(" - ")[0].split(), line.split(" - ")[1].split()) for line in lines]
    return [(Path(left[4]), left[3], right[0], right[2]) for left, right in split if right[0].startswith("cgroup")]


def writable(mount: Path, own: Path, controller: str | None) -> Path | None:
    """The nearest group from `own` upwards in which we may make groups; of version 2, such that they have the controller."""
    if not own.is_dir():
        own = mount
    for folder in [own, *own.parents]:
        if not folder.is_relative_to(mount):
            return None
        if os.access(folder, os.W_OK) and (controller is None or delegates(folder, controller)):
            return folder
    return None


def delegates(folder: Path, controller: str) -> bool:
    try:
        file = folder / "cgroup.subtree_control"
        if controller not in file.read_text().split():
            file.write_text(f"+{controller}")
        return os.access(folder / "cgroup.procs", os.W_OK)
    except OSError:
        return False


def sweep(parent: Path) -> None:
    """Remove what processes of ours left that were killed: groups without processes, whose maker is gone."""
    for folder in parent.glob(f"{PREFIX}*-*"):
        maker = folder.name.removeprefix(PREFIX).split("-")[0]
        if not Path("/proc", maker).exists():
            remove({str(folder)}, tries=1)
