"""A Dockerfile's steps run once: every other sandbox of the task has the same files, whoever made them."""

import asyncio

import pytest
from harbor_folders import need_bwrap, write_task

from compactionrl.environments.harbor_task import HarborTask
from compactionrl.environments.image_cache import ImageCache
from compactionrl.sandboxes.bwrap import BwrapSandbox
from compactionrl.sandboxes.protocol import SandboxError
from compactionrl.sandboxes.rootfs import Image

DOCKERFILE = """\
FROM debian
WORKDIR /app
COPY data /app/data
RUN tr -dc a-z < /dev/urandom | head -c 20 > once && echo é > "$(printf 'a name\\nof two lines')" && rm -r /etc/hosts /home
RUN mkdir -p empty deep/er && ln -s ../once deep/link && ln -s /nowhere dangling && printf '#!/bin/sh\\necho run' > tool
RUN chmod 750 tool && chmod 1777 empty && rm data/note.txt && touch -d @1000000000 old && cp -p old /opt/older
"""
LOOK = (
    "cd /; find app opt etc home -exec stat -c '%n %F %a %u %g %s %Y' {} + 2>&1 | grep -v ^etc/ | sort;"
    "ls /etc | sort; cat app/once; readlink app/deep/link app/dangling; app/tool; cat app/a*; ls -A /run /tmp"
)


@pytest.fixture
def task(tmp_path):
    need_bwrap()
    made = HarborTask(write_task(tmp_path / "task", environment__Dockerfile=DOCKERFILE))
    made.image = ImageCache(worth_seconds=0)
    return made


async def look(task, command=LOOK):
    sandbox = BwrapSandbox(Image(env=task.env), workdir=task.workdir)
    try:
        await sandbox.start()
        await task.build(sandbox)
        return (await sandbox.exec(command)).stdout
    finally:
        await sandbox.stop()


async def several(task, count):
    return await asyncio.gather(*(look(task) for _ in range(count)))


def without_times_of_folders(text):
    return [line if " directory " not in line else line.rsplit(" ", 1)[0] for line in text.splitlines()]


def test_every_sandbox_has_what_the_first_one_made(task):
    first, *others = asyncio.run(several(task, 3))
    assert "dangling symbolic link" in first
    assert "opt/older regular empty file 644 0 0 0 1000000000" in first
    assert "note.txt" not in first
    assert "hosts" not in first.split()
    for other in (*others, *asyncio.run(several(task, 2))):  # another event loop
        assert without_times_of_folders(other) == without_times_of_folders(first)


def test_the_next_one_makes_it_where_the_first_one_failed(task):
    class Failing(BwrapSandbox):
        async def upload_dir(self, source_dir, target_dir):
            await asyncio.sleep(0.1)
            raise SandboxError("broken")

    async def both():
        failing = Failing(Image(env=task.env), workdir=task.workdir)
        await failing.start()
        first = asyncio.create_task(task.build(failing))
        outcomes = await asyncio.gather(first, look(task, "cat once"), look(task, "cat once"), return_exceptions=True)
        await failing.stop()
        return outcomes

    broken, one, other = asyncio.run(both())
    assert isinstance(broken, SandboxError)
    assert len(one) == 20
    assert one == other


def test_what_is_quick_runs_everywhere(task):
    task.image = ImageCache(worth_seconds=60)
    texts = asyncio.run(several(task, 2))
    assert task.image.folder is None
    assert len({text.partition("once")[2] for text in texts}) == 2  # random letters


def test_where_nothing_can_be_kept_the_steps_run_everywhere(task, monkeypatch):
    monkeypatch.setattr("compactionrl.environments.image_cache.END", "exit 1")

    async def pair():
        return [await look(task, "cat once; ls -A /run"), await look(task, "cat once; ls -A /run")]

    one, other = asyncio.run(pair())
    assert one != other
    assert len(one) == len(other) == 20


def test_nothing_is_left_when_the_task_is_gone(task, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    asyncio.run(look(task))
    assert [path.name.startswith("compactionrl-image-") for path in tmp_path.iterdir() if path.name != "task"] == [True]
    del task.image
    assert [path.name for path in tmp_path.iterdir()] == ["task"]
