"""What a hostile command may try, and what came of it: one fresh sandbox for every attempt. Prints JSON. Needs the standard
library alone, so that it also runs as a user who may not read the tests' environment.

A command that gets what it should not get prints ESCAPED, or the token of a file, a server or a variable of the host. An attempt
is held if neither is seen, nothing on the host has changed, it ended in time and the sandbox then still answers, or says that it
is gone.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import platform
import secrets
import shutil
import socket
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from compactionrl.sandboxes.bwrap import BwrapSandbox
from compactionrl.sandboxes.limits import PREFIX, Limits
from compactionrl.sandboxes.protocol import TIMED_OUT, Executed, SandboxError
from compactionrl.sandboxes.seccomp import CLONE, CLONE3, REFUSED

LIMITS = Limits(memory_mb=256, disk_mb=64, processes=64, cpus=1, output_bytes=1 << 16, transfer_mb=16)
TIMEOUT = 2
ALLOWED_SECONDS = 30
SIDE_BY_SIDE = 8
BREACH = "ESCAPED"


class Host:
    """What is there to be stolen or broken. World-readable and world-writable on purpose."""

    def __init__(self) -> None:
        self.token = secrets.token_hex(16)
        os.environ["HOSTILE_SECRET"] = self.token
        self.folder = Path(tempfile.mkdtemp(prefix="hostile-", dir="/tmp"))
        self.folder.chmod(0o777)
        self.secret = self.folder / "secret"
        self.secret.write_text(self.token)
        self.taken = self.folder / "taken"
        self.taken.mkdir()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.abstract = socket.socket(socket.AF_UNIX)
        self.abstract.bind(f"\0hostile-{self.token[:8]}")
        self.abstract.listen()
        for listener in (self.listener, self.abstract):
            threading.Thread(target=self.serve, args=[listener], daemon=True).start()
        self.before = self.fingerprint()

    def serve(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                connection.sendall(self.token.encode())

    @property
    def port(self) -> int:
        return int(self.listener.getsockname()[1])

    def fingerprint(self) -> dict[str, str]:
        programs = [Path(path).resolve() for path in ("/usr/bin/env", "/usr/bin/bash", "/etc/passwd")]
        digests = {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in (*programs, self.secret)}
        settings = ("kernel/core_pattern", "kernel/hostname", "kernel/modprobe", "vm/overcommit_memory")
        values = {path: Path(path).read_text() for name in settings if os.path.exists(path := f"/proc/sys/{name}")}
        listing = {folder: str(sorted(os.listdir(folder))) for folder in ("/", "/usr", "/usr/bin", self.folder)}
        return digests | values | {str(name): names for name, names in listing.items()}

    def close(self) -> None:
        for name, value in self.before.items():
            if name.startswith("/proc/sys/") and Path(name).read_text() != value:
                Path(name).write_text(value)
        self.listener.close()
        self.abstract.close()
        shutil.rmtree(self.folder)


@dataclass
class Row:
    group: str
    attempt: str
    outcome: str
    held: bool = True
    seconds: float = 0.0


@dataclass
class Attempt:
    group: str
    name: str
    command: str = ""
    action: Callable[[BwrapSandbox, Host], Awaitable[str]] | None = None
    check: Callable[[Executed], bool] | None = None
    modes: tuple[str, ...] = ("exec", "persistent")
    settings: dict[str, Any] = field(default_factory=dict)


PY = "python3 -c '{}'"
SYSCALL = (
    "import ctypes; c = ctypes.CDLL(None, use_errno=True); r = c.syscall({}); "
    'print("ESC" + "APED" if r >= 0 else "refused", ctypes.get_errno())'
)


def syscall(name: str, *arguments: object) -> str:
    number = CALLS[name] if name in CALLS else REFUSED[MACHINE][name]
    return PY.format(SYSCALL.format(", ".join(map(str, [number, *arguments]))))


MACHINE = platform.machine()
CALLS = {"clone": CLONE.get(MACHINE), "clone3": CLONE3, "ptrace": {"x86_64": 101, "aarch64": 117}.get(MACHINE)}


def won(command: str) -> str:
    """A command whose success is a breach."""
    return f"({command}) && echo ESC''APED"


def escapes(host: Host) -> list[Attempt]:
    secret = host.secret
    tries = {
        "read a world-readable file of the host": f"cat {secret}",
        "read /root, /home, /etc/shadow of the host": won("cat /etc/shadow || ls -A /root /home | grep -v : | grep ."),
        "through /proc/*/root and /proc/*/cwd": f"cat /proc/[0-9]*/root{secret} /proc/[0-9]*/cwd{secret} /proc/1/root/etc/shadow",
        "environment of other processes": "env; cat /proc/[0-9]*/environ | tr '\\0' '\\n'",
        "search for the file everywhere": f"find / -name {secret.parent.name} -not -path '/proc/*/task/*' 2>/dev/null | grep . "
        "&& echo ESC''APED",
        "mount a tmpfs, bind, remount /usr": won(
            "mount -t tmpfs x /mnt || mount --bind / /mnt || mount -o remount,rw /usr"
        ),
        "unmount what covers /proc": won("umount /proc/sys || umount -l /proc || umount /usr"),
        "a new /proc in new namespaces": won(
            "unshare -Urmpf mount -t proc x /mnt || unshare -m true || unshare -Ur true"
        ),
        "chroot and climb": PY.format(
            'import os; os.mkdir("x"); os.chroot("x"); [os.chdir("..") for _ in range(99)]; os.chroot("."); '
            f'print(open("{secret}").read())'
        ),
        "enter the namespaces of process 1": f"nsenter -t 1 -a cat {secret}; nsenter --mount=/proc/1/ns/mnt cat {secret}",
        "make device nodes and read them": won(
            "mknod d b 254 0 && head -c1 d || mknod e b 8 0 && head -c1 e || mknod f c 1 1 && head -c1 f"
        ),
        "devices of the host": won("head -c1 /dev/mem || head -c1 /dev/kmsg || head -c1 /dev/vda || head -c1 /dev/sda"),
        "kernel memory and log": won("head -c1 /proc/kcore | grep -q . || head -c1 /proc/kmsg || dmesg"),
        "the magic key": won("echo h > /proc/sysrq-trigger"),
        "kernel settings": won(
            "echo '|/app/x' > /proc/sys/kernel/core_pattern || echo x > /proc/sys/kernel/hostname"
            " || echo 1 > /proc/sys/vm/overcommit_memory || echo x > /proc/sys/kernel/modprobe"
        ),
        "load a kernel module": won("modprobe dummy || insmod /usr/lib/x.ko") + "; " + syscall("finit_module", 0, 0, 0),
        "kernel keys": syscall("add_key", 'b"user"', 'b"x"', 'b"y"', 1, -3) + "; " + syscall("keyctl", 0, -3, 1),
        "bpf, perf, userfaultfd, io_uring": "; ".join(
            [
                syscall("bpf", 0, "ctypes.create_string_buffer(128)", 128),
                syscall("perf_event_open", "ctypes.create_string_buffer(128)", 0, -1, -1, 0),
                syscall("userfaultfd", 1),
                syscall("io_uring_setup", 4, "ctypes.create_string_buffer(256)"),
            ]
        ),
        "open files by handle": syscall("open_by_handle_at", -100, "ctypes.create_string_buffer(64)", 0),
        "new user namespace by clone, clone3": "; ".join(
            [syscall("clone", 0x10000011, 0, 0, 0, 0), syscall("clone3", 0, 0)]
        ),
        "a setuid shell": "cp /bin/bash s; chmod 4755 s; setpriv --reuid 1 ./s -p -c id; su -c id nobody; true",
        "capabilities gained by executing": won(
            "grep -qE 'CapEff:.*[2-9a-f]([0-9a-f]{5})$' /proc/self/status && mount -t tmpfs x /mnt"
        ),
        "write into the memory of process 1": won("printf x | dd of=/proc/1/mem bs=1 seek=4194304 conv=notrunc"),
        "write programs of the host": "echo evil > /usr/bin/env; rm -f /usr/bin/python3; touch /usr/bin/evil; "
        "mkdir /usr/evil /evil; true",
        "overwrite programs through /proc/*/exe": "for p in /proc/[0-9]*/exe; do printf x >> $p; done; true",
        "kill processes of the host": f"kill -9 {os.getpid()} {os.getppid()}; "
        + PY.format(
            "import os\nfor p in range(2, 70000):\n try: p == os.getpid() or os.kill(p, 9)\n except OSError: 0"
        ),
        "what descriptors lead to": "ls -l /proc/self/fd; for f in /proc/self/fd/*; do ls -A $f/.. 2>/dev/null; done"
        " | grep hostile-",
        "cgroups, /sys": won("echo 1 > /sys/fs/cgroup/cgroup.procs || ls /sys/fs/cgroup | grep . || ls /sys/kernel"),
    }
    return [Attempt("escape", name, command) for name, command in tries.items()]


def networks(host: Host) -> list[Attempt]:
    address = host.abstract.getsockname()
    tries = {
        "the host's loopback": f"cat < /dev/tcp/127.0.0.1/{host.port}; cat < /dev/tcp/localhost/{host.port}",
        "names": won("getent hosts pypi.org"),
        "other machines": won(
            "echo > /dev/tcp/1.1.1.1/53 || echo > /dev/tcp/169.254.169.254/80 || echo > /dev/udp/8.8.8.8/53"
        ),
        "raw packets": PY.format('import socket; socket.socket(17, 3, 3); print("ESC" + "APED")'),
        "abstract sockets of the host": PY.format(
            f"import socket; s = socket.socket(1); s.connect({json.dumps(address.decode(errors='replace'))}); print(s.recv(99))"
        ),
        "a new interface": won("ip link add x type dummy || ip link add y type veth"),
    }
    return [Attempt("network", name, command) for name, command in tries.items()]


def timed_out(result: Executed) -> bool:
    return result.return_code == TIMED_OUT


def floods() -> list[Attempt]:
    many = 'import itertools\nfor i in itertools.count(): open(f"f{i}", "x").close()'
    grow = 'x = []\nwhile True: x.append(bytearray(b"x") * (1 << 24))'
    return [
        Attempt("resources", "fork bomb", ":(){ :|:& };:; sleep 9", check=timed_out),
        Attempt("resources", "fork bomb that ignores signals",
                "trap '' 1 2 15; b() { setsid bash -c \"$(declare -f b); b\" & b; }; b"),
        Attempt("resources", "thousands of sleepers", "for i in {1..3000}; do sleep 99 & done 2>/dev/null; jobs -p | wc -l"),
        Attempt("resources", "memory", PY.format(grow), check=lambda result: result.return_code not in (0, TIMED_OUT)),
        Attempt("resources", "disk: every writable folder", "for d in /tmp /app /root /run /dev/shm /var/tmp /home /usr /etc; do "
                "cat /dev/zero > $d/filler 2>/dev/null; done; cat /*/filler /var/tmp/filler /dev/shm/filler 2>/dev/null | wc -c",
                check=lambda result: 0 < int(result.stdout or -1) <= LIMITS.disk_mb << 20),
        Attempt("resources", "files without number", PY.format(many),
                check=lambda result: result.return_code != 0),
        Attempt("resources", "endless output", "yes", check=capped),
        Attempt("resources", "endless output on both streams", "cat /dev/zero & yes >&2", check=capped),
        Attempt("resources", "a line of 300 MB", "head -c 300000000 /dev/zero | tr '\\0' x", check=capped),
        Attempt("resources", "busy loops", "for i in {1..8}; do while :; do :; done & done; wait", check=timed_out),
        Attempt("resources", "a sleep that ignores signals", "trap '' 1 2 3 15; while :; do sleep 1; done", check=timed_out),
        Attempt("resources", "descriptors without number", PY.format("import os\nwhile True: os.dup(0)"),
                check=lambda result: result.return_code != 0),
    ]  # fmt: skip


def capped(result: Executed) -> bool:
    return max(len(result.stdout), len(result.stderr)) <= LIMITS.output_bytes + 100


def strays() -> list[Attempt]:
    fork = "import os, time\nfor _ in range(2):\n if os.fork(): os._exit(0)\n os.setsid()\ntime.sleep(99)"
    quick = lambda result: result.return_code == 0  # noqa: E731
    return [
        Attempt("background", "setsid, nohup, disown", "setsid sleep 99 & nohup sleep 99 & sleep 99 & disown -a", check=quick),
        Attempt("background", "double fork that keeps the output", PY.format(fork), check=quick),
        Attempt("background", "output after the end", "(sleep 0.1; yes) & echo started", check=quick),
        Attempt("background", "kill everything", "kill -9 -1; kill -9 1; kill -STOP 1; kill -TERM 1; kill -HUP 1; true"),
        Attempt("background", "trace process 1", syscall("ptrace", 16, 1, 0, 0) + "; cat /proc/1/environ /proc/1/maps"),
        Attempt("background", "stop all that there is", "kill -STOP -1; kill -STOP 1; true"),
    ]  # fmt: skip


def oddities() -> list[Attempt]:
    return [
        Attempt("odd", "huge environment", "export X=$(head -c 3000000 /dev/zero | tr '\\0' x); /bin/true; echo $?; unset X"),
        Attempt("odd", "huge arguments", "/bin/echo $(seq 1000000) | wc -c; true"),
        Attempt("odd", "a command of 1 MB", f"x={'y' * 1_000_000}; echo ${{#x}}", check=lambda r: r.stdout == "1000000\n"),
        Attempt("odd", "100,000 lines", "echo a\n" * 100_000 + "echo end", check=lambda r: r.stdout.endswith("end\n")),
        Attempt("odd", "streams closed", "exec <&- >&- 2>&-; echo x; sleep 0.1"),
        Attempt("odd", "NUL and invalid UTF-8",
                "printf 'a\\0\\377\\xc3(b\\n'", check=lambda r: r.stdout == "a\0\ufffd\ufffd(b\n"),
        Attempt("odd", "escapes of a terminal", "printf '\\033]0;t\\007\\033[2J\\033[31m'; stty -a; tput reset; true"),
        Attempt("odd", "NUL in the command", "echo a\0b", check=lambda r: r.return_code == 2),
        Attempt("odd", "reads its input", "cat; read x; echo \"<$x>\"", check=lambda r: r.stdout == "<>\n"),
        Attempt("odd", "syntax errors", "if then ((( ' \" $( `", check=lambda r: r.return_code != 0),
        Attempt("odd", "folders without bottom", PY.format("import os\nfor i in range(3000): os.mkdir(\"d\"); os.chdir(\"d\")")),
    ]  # fmt: skip


def shells() -> list[Attempt]:
    commands = {
        "an end of its own": "for i in {3..12}; do echo '0123456789abcdef 0' >&$i; done 2>/dev/null; sleep 0.1; echo late",
        "writes to every descriptor": "for f in /proc/$$/fd/*; do printf 'x 0\\n' > $f; done 2>/dev/null",
        "reads from every descriptor": "for f in 3 8 9 10 11 12; do timeout 0.1 cat <&$f; done 2>/dev/null",
        "closes the control": "exec 9>&- 10>&- 11>&- 12>&-",
        "exit": "exit 7",
        "exec": "exec true",
        "exec of something that stays": "exec sleep 99",
        "set -e": "set -e; false; echo not reached",
        "set -n": "set -n",
        "set -u, -x, -v, -f": "set -uxvf; IFS=x; PS4='$(exit 3)'",
        "set -o posix": "set -o posix; eval 'if'",
        "traps": "trap 'echo trapped' EXIT DEBUG ERR RETURN; trap '' TERM INT; false",
        "trap that exits": "trap 'exit 9' DEBUG; true",
        "no PATH": "unset PATH HOME; export -n LANG",
        "its input redirected": "exec < /dev/zero",
        "its output closed": "exec >&- 2>&-",
        "its output elsewhere": "exec > /app/out 2>&1; echo hidden",
        "functions over builtins": "builtin() { :; }; eval() { :; }; read() { :; }; printf() { :; }",
        "builtins disabled": "enable -n eval printf read builtin",
        "readonly REPLY": "readonly REPLY",
        "stops itself": "kill -STOP $$",
        "kills itself": "kill -9 $$",
        "no files, no processes": "ulimit -f 0; ulimit -u 0; ulimit -n 4",
        "a loop of builtins": "while :; do :; done",
        "a loop of processes": "while :; do sleep 0.01; done",
        "a coprocess and a background read": "coproc cat; cat <&9 & wait",
        "return and break": "break 9; continue 9; return 3",
    }
    return [Attempt("persistent shell", name, command, modes=("persistent",)) for name, command in commands.items()]


async def refused(action: Awaitable[None]) -> str:
    try:
        await action
    except SandboxError as error:
        return f"refused: {str(error)[:70]}"
    return "carried"


async def download_links(sandbox: BwrapSandbox, host: Host) -> str:
    await sandbox.exec(
        f"mkdir -p d/e; ln -s {host.secret} d/link; ln -s / d/e/root; ln -s .. d/up; ln -s {host.folder} d/folder; "
        "echo 1 > d/file; ln d/file d/hard; mkfifo d/fifo; mknod d/null c 1 3; ln -s /dev/zero d/zero",
        cwd="/app",
    )
    await sandbox.download_dir("/app/d", host.taken / "links")
    found = list((host.taken / "links").rglob("*"))
    bad = [path for path in found if path.is_symlink() or not (path.is_dir() or stat.S_ISREG(path.lstat().st_mode))]
    single = [
        await refused(sandbox.download_file(f"/app/d/{name}", host.taken / "one")) for name in ("link", "fifo", "zero")
    ]
    if bad or "carried" in single:
        return f"{BREACH}: {bad} {single}"
    return f"carried {sorted(path.name for path in found)}; a link, a fifo, a device by name: refused"


async def download_large(sandbox: BwrapSandbox, host: Host) -> str:
    await sandbox.exec(
        "mkdir big; truncate -s 60M big/sparse; mkdir many; cd many; for i in {1..150}; do mkdir -p d; cd d; done"
    )
    outcomes = [await refused(sandbox.download_dir(f"/app/{name}", host.taken / name)) for name in ("big", "many")]
    outcomes.append(await refused(sandbox.download_file("/proc/kcore", host.taken / "kcore")))
    return f"{BREACH}: {outcomes}" if "carried" in outcomes[:2] else f"too large and too deep: {outcomes[0][:40]}"


async def download_race(sandbox: BwrapSandbox, host: Host) -> str:
    await sandbox.exec(
        "mkdir -p r/a s; echo fine > r/a/secret; echo fine > s/secret; "
        f"(while :; do mv r/a r/b; ln -s {host.folder} r/a; rm r/a; ln -s / r/a; rm r/a; mv r/b r/a; done) > /dev/null 2>&1 &",
        cwd="/app",
    )
    carried = 0
    for number in range(20):
        target = host.taken / f"race{number}"
        carried += await refused(sandbox.download_dir("/app/r", target)) == "carried"
        for path in target.rglob("*"):
            if path.is_symlink() or (path.is_file() and path.read_text() != "fine\n"):
                return f"{BREACH}: {path}"
    return f"{carried} of 20 carried, the others refused; never a link, never another file"


async def upload_links(sandbox: BwrapSandbox, host: Host) -> str:
    source = Path(tempfile.mkdtemp(dir=host.taken))
    (source / "link").symlink_to(host.secret)
    (source / "folder").mkdir()
    (source / "folder" / "file").write_text("fine")
    await sandbox.exec(
        "ln -s / /up; mkdir t; ln -s /etc t/folder; mkfifo t/link; ln -s /nowhere/at/all gone", cwd="/app"
    )
    await sandbox.upload_dir(source, "/app/t")
    await sandbox.upload_dir(source, f"/up{host.folder}")
    outcomes = [
        await refused(sandbox.upload_file(source / "folder/file", path))
        for path in ("/app/gone/x", "/app/t", "/dev/null/x")
    ]
    seen = await sandbox.exec("cat /app/t/link; cat /app/t/folder/file; ls -ld /app/t/folder /etc/file", cwd="/")
    if host.token in seen.stdout or "fine" not in seen.stdout:
        return f"{BREACH}: {seen.stdout}"
    return f"links stay links, which lead nowhere inside; a link in the way is replaced; {outcomes[1][:40]}"


async def upload_race(sandbox: BwrapSandbox, host: Host) -> str:
    source = Path(tempfile.mkdtemp(dir=host.taken))
    (source / "a").mkdir()
    (source / "a" / "secret").write_text("overwritten")
    await sandbox.exec(
        f"(while :; do rm -rf t/a; ln -s {host.folder} t/a; rm t/a; mkdir -p t/a; done) > /dev/null 2>&1 &", cwd="/app"
    )
    outcomes = [await refused(sandbox.upload_dir(source, "/app/t")) for _ in range(20)]
    return f"{outcomes.count('carried')} of 20 carried, the others refused; the host's file is as it was"


async def tampered_programs(sandbox: BwrapSandbox, host: Host) -> str:
    """Nothing that we do afterwards may depend on programs that a command could replace, nor run them with more than it had."""
    shim = "printf '#!/bin/bash\\ngrep CapEff /proc/self/status > /app/caps\\n' > /app/shim; chmod 755 /app/shim; "
    names = "cat tar sh env mount nsenter setpriv unshare sleep mkdir true"
    await sandbox.exec(
        f"echo data > file; {shim} for n in {names}; do cp -f /app/shim /usr/bin/$n; done; true", cwd="/app"
    )
    await sandbox.upload_file(host.secret, "/app/in")
    await sandbox.download_file("/app/file", host.taken / "file")
    (host.taken / "file").unlink()
    seen = await sandbox.exec("while read -r x; do echo $x; done < /app/caps; echo end", cwd="/")
    if "3fffffff" in seen.stdout or "1ffff" in seen.stdout:
        return f"{BREACH}: {seen.stdout}"
    return "transfers run none of the sandbox's programs"


def transfers() -> list[Attempt]:
    actions = {
        "download: links, fifos, devices, hard links": download_links,
        "download: too large, too deep, /proc": download_large,
        "download: a folder swapped for a link": download_race,
        "upload: links on both sides, fifos in the way": upload_links,
        "upload: a folder swapped for a link": upload_race,
        "programs replaced": tampered_programs,
    }
    return [Attempt("transfer", name, action=action, modes=("exec",)) for name, action in actions.items()]


def attempts(host: Host) -> list[Attempt]:
    return [*escapes(host), *networks(host), *floods(), *strays(), *oddities(), *shells(), *transfers()]


async def play(attempt: Attempt, mode: str, host: Host) -> Row:
    sandbox = BwrapSandbox(shell=mode, limits=LIMITS)  # type: ignore[arg-type]
    await sandbox.start()
    began = time.monotonic()
    try:
        row = await outcome(attempt, sandbox, host)
        row.held = row.held and await answers(sandbox, row)
    finally:
        await sandbox.stop()
    row.seconds = round(time.monotonic() - began, 2)
    row.held = row.held and row.seconds < ALLOWED_SECONDS
    if len(attempt.modes) > 1:
        row.attempt += "" if mode == "exec" else " (persistent)"
    return row


async def outcome(attempt: Attempt, sandbox: BwrapSandbox, host: Host) -> Row:
    if attempt.action:
        said = await attempt.action(sandbox, host)
        return Row(attempt.group, attempt.name, said, BREACH not in said)
    try:
        result = await sandbox.exec(attempt.command, timeout_sec=TIMEOUT)
    except SandboxError as error:
        return Row(attempt.group, attempt.name, f"the sandbox is gone: {error}")
    streams = result.stdout + result.stderr
    held = BREACH not in result.stdout and host.token not in streams and capped(result)
    if attempt.check:
        held = held and attempt.check(result)
    return Row(attempt.group, attempt.name, summary(result), held)


def summary(result: Executed) -> str:
    code = "out of time, killed" if result.return_code == TIMED_OUT else f"code {result.return_code}"
    lines = (result.stderr or result.stdout).strip().splitlines()
    last = "".join(each for each in lines[-1][-70:] if each.isprintable()) if lines else ""
    return f"{code}; {last}" if last else code


async def answers(sandbox: BwrapSandbox, row: Row) -> bool:
    """The sandbox still takes commands; a shell that was broken may cost one of them."""
    for _ in range(2):
        try:
            result = await sandbox.exec("echo alive", timeout_sec=TIMEOUT)
        except SandboxError as error:
            row.outcome += f"; the sandbox is gone: {error}"
            return True
        if "alive" in result.stdout:
            return True
    return False


def most_memory() -> int:
    """Megabytes that this program held at most: `ru_maxrss` would count those of the process that started it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) // 1024


