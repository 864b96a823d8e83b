"""The system calls that no command inside needs, and that have opened doors before: refused with EPERM."""

from __future__ import annotations

import errno
import platform
import struct

# clone with any of these flags would make a namespace: new user, pid, net, ipc, uts, cgroup or mount
NEW_NAMESPACES = 0x7E020000
NEWER = {
    "open_tree": 428, "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "mount_setattr": 442,
    "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427,
}  # fmt: skip
REFUSED = {
    "x86_64": {
        "mount": 165, "umount2": 166, "pivot_root": 155, "swapon": 167, "swapoff": 168, "reboot": 169, "acct": 163,
        "init_module": 175, "delete_module": 176, "finit_module": 313, "kexec_load": 246, "kexec_file_load": 320,
        "iopl": 172, "ioperm": 173, "quotactl": 179, "add_key": 248, "request_key": 249, "keyctl": 250, "bpf": 321,
        "perf_event_open": 298, "userfaultfd": 323, "open_by_handle_at": 304, "unshare": 272, "setns": 308, **NEWER,
    },
    "aarch64": {
        "mount": 40, "umount2": 39, "pivot_root": 41, "swapon": 224, "swapoff": 225, "reboot": 142, "acct": 89,
        "init_module": 105, "delete_module": 106, "finit_module": 273, "kexec_load": 104, "kexec_file_load": 294,
        "quotactl": 60, "add_key": 217, "request_key": 218, "keyctl": 219, "bpf": 280,
        "perf_event_open": 241, "userfaultfd": 282, "open_by_handle_at": 265, "unshare": 97, "setns": 268, **NEWER,
    },
}  # fmt: skip
ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
CLONE = {"x86_64": 56, "aarch64": 220}
CLONE3 = 435
FIRST_X32 = 0x40000000
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, REFUSE = 0x7FFF0000, 0x00050000


def program(machine: str | None = None) -> bytes:
    """The filter for this machine as classic BPF, 8 bytes an instruction; empty where we know no system call numbers.

    Programs of another architecture (32 bits) are refused all their calls: the numbers mean something else there. clone3, whose
    flags a filter cannot see, does not exist (ENOSYS), so that libraries fall back on clone.
    """
    machine = machine or platform.machine()
    if machine not in REFUSED:
        return b""
    refuse, missing = REFUSE | errno.EPERM, REFUSE | errno.ENOSYS
    steps = [
        *((LOAD, 0, 0, 4), (EQUAL, 1, 0, ARCHITECTURE[machine]), (RETURN, 0, 0, refuse)),
        *((LOAD, 0, 0, 0), (AT_LEAST, 0, 1, FIRST_X32), (RETURN, 0, 0, refuse)),
        *((EQUAL, 0, 1, CLONE3), (RETURN, 0, 0, missing)),
    ]
    for number in REFUSED[machine].values():
        steps += [(EQUAL, 0, 1, number), (RETURN, 0, 0, refuse)]
    steps += [
        *((EQUAL, 0, 3, CLONE[machine]), (LOAD, 0, 0, 16), (ANY_BIT, 0, 1, NEW_NAMESPACES), (RETURN, 0, 0, refuse)),
        (RETURN, 0, 0, ALLOW),
    ]
    return b"".join(struct.pack("HBBI", *step) for step in steps)
