"""The filter, run by hand."""

from __future__ import annotations

import errno
import struct

import pytest

from compactionrl.sandboxes.seccomp import ALLOW, ARCHITECTURE, CLONE, REFUSED, program


def verdict(machine: str, number: int, argument: int = 0, architecture: int | None = None) -> int:
    """What the kernel would do: classic BPF over `struct seccomp_data`, as its documentation has it."""
    data = struct.pack("<IIQQ", number, architecture or ARCHITECTURE[machine], 0, argument)
    steps = list(struct.iter_unpack("HBBI", program(machine)))
    register, at = 0, 0
    while True:
        code, if_true, if_false, value = steps[at]
        at += 1
        if code == 0x20:
            register = struct.unpack_from("<I", data, value)[0]
        elif code == 0x06:
            return value
        else:
            test = {0x15: register == value, 0x35: register >= value, 0x45: bool(register & value)}[code]
            at += if_true if test else if_false


@pytest.mark.parametrize("machine", sorted(REFUSED))
def test_what_is_refused_and_what_is_not(machine: str) -> None:
    refused = 0x00050000 | errno.EPERM
    for number in range(500):
        wanted = refused if number in REFUSED[machine].values() else ALLOW
        if number == 435:
            wanted = 0x00050000 | errno.ENOSYS
        assert verdict(machine, number) == wanted, number
    for flags in (0x10000000, 0x00020000, 0x20000000, 0x7E020000 | 17):
        assert verdict(machine, CLONE[machine], flags) == refused
    assert verdict(machine, CLONE[machine], 0x01200011) == ALLOW  # what fork asks for
    assert verdict(machine, 0x40000000 + 165) == refused
    assert verdict(machine, 20, architecture=0x40000003) == refused


def test_machines_that_we_do_not_know() -> None:
    assert program("riscv64") == b""
