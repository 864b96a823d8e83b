"""Limits, and the groups of the kernel that hold them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from compactionrl.sandboxes import limits
from compactionrl.sandboxes.limits import Cgroups, Limits, enforcement, settings


def test_fractions_are_whole_numbers_for_the_kernel() -> None:
    some = Limits(memory_mb=1.5, disk_mb=0.5, cpus=0.25, processes=7)
    assert settings("memory", some, unified=False) == [("memory.limit_in_bytes", str(2 << 20))]
    assert settings("memory", some, unified=True) == [("memory.max", str(2 << 20))]
    assert settings("pids", some, unified=True) == [("pids.max", "7")]
    assert settings("cpu", some, unified=True) == [("cpu.max", "25000 100000")]
    assert settings("cpu", some, unified=False) == [("cpu.cfs_period_us", "100000"), ("cpu.cfs_quota_us", "25000")]
    assert some.rlimits()["RLIMIT_DATA"] == 3 << 19


@pytest.mark.parametrize("name", ["memory_mb", "disk_mb", "processes", "cpus", "output_bytes", "transfer_mb"])
@pytest.mark.parametrize("value", [0, -1, float("nan")])
def test_nothing_is_no_limit(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        Limits(**{name: value})


@pytest.fixture
def unified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hierarchy of version 2, in which this process is in /user/own and /user is ours to write."""
    own = tmp_path / "user" / "own"
    own.mkdir(parents=True)
    for folder in (tmp_path, tmp_path / "user", own):
        (folder / "cgroup.procs").touch()
        (folder / "cgroup.subtree_control").write_text("memory pids cpu\n" if folder != own else "")
    (own / "cgroup.subtree_control").chmod(0o444)
    read = Path.read_text

    def read_text(path: Path, *arguments: str) -> str:
        return "0::/user/own\n" if str(path) == "/proc/self/cgroup" else read(path, *arguments)

    monkeypatch.setattr(Path, "read_text", read_text)
    monkeypatch.setattr(limits, "mounts", lambda: [(tmp_path, "/", "cgroup2", "rw")])
    monkeypatch.setattr(limits, "delegates", lambda folder, controller: folder.name == "user")
    return tmp_path


def test_version_2_uses_the_nearest_group_that_delegates(unified: Path) -> None:
    group = Cgroups.make(Limits(memory_mb=1, disk_mb=2))
    assert set(group.folders) == {"memory", "pids", "cpu"}
    [path] = group.paths
    assert Path(path).parent == unified / "user"
    assert Path(path, "memory.max").read_text() == str(3 << 20)
    group.join(4321)
    assert Path(path, "cgroup.procs").read_text() == "4321"


def test_groups_of_processes_that_are_gone_are_swept(tmp_path: Path) -> None:
    gone, alive, other = (
        tmp_path / name for name in ("compactionrl-99999999-1", f"compactionrl-{os.getpid()}-7", "else")
    )
    for folder in (gone, alive, other):
        folder.mkdir()
    limits.sweep(tmp_path)
    assert (gone.exists(), alive.exists(), other.exists()) == (False, True, True)


def test_without_groups_it_is_said_what_is_not_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(limits: Limits) -> Cgroups:
        raise PermissionError

    monkeypatch.setattr(Cgroups, "make", refuse)
    said = enforcement()
    assert "NOT" in said["memory"]
    assert "NOT" in said["cpus"]
    assert ("NOT" in said["processes"]) == (os.geteuid() == 0)
