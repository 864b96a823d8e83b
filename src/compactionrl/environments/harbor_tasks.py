"""Folders of Harbor tasks as a TaskSet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from compactionrl.environments.harbor_settings import TaskFolderError
from compactionrl.environments.harbor_task import SETTINGS, HarborTask
from compactionrl.environments.terminal import TerminalEnvironment, TerminalOptions
from compactionrl.sandboxes.lookup import open_sandbox
from compactionrl.sandboxes.protocol import Sandbox
from compactionrl.sandboxes.rootfs import Image

SPLITS = ("train", "heldout")
Folders = str | Path | Sequence[str | Path]


class HarborTasks:
    """A TaskSet: every folder below `train` and below `heldout` that has a task.toml, by name.

    sandbox: "bwrap" (the task's image, network, limits and folder, unless `sandbox_options` say otherwise), or `module:Class`
    of your own, called as Class(task=the HarborTask, **sandbox_options).
    reward: which of the verifier's rewards counts.
    terminal: fields of TerminalOptions, such as `tools = "fenced"`.

    Raises TaskFolderError for a task that cannot be used, for two of one name, and for one that is in both splits, whatever
    its name there. All of it is checked here, before anything runs.
    """

    def __init__(
        self,
        train: Folders = (),
        heldout: Folders = (),
        *,
        sandbox: str = "bwrap",
        sandbox_options: dict[str, Any] | None = None,
        reward: str = "reward",
        **terminal: Any,
    ) -> None:
        self.tasks = {"train": read_tasks(train), "heldout": read_tasks(heldout)}
        self.kind, self.sandbox_options, self.reward = sandbox, sandbox_options or {}, reward
        self.options = TerminalOptions(**terminal)
        if sandbox == "process":
            raise ValueError(
                "Harbor tasks live in /app, /tests and /logs: sandbox 'process' has no such folders but this machine's own"
            )
        check_unshared(*self.tasks.values())
        for task in (*self.tasks["train"], *self.tasks["heldout"]):
            self.sandbox(task)

    def size(self, split: str) -> int:
        return len(self._split(split))

    def task_id(self, split: str, index: int) -> str:
        return self.task(split, index).id

    def task(self, split: str, index: int) -> HarborTask:
        tasks = self._split(split)
        if not 0 <= index < len(tasks):
            raise IndexError(f"There is no task {index} in {split!r}: it has {len(tasks)} tasks.")
        return tasks[index]

    def sandbox(self, task: HarborTask) -> Sandbox:
        """A new one, not started yet, for one rollout of the task."""
        options = self.sandbox_options
        if self.kind != "bwrap":
            return open_sandbox(self.kind, task=task, **options)
        own = {
            "image": Image(options.get("image"), task.env),
            "limits": task.limits | dict(options.get("limits", {})),
            "network": options.get("network", task.network),
            "workdir": task.workdir,
        }
        return open_sandbox("bwrap", **{**options, **own})

    def environment(self, split: str, index: int) -> TerminalEnvironment:
        task = self.task(split, index)
        return task.environment(self.sandbox(task), self.options, self.reward)

    def _split(self, split: str) -> list[HarborTask]:
        if split not in self.tasks:
            raise ValueError(f"There is no split {split!r}: choose one of {', '.join(SPLITS)}.")
        return self.tasks[split]


def read_tasks(folders: Folders) -> list[HarborTask]:
    """All tasks right below the folders, by name. Raises TaskFolderError for a folder without one and for two of one name."""
    tasks = list[HarborTask]()
    for folder in [folders] if isinstance(folders, str | Path) else folders:
        found = sorted(path.parent for path in Path(folder).glob(f"*/{SETTINGS}"))
        if not found:
            raise TaskFolderError(f"{folder} holds no Harbor task: no folder below it has a {SETTINGS}")
        tasks += [HarborTask(path) for path in found]
    for name, count in Counter(task.id for task in tasks).items():
        if count > 1:
            raise TaskFolderError(f"{count} tasks are called {name}: rename their folders")
    return sorted(tasks, key=lambda task: task.id)


def check_unshared(train: Sequence[HarborTask], heldout: Sequence[HarborTask]) -> None:
    names = {task.id: task for task in train}
    contents = {task.digest: task for task in train}
    for task in heldout:
        if same := names.get(task.id) or contents.get(task.digest):
            raise TaskFolderError(f"{task.folder} is to be held out, but {same.folder}, to train on, is the same task")
