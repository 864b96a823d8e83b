"""Whether sandboxes run on this machine."""

from __future__ import annotations

import subprocess
from functools import cache

from compactionrl.sandboxes.bwrap import bwrap_path
from compactionrl.sandboxes.protocol import SandboxError


@cache
def why_not() -> str:
    """Why no sandbox can run here; empty if one can. Asked without our own code: if that is broken, tests are to fail."""
    try:
        program = bwrap_path()
    except SandboxError as error:
        return str(error)
    for command in (
        ["unshare", "--user", "--map-root-user", "--mount", "true"],
        [program, "--ro-bind", "/", "/", "--unshare-all", "true"],
    ):
        if subprocess.run(command, capture_output=True).returncode != 0:
            return f"{command[0]} does not work here"
    return ""
