"""What a sandbox sees as its root: the host's /usr with everything else made up, or a folder with a whole system."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from compactionrl.sandboxes.limits import MEGABYTE, Limits
from compactionrl.sandboxes.protocol import SandboxError

BASES = ("/mnt", "/media", "/srv", "/opt", "/tmp")
"""Where the sandbox's tmpfs is mounted, in a mount namespace of its own: nothing is made on the host, nothing is left there."""
MERGED = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
FOLDERS = "etc home mnt media opt proc dev root run srv tmp usr var/cache var/lib var/log var/tmp"
FROM_ETC = (
    "alternatives ca-certificates fonts java-* ld.so.cache ld.so.conf ld.so.conf.d localtime magic mime.types perl python3* "
    "ssl/certs ssl/openssl.cnf terminfo vim"
)
"""Of the host's /etc: what programs in /usr need, none of which tells anything of its users."""
WITH_NETWORK = " resolv.conf nsswitch.conf"
FILES = {
    "etc/passwd": "root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
    "etc/group": "root:x:0:\nnogroup:x:65534:\n",
    "etc/hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
    "etc/hostname": "sandbox\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
}
FORBIDDEN = set(",:\\\n")
DEBIAN_PACKAGES = "python3,tmux,procps,less,file,git"


@dataclass(frozen=True)
class Image:
    """`root`: a folder with a whole system, which stays as it is; None: this machine's /usr. `env`: added to every command's."""

    root: Path | None = None
    env: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.root is None:
            return
        root = Path(self.root).resolve()
        object.__setattr__(self, "root", root)
        if root == Path("/"):
            raise ValueError("the root of an image cannot be this machine's own: everything on it could be read inside")
        if FORBIDDEN & set(str(root)):
            raise ValueError(f"{root}: an overlay takes no path with a comma, colon or backslash")
        if not (root / "bin").is_dir():
            raise ValueError(f"{root} is no root file system: it has no bin")


def base_for(*visible: Path) -> str:
    """A folder that a tmpfs can cover without covering any of `visible`."""
    for base in BASES:
        if os.path.isdir(base) and not any(path.is_relative_to(base) for path in visible):
            return base
    raise SandboxError(f"every one of {', '.join(BASES)} holds a part of the sandbox: move the image elsewhere")


def layout(image: Image, base: str, limits: Limits, *, overlay: bool, user_namespace: bool) -> str:
    """A shell script that makes the sandbox's file system below `base`: all that it writes is on one tmpfs of limited size."""
    size = int(limits.disk_mb * MEGABYTE)
    options = f"size={size},nr_inodes={limits.most_files},mode=755"
    lines = ["set -e", f"mount -t tmpfs -o {options} sandbox {base}", f"cd {base}", "mkdir root upper work shm"]
    lines += ["chmod 1777 shm"]
    extra = ",userxattr" if user_namespace else ""
    if image.root:
        merged = f"lowerdir={image.root},upperdir={base}/upper,workdir={base}/work{extra}"
        lines += [f"mount -t overlay -o {shlex.quote(merged)} overlay root"]
    else:
        lines += ["cd root", f"mkdir -p {FOLDERS}", "chmod 1777 tmp var/tmp", "chmod 700 root"]
        for name in MERGED:
            if os.path.islink(f"/{name}"):
                lines += [f"ln -s {shlex.quote(os.readlink(f'/{name}'))} {name}"]
        lines += [f"printf %s {shlex.quote(text)} > {path}" for path, text in FILES.items()]
        if overlay:
            merged = f"lowerdir=/usr,upperdir={base}/upper,workdir={base}/work{extra}"
            lines += [f"mount -t overlay -o {merged} overlay usr"]
        lines += ["cd .."]
    if user_namespace:
        lines += ["echo 0 > /proc/sys/user/max_user_namespaces"]
    return "\n".join(lines)


def mounts(image: Image, base: str, *, overlay: bool, network: bool) -> list[str]:
    """The arguments of bwrap that mount it. /proc is read-only as a whole: bwrap does not cover /proc/sys for root, whose file
    permissions there are those of the host's root."""
    arguments = ["--bind", f"{base}/root", "/"]
    if image.root is None:
        if not overlay:
            arguments += ["--ro-bind", "/usr", "/usr"]
        for name in MERGED:
            if os.path.isdir(f"/{name}") and not os.path.islink(f"/{name}"):
                arguments += ["--ro-bind", f"/{name}", f"/{name}"]
        for pattern in (FROM_ETC + (WITH_NETWORK if network else "")).split():
            for path in sorted(Path("/etc").glob(pattern)):
                arguments += ["--ro-bind", str(path.resolve()), str(path)]
    elif network:
        arguments += ["--ro-bind-try", "/etc/resolv.conf", "/etc/resolv.conf"]
    return [
        *arguments,
        "--proc",
        "/proc",
        "--dev",
        "/dev",
        "--bind",
        f"{base}/shm",
        "/dev/shm",
        "--remount-ro",
        "/dev",
        "--remount-ro",
        "/proc",
    ]


def build(folder: Path, suite: str = "bookworm", mirror: str | None = None) -> Image:
    """A Debian system in a new folder, by debootstrap, which needs root and some minutes."""
    if shutil.which("debootstrap") is None:
        raise SandboxError("debootstrap is not installed (Debian, Ubuntu: apt install debootstrap)")
    if os.geteuid() != 0:
        raise SandboxError(
            "debootstrap needs root; as an ordinary user, use this machine's /usr or a folder made elsewhere"
        )
    if folder.exists() and any(folder.iterdir()):
        raise SandboxError(f"{folder} is not empty")
    # In a mount namespace of its own: what it mounts is gone with it, however it ends.
    command = [
        "unshare",
        "--mount",
        "--",
        "debootstrap",
        "--variant=minbase",
        f"--include={DEBIAN_PACKAGES}",
        suite,
        str(folder),
    ]
    done = subprocess.run(command + ([mirror] if mirror else []), capture_output=True, text=True)
    if done.returncode:
        raise SandboxError(f"debootstrap failed: {(done.stdout + done.stderr)[-2000:]}")
    return Image(folder)
