"""A bash shell in any sandbox: its directory, variables and functions stay from one command to the next."""

from __future__ import annotations

import math
import shlex
import time
from dataclasses import dataclass
from typing import Protocol

from compactionrl.sandboxes.protocol import Sandbox

SAVE = (
    '{{ builtin printf \'builtin cd -- %q 2>/dev/null || echo "[%q is gone, this is $PWD]"\\n\' "$PWD" "$PWD"; '
    "builtin unset PWD; builtin declare -p; builtin declare -f; }} 2>/dev/null >{state}.new && command mv {state}.new {state}"
)
SCRIPT = """\
exec 2>&1 </dev/null
unset BASH_EXECUTION_STRING
{enter}
[ -r {state} ] && . {state} 2>/dev/null
builtin trap {save} EXIT
eval {command}
builtin set -- "$?"
builtin trap {save} EXIT
builtin exit "$1"
"""
"""PWD comes from `cd` and is not restored, so that it is true where that fails. The trap is set again behind the command, which
may have set its own; `exit` and `set -e` end the command, not the shell."""
MOST_BYTES = 100_000
"""Of a whole script: the kernel takes 128 KiB as one argument."""
GRACE = 2
"""Seconds between asking a command that ran out of time to end and killing it."""
SLACK = 10
"""Seconds that a sandbox has beyond a command's own."""


class CommandRefused(Exception):
    """A command that no shell can take; the message is for who wrote it."""


@dataclass(frozen=True)
class Ran:
    """`output`: stdout and stderr in the order in which they came. `out_of_time`: the command was stopped."""

    output: str
    return_code: int
    seconds: float
    out_of_time: bool


class Shell(Protocol):
    async def run(self, command: str, seconds: float) -> Ran:
        """Run a command for at most `seconds` (rounded up); then it is stopped.

        Raises CommandRefused for one that no shell can take, and whatever the sandbox raises.
        """
        ...


def open_shell(
    sandbox: Sandbox, cwd: str | None = None, env: dict[str, str] | None = None, user: str | int | None = None
) -> Shell:
    """The sandbox's own shell where it keeps one (which begins in the sandbox's folder, with its variables), else ours."""
    if getattr(sandbox, "mode", "exec") == "persistent" and user is None:
        return KeptShell(sandbox)
    return CarriedShell(sandbox, cwd, env, user)


@dataclass(frozen=True)
class KeptShell:
    """One bash that the sandbox keeps running. A command that is stopped may take it along; then the next one begins anew."""

    sandbox: Sandbox

    async def run(self, command: str, seconds: float) -> Ran:
        limit = math.ceil(seconds)
        return await timed(self.sandbox, f"eval {quoted(command)} 2>&1", limit, limit)


@dataclass(frozen=True)
class CarriedShell:
    """Each command runs in a bash of its own that begins where the last one ended, so any sandbox will do.

    Shell options, traps and positional parameters do not stay. stdin is empty. What runs in the background goes on.
    `cwd`: where it begins (default: where the sandbox does). `state`: the file in the sandbox that says where the last command
    ended; without it, the shell begins anew. A command that is stopped is asked to end first, so that its state stays too.
    """

    sandbox: Sandbox
    cwd: str | None = None
    env: dict[str, str] | None = None
    user: str | int | None = None
    state: str = "/tmp/.shell"

    async def run(self, command: str, seconds: float) -> Ran:
        limit = math.ceil(seconds)
        call = f"timeout -k {GRACE} {limit} bash --norc --noprofile -c {shlex.quote(self.script(command))}"
        if len(call.encode()) > MOST_BYTES:
            raise CommandRefused("The command is too long, nothing was run. Write large files with several commands.")
        # Entering the folder is the script's: a sandbox could not begin in one that the last command has removed.
        return await timed(self.sandbox, call, limit, limit + GRACE + SLACK, self.cwd and "/", self.env, self.user)

    def script(self, command: str) -> str:
        return SCRIPT.format(
            enter=f"cd -- {shlex.quote(self.cwd)} 2>/dev/null" if self.cwd else "",
            state=self.state,
            save=shlex.quote(SAVE.format(state=self.state)),
            command=quoted(command),
        )


async def timed(
    sandbox: Sandbox,
    call: str,
    limit: int,
    timeout_sec: int,
    cwd: str | None = None,
    env: dict[str, str] | None = None,
    user: str | int | None = None,
) -> Ran:
    """A status of 124 or 137 alone does not say that a command ran out of time: it may be the command's own."""
    begun = time.monotonic()
    result = await sandbox.exec(call, cwd, env, timeout_sec, user)
    took = time.monotonic() - begun
    output = (result.stdout or "") + (result.stderr or "")
    return Ran(output, result.return_code, took, result.return_code in (124, 137) and took >= limit)


def quoted(command: str) -> str:
    if "\0" in command:
        raise CommandRefused("A command cannot hold a NUL character, nothing was run.")
    return shlex.quote(command.encode(errors="replace").decode())