async def main(modes: list[str]) -> dict[str, Any]:
    host = Host()
    try:
        gate = asyncio.Semaphore(SIDE_BY_SIDE)

        async def gated(attempt: Attempt, mode: str) -> Row:
            async with gate:
                return await play(attempt, mode, host)

        todo = [(attempt, mode) for attempt in attempts(host) for mode in attempt.modes if mode in modes]
        rows = await asyncio.gather(*[gated(*each) for each in todo])
        changed = [name for name, value in host.fingerprint().items() if host.before[name] != value]
        return {
            "user": "root" if os.geteuid() == 0 else "ordinary",
            "rows": [asdict(row) for row in rows],
            "changed": changed,
            "leaked": leaks(),
            "megabytes": most_memory(),
        }
    finally:
        host.close()


def leaks() -> list[str]:
    """What is left of sandboxes: processes, control groups, mounts of this user."""
    time.sleep(0.2)
    processes = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            parent = (process / "stat").read_text().rpartition(")")[2].split()[1]
            command = (process / "cmdline").read_bytes()
        except OSError:
            continue
        if parent == str(os.getpid()) and b"sandboxes.door" not in command:
            processes.append(f"process {command!r}")
    groups = [str(path) for path in Path("/sys/fs/cgroup").rglob(f"{PREFIX}{os.getpid()}-*")]
    mounts = [line for line in Path("/proc/self/mounts").read_text().splitlines() if line.startswith("sandbox ")]
    return processes + groups + mounts


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", choices=["exec", "persistent"], action="append")
    options = parser.parse_args()
    json.dump(asyncio.run(main(options.mode or ["exec", "persistent"])), sys.stdout, indent=1)
