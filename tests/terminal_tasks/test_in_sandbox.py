"""The 24 canonical tasks through the project's own loader, verifier and sandbox."""

import asyncio
from pathlib import Path

import pytest

from compactionrl.environments.harbor_task import run_nothing, run_oracle
from compactionrl.environments.harbor_tasks import HarborTasks
from compactionrl.sandboxes.bwrap import BwrapSandbox
from compactionrl.sandboxes.protocol import SandboxError
from compactionrl.terminal_tasks import GRADES, KINDS, instances, write_tasks

NAMES = [f"{kind}-{grade}-heldout-0" for kind in sorted(KINDS) for grade in sorted(GRADES)]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> HarborTasks:
    """A TaskSet refuses the same task in both of its splits."""
    root: Path = tmp_path_factory.mktemp("tasks")
    write_tasks(root / "train", instances("train", grades=["easy"]))
    write_tasks(root / "heldout", instances())
    return HarborTasks(root / "train", root / "heldout")


@pytest.fixture(scope="module")
def bwrap() -> None:
    async def attempt() -> None:
        sandbox = BwrapSandbox()
        await sandbox.start()
        await sandbox.stop()

    try:
        asyncio.run(attempt())
    except SandboxError as error:
        pytest.skip(str(error))


def test_all_are_loaded(tasks: HarborTasks) -> None:
    assert [tasks.task_id("heldout", index) for index in range(tasks.size("heldout"))] == NAMES
    assert tasks.size("train") == 8
    assert not any(tasks.task("heldout", index).network for index in range(24))


@pytest.mark.usefixtures("bwrap")
@pytest.mark.parametrize("name", NAMES)
def test_the_oracle_gets_all_and_nothing_gets_nothing(tasks: HarborTasks, name: str) -> None:
    task = tasks.task("heldout", NAMES.index(name))
    assert asyncio.run(run_nothing(task, tasks.sandbox(task))).reward == 0.0
    assert asyncio.run(run_oracle(task, tasks.sandbox(task))).reward == 1.0
