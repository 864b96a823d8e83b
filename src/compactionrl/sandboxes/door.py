"""The process that opens sandboxes' doors: it starts commands inside, gives up every privilege first, and tells how they ended.

One small process per process that uses sandboxes, with one thread, so that forking is cheap and safe however large and threaded
that one is. Each request forks a *porter*, which joins the namespaces of the sandbox, all but the one of processes: commands can
neither see nor trace it. It forks the command, waits for it, and kills it when the time is up or the caller has gone. Privileges
are dropped before anything of the sandbox's is executed: nothing that a command left behind is ever run with more than it had.

A request is one byte with descriptors: a file with the request as JSON, the porter's socket, stdin, stdout, stderr, what else
the command gets (from descriptor 9 on), and the sandbox's process. The porter answers with two lines: the command's process, its
code.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from compactionrl.sandboxes.protocol import TIMED_OUT
from compactionrl.sandboxes.transfer import pack_file, pack_folder, unpack

NAMESPACES = {
    "mount": 0x00020000,
    "cgroup": 0x02000000,
    "uts": 0x04000000,
    "ipc": 0x08000000,
    "user": 0x10000000,
    "pid": 0x20000000,
    "net": 0x40000000,
}
SET_DUMPABLE, CAPBSET_READ, CAPBSET_DROP, NO_NEW_PRIVS = 4, 23, 24, 38
CAP_AMBIENT, CLEAR_ALL, SET_SECCOMP, FILTER = 47, 4, 22, 2
CAPABILITY_VERSION_3 = 0x20080522
CONTROL = 9
"""The first descriptor at which a command finds what else it was given."""
HIGH = 100
LONGEST_ARGUMENT = 100_000
"""Bytes. Linux takes no argument longer than 128 KiB; longer commands are read from a file."""
DESCRIPTORS = 8
libc = ctypes.CDLL(None, use_errno=True)
libc.prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]


def main() -> None:
    """Answer requests from the socket on stdin until the other end is gone; then remove what sandboxes left of control groups."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the caller's to handle; it closes the socket
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for porters
    door = socket.socket(fileno=0)
    groups: set[str] = set()
    while True:
        message, descriptors, _, _ = socket.recv_fds(door, 1, DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
        if not message:
            break
        request = json.loads(os.pread(descriptors[0], os.fstat(descriptors[0]).st_size, 0))
        groups = {group for group in groups | set(request["groups"]) if os.path.isdir(group)}
        if os.fork() == 0:
            door.close()
            porter(request, *descriptors[1:])
        for descriptor in descriptors:
            os.close(descriptor)
    remove(groups)


def remove(groups: set[str], tries: int = 100) -> None:
    """Control groups can go once the kernel has ended their last process."""
    for _ in range(tries):
        for group in list(groups):
            try:
                os.rmdir(group)
            except FileNotFoundError:
                pass
            except OSError:
                continue
            groups.discard(group)
        if not groups:
            return
        time.sleep(0.02)


def porter(request: dict[str, Any], status: int, stdin: int, stdout: int, stderr: int, *rest: int) -> NoReturn:
    """Never returns into the door's loop, whatever happens."""
    caller = socket.socket(fileno=status)
    try:
        sys.meta_path.clear()  # whatever happens behind the door, no module is imported there: it would be the sandbox's
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        code = serve(request, caller, stdin, stdout, stderr, *rest)
        caller.sendall(f"{code}\n".encode())
    except BaseException as error:
        with suppress(OSError):  # if the caller has gone, nobody wants to know
            caller.sendall(f"! {type(error).__name__}: {error}\n".encode(errors="replace"))
    finally:
        os._exit(0)


def serve(request: dict[str, Any], caller: socket.socket, stdin: int, stdout: int, stderr: int, *rest: int) -> int:
    *control, place = rest
    groups = [os.open(f"{group}/cgroup.procs", os.O_WRONLY | os.O_CLOEXEC) for group in request["groups"]]
    if request["namespaces"]:
        Path("/proc/self/oom_score_adj").write_text("1000")  # of all processes, the kernel is to end these first
        call("prctl", SET_DUMPABLE, 0, 0, 0, 0)
        call("setns", place, sum(NAMESPACES[name] for name in request["namespaces"]))
    if request["do"] != "run":
        os.set_blocking(stdin, True)
        carry(request, stdin, stdout)
        return 0
    process = os.fork()
    if process == 0:
        try:
            os.dup2(stderr, 2)
            for group in groups:
                os.write(group, b"0")
            become(request, [stdin, stdout, stderr], control)
        except BaseException as error:
            os.write(2, f"{type(error).__name__}: {error}\n".encode(errors="replace"))
        finally:
            os._exit(126)
    for descriptor in (stdin, stdout, stderr, *control):
        os.close(descriptor)
    caller.sendall(f"{process}\n".encode())
    return wait(process, caller, request["timeout"])


def wait(process: int, caller: socket.socket, timeout: float | None) -> int:
    """The return code. The whole group is killed when the time is up or the caller has gone."""
    ended = os.pidfd_open(process)
    poll = select.poll()
    poll.register(ended, select.POLLIN)
    poll.register(caller, select.POLLIN)
    ready = poll.poll(None if timeout is None else timeout * 1000)
    on_time = any(descriptor == ended for descriptor, _ in ready)
    if not on_time:
        for kill in (os.killpg, os.kill):
            with suppress(ProcessLookupError):  # it may have no group of its own yet, or have ended
                kill(process, signal.SIGKILL)
    _, status = os.waitpid(process, 0)
    code = os.waitstatus_to_exitcode(status)
    return (128 - code if code < 0 else code) if on_time else TIMED_OUT


def become(request: dict[str, Any], standard: list[int], control: list[int]) -> NoReturn:
    """Be the command."""
    os.setsid()
    command = request["command"].encode(errors="replace")
    arguments = ["bash", "--noprofile", "--norc", "-c", command]
    if len(command) > LONGEST_ARGUMENT:
        script = os.memfd_create("command")
        os.write(script, command)
        os.lseek(script, 0, os.SEEK_SET)
        control, arguments = [*control, script], [*arguments[:3], f"/dev/fd/{CONTROL + len(control)}"]
    # First out of the way of the numbers that they are to have.
    high = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, HIGH) for descriptor in (*standard, *control)]
    os.closerange(0, HIGH)
    for descriptor, target in zip(high, [0, 1, 2, *range(CONTROL, CONTROL + len(control))], strict=True):
        os.dup2(descriptor, target)
    os.closerange(HIGH, 4096)
    drop(request)
    try:
        os.chdir(request["cwd"])
    except OSError as error:
        os.write(2, f"{request['cwd']}: {error.strerror}\n".encode())
        os._exit(126)
    for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    os.execve("/bin/bash", arguments, request["env"])


