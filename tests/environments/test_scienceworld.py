"""ScienceWorld behind the protocol. Its tests need the extra `games` and Java; one says what is missing without them."""

from __future__ import annotations

import asyncio
import gc
import os
import shutil
import signal
import threading
from pathlib import Path

import pytest

pytest.importorskip("scienceworld", reason="the extra `games` is not installed")

from compactionrl.environments.protocol import Response
from compactionrl.environments.scienceworld import ScienceWorldTasks
from compactionrl.environments.text_game import TextGameEnvironment
from compactionrl.environments.textworld import MissingLibrary

needs_java = pytest.mark.skipif(
    shutil.which("java") is None or not Path("/proc").exists(), reason="ScienceWorld needs Java, and the test /proc"
)


def java_processes() -> set[int]:
    """Children of this process that are Java, zombies included."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, rest = stat.read_text().split("(", 1)[1].rsplit(")", 1)
        except OSError:
            continue
        if name == "java" and int(rest.split()[1]) == os.getpid():
            found.add(int(stat.parent.name))
    return found


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture(scope="module")
def tasks() -> ScienceWorldTasks:
    return ScienceWorldTasks(tasks=["find-plant", "find-animal"])


def test_without_java_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingLibrary, match="install a Java runtime"):
        ScienceWorldTasks()


@needs_java
def test_bad_options_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown tasks fly-away: ScienceWorld has boil"):
        ScienceWorldTasks(tasks=["fly-away"])
    with pytest.raises(ValueError, match="'dev' or 'test'"):
        ScienceWorldTasks(heldout="train")  # type: ignore[arg-type]


@needs_java
def test_the_splits_are_its_own_and_share_nothing(tasks: ScienceWorldTasks) -> None:
    ids = {split: {tasks.task_id(split, i) for i in range(tasks.size(split))} for split in ("train", "heldout")}
    variations = {split: {name.split("-", 2)[2] for name in names} for split, names in ids.items()}
    assert not variations["train"] & variations["heldout"]
    assert {name.rsplit("-", 1)[0] for name in variations["heldout"]} == {"find-plant", "find-animal"}
    assert all(len(ids[split]) == tasks.size(split) > 0 for split in ids)
    with pytest.raises(IndexError, match="There is no task"):
        tasks.environment("train", tasks.size("train"))
    with pytest.raises(ValueError, match="split must be one of"):
        tasks.size("test")


@needs_java
def test_a_gold_path_scores_1_and_leaves_nothing_behind(tasks: ScienceWorldTasks) -> None:
    tasks.size("train")  # the variations are counted
    before, files, threads = java_processes(), open_files(), threading.active_count()

    async def play() -> None:
        environment = tasks.environment("heldout", 0)
        system, task = await environment.start()
        assert "open OBJ" in system["content"]
        assert len(java_processes() - before) == 1
        observation = await environment.step(Response("dance wildly"))
        assert "No known action" in str(observation.text)
        assert (await environment.verify()).reward < 1
        for command in tasks.walkthroughs[task["content"]]:
            observation = await environment.step(Response(command))
        assert observation.done
        assert (await environment.verify()).reward == 1.0
        await environment.close()

    asyncio.run(play())
    gc.collect()
    assert (java_processes(), open_files(), threading.active_count()) == (before, files, threads)


@needs_java
def test_a_simulator_that_hangs_is_ended_by_close(tasks: ScienceWorldTasks, monkeypatch: pytest.MonkeyPatch) -> None:
    before = java_processes()

    async def play() -> None:
        environment: TextGameEnvironment = tasks.environment("train", 0)
        await environment.start()
        [process] = java_processes() - before
        os.kill(process, signal.SIGSTOP)
        try:
            step = asyncio.create_task(environment.step(Response("look around")))
            await asyncio.sleep(0.1)
            assert not step.done()
            step.cancel()
            await asyncio.wait_for(environment.close(), 30)
        finally:
            if process in java_processes():
                os.kill(process, signal.SIGKILL)

    asyncio.run(play())
    assert java_processes() == before
