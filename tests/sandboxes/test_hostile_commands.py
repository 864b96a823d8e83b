"""Hostile commands, as this user and, where this user is root, as an ordinary one too. The attempts are in hostile.py."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from ordinary_user import as_nobody, as_self

SCRIPT = Path(__file__).with_name("hostile.py").read_text()
USERS = ["this user", "an ordinary user"]


@pytest.fixture(scope="module")
def reports(bwrap: None) -> Iterator[dict[str, Any]]:
    """What came of every attempt, by user. Both users try at the same time: most of it is waiting."""
    with ExitStack() as stack:
        starts = {"this user": as_self()}
        if os.geteuid() == 0:
            try:
                starts["an ordinary user"] = stack.enter_context(as_nobody())
            except RuntimeError as error:
                print(error)
        running = {
            user: subprocess.Popen(
                [*start, "-c", SCRIPT], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            for user, (start, env) in starts.items()
        }
        found = dict[str, Any]()
        for user, process in running.items():
            stdout, stderr = process.communicate(timeout=240)
            found[user] = json.loads(stdout) if process.returncode == 0 else stderr
        yield found


@pytest.mark.parametrize("user", USERS)
def test_every_attempt_is_held(reports: dict[str, Any], user: str) -> None:
    if user not in reports:
        pytest.skip("this user is an ordinary one, or cannot run Python as one")
    report = reports[user]
    assert isinstance(report, dict), report
    assert [row for row in report["rows"] if not row["held"]] == []
    assert len(report["rows"]) > 100
    assert report["changed"] == []
    assert report["leaked"] == []
    assert report["megabytes"] < 200, "output was kept that is over the cap"
