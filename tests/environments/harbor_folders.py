"""Task folders in Harbor's format for tests, and a sandbox to run them in."""

from pathlib import Path

import pytest

DOCKERFILE = "FROM ubuntu:24.04\nENV NUMBER=7\nWORKDIR /app\nCOPY data/ /app/data/\nRUN echo built > built.txt\n"
TEST = """\
#!/bin/bash
mkdir -p /logs/verifier
if [ "$(cat /app/seven.txt)" = "$NUMBER" ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""
SOLVE = '#!/bin/bash\necho "$NUMBER" > /app/seven.txt\n'


def write_task(folder, **files):
    """A task that is solved by writing 7 into /app/seven.txt. `files`: path, with __ for / and _dot_ for ., -> text."""
    texts = {
        "task.toml": "[agent]\ntimeout_sec = 60\n[verifier]\ntimeout_sec = 30\n",
        "instruction.md": "Write $NUMBER into seven.txt.\n",
        "environment/Dockerfile": DOCKERFILE,
        "environment/data/note.txt": f"a note for {Path(folder).name}\n",
        "tests/test.sh": TEST,
        "solution/solve.sh": SOLVE,
    } | {name.replace("__", "/").replace("_dot_", "."): text for name, text in files.items()}
    for name, text in texts.items():
        if text is not None:
            path = Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    return Path(folder)


def need_bwrap():
    """Skip where no sandbox can be made, and say why."""
    from compactionrl.sandboxes.bwrap import bwrap_path
    from compactionrl.sandboxes.protocol import SandboxError

    try:
        bwrap_path()
    except SandboxError as error:
        pytest.skip(str(error))