def drop(request: dict[str, Any]) -> None:
    """Take on the limits; in a sandbox, give up capabilities and become the user."""
    os.umask(0o022)
    for name, most in request["rlimits"].items():
        number = getattr(resource, name)
        hard = resource.getrlimit(number)[1]
        bound = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(number, (bound, bound))
    if not request["namespaces"]:
        return
    keep = request["capabilities"]
    for capability in range(64):
        if libc.prctl(CAPBSET_READ, capability, 0, 0, 0) == 1 and capability not in keep:
            call("prctl", CAPBSET_DROP, capability, 0, 0, 0)
    call("prctl", CAP_AMBIENT, CLEAR_ALL, 0, 0, 0)
    switch(request["user"])
    if os.geteuid() == 0:
        bits = sum(1 << capability for capability in keep)
        call("capset", struct.pack("Ii", CAPABILITY_VERSION_3, 0), struct.pack("6I", bits, bits, 0, 0, 0, 0))
    call("prctl", NO_NEW_PRIVS, 1, 0, 0, 0)
    if program := request["seccomp"]:
        code = bytes.fromhex(program)
        buffer = ctypes.create_string_buffer(code)
        header = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(buffer)))
        call("prctl", SET_SECCOMP, FILTER, ctypes.addressof(header), 0, 0)


def switch(user: str | int | None) -> None:
    """Become a user of the sandbox: a number, or a name in its /etc/passwd."""
    if user in (None, 0, "0", "root"):
        return
    name = str(user)
    entries = [line.split(":") for line in Path("/etc/passwd").read_text(errors="replace").splitlines()]
    known = next((entry for entry in entries if name in (entry[0], *entry[2:3])), None)
    if known is None and not name.isdigit():
        raise LookupError(f"no user is called {name} here")
    uid, gid = (int(known[2]), int(known[3])) if known else (int(name), int(name))
    os.setgroups([])
    os.setgid(gid)
    os.setuid(uid)


def carry(request: dict[str, Any], stdin: int, stdout: int) -> None:
    """Pack what is inside, or unpack into it: our own code, as the sandbox's root user, with its capabilities."""
    drop(request)
    most, path = request["most"], request["path"]
    with open(stdin, "rb") as source, open(stdout, "wb") as target:
        if request["do"] == "pack_file":
            pack_file(path, request["name"], target, most)
        elif request["do"] == "pack_folder":
            pack_folder(path, target, most, links=False)
        else:
            unpack(source, path, most, links=True)


def call(function: str, *arguments: Any) -> None:
    if getattr(libc, function)(*arguments) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{function}: {os.strerror(error)}")
