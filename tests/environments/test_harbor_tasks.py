"""Folders of tasks as a TaskSet: sorted, each once, nothing both to train on and held out."""

import asyncio

import pytest
from harbor_folders import need_bwrap, write_task

from compactionrl.environments.harbor_settings import TaskFolderError
from compactionrl.environments.harbor_tasks import HarborTasks
from compactionrl.environments.protocol import Response


@pytest.fixture
def folders(tmp_path):
    for split, names in (("train", "cab"), ("heldout", "ed")):
        for name in names:
            write_task(tmp_path / split / name)
    (tmp_path / "train" / "notes").mkdir()
    (tmp_path / "train" / "README.md").write_text("no task")
    return tmp_path


def test_tasks_by_name(folders):
    tasks = HarborTasks(folders / "train", folders / "heldout")
    assert [tasks.task_id("train", index) for index in range(tasks.size("train"))] == ["a", "b", "c"]
    assert [tasks.task_id("heldout", index) for index in range(tasks.size("heldout"))] == ["d", "e"]
    with pytest.raises(IndexError, match="5"):
        tasks.task_id("train", 5)
    with pytest.raises(IndexError, match="-1"):
        tasks.environment("train", -1)
    with pytest.raises(ValueError, match="split"):
        tasks.size("test")


def test_several_folders_and_none(folders):
    tasks = HarborTasks([folders / "train", folders / "heldout"])
    assert (tasks.size("train"), tasks.size("heldout")) == (5, 0)
    with pytest.raises(TaskFolderError, match="no Harbor task"):
        HarborTasks(folders / "missing")
    with pytest.raises(TaskFolderError, match="are called a"):
        HarborTasks([folders / "train", folders / "train"])


def test_no_task_is_in_both_splits_whatever_its_name(folders):
    write_task(folders / "heldout" / "a", environment__data__note_dot_txt="another")
    with pytest.raises(TaskFolderError, match="same task"):
        HarborTasks(folders / "train", folders / "heldout")
    (folders / "heldout" / "a").rename(folders / "heldout" / "f")
    assert HarborTasks(folders / "train", folders / "heldout").size("heldout") == 3
    write_task(folders / "heldout" / "g", environment__data__note_dot_txt="a note for b\n")
    with pytest.raises(TaskFolderError, match=r"heldout/g.*train/b"):
        HarborTasks(folders / "train", folders / "heldout")


def test_a_sandbox_is_as_the_task_says_unless_the_options_do(folders):
    toml = "[environment]\ncpus = 2\nmemory_mb = 512\nnetwork_mode = 'public'\nworkdir = '/srv'\nenv = { A = 'b' }\n"
    write_task(folders / "train" / "a", task_dot_toml=toml)
    tasks = HarborTasks(folders / "train")
    sandbox = tasks.sandbox(tasks.task("train", 0))
    assert (sandbox.limits.cpus, sandbox.limits.memory_mb, sandbox.network) == (2, 512, True)
    assert (sandbox.workdir, sandbox.env["A"], sandbox.env["NUMBER"]) == ("/srv", "b", "7")
    options = {"limits": {"memory_mb": 64, "processes": 9}, "network": False, "shell": "persistent"}
    tasks = HarborTasks(folders / "train", sandbox_options=options)
    sandbox = tasks.sandbox(tasks.task("train", 0))
    assert (sandbox.limits.cpus, sandbox.limits.memory_mb, sandbox.limits.processes) == (2, 64, 9)
    assert (sandbox.network, sandbox.mode, sandbox.workdir) == (False, "persistent", "/srv")


class Own:
    def __init__(self, task, colour="red"):
        self.task, self.colour = task, colour


def test_a_sandbox_of_ones_own_gets_the_task(folders):
    tasks = HarborTasks(folders / "train", sandbox="test_harbor_tasks:Own", sandbox_options={"colour": "blue"})
    environment = tasks.environment("train", 1)
    assert (environment.sandbox.task.id, environment.sandbox.colour) == ("b", "blue")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"sandbox": "process"}, "process"),
        ({"sandbox": "docker"}, "docker"),
        ({"tools": "json"}, "tools"),
        ({"output_bytes": 1}, "output_bytes"),
        ({"sandbox_options": {"shell": "zsh"}}, "zsh"),
        ({"sandbox_options": {"limits": {"cpus": -1}}}, "cpus"),
        ({"reward_key": "x"}, "reward_key"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_runs(folders, options, named):
    with pytest.raises((ValueError, TypeError), match=named):
        HarborTasks(folders / "train", **options)


def test_an_environment_is_a_new_sandbox_each_time(folders):
    need_bwrap()
    tasks = HarborTasks(folders / "train", folders / "heldout", tools="fenced")

    async def play(command):
        environment = tasks.environment("train", 0)
        await environment.start()
        shown = await environment.step(Response(f"```bash\n{command}\n```"))
        verdict = await environment.verify()
        await environment.close()
        return shown.text, verdict.reward

    assert asyncio.run(play("echo 7 > seven.txt; cat data/note.txt")) == ("a note for a", 1.0)
    assert asyncio.run(play("ls")) == ("built.txt\ndata", 0.0)
