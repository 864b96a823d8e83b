"""ScienceWorld (Allen AI, Apache-2.0 licence): its tasks, with its own train, dev and test variations. Needs Java."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Sequence
from functools import cached_property
from importlib.util import find_spec
from typing import Any, Literal

from compactionrl.environments.text_game import TextGameEnvironment
from compactionrl.environments.textworld import SPLITS, MissingLibrary

SYSTEM = (
    "You do a science experiment in a text game. Say one command at a time and nothing else. "
    "Commands, OBJ standing for a thing in view: {commands}, quit."
)
SECONDS_TO_END = 10.0


class ScienceWorldTasks:
    """A TaskSet of ScienceWorld's variations.

    tasks: names of its 30 task types ("boil", "find-plant", ...); none: all. heldout: whether its "dev" or its "test"
    variations are held out; "train" are its own too. simplifications: as ScienceWorld takes them, "easy" or a list with
    commas. The variations are counted once, by a Java process of a few seconds.

    Each environment has a Java process of its own, some 4 seconds and 200 MB: choose sampling.concurrency accordingly.
    """

    def __init__(
        self,
        *,
        tasks: Sequence[str] = (),
        heldout: Literal["dev", "test"] = "test",
        simplifications: str = "",
    ) -> None:
        check_installed()
        if heldout not in ("dev", "test"):
            raise ValueError(f"heldout must be 'dev' or 'test', not {heldout!r}.")
        from scienceworld.constants import ID2TASK

        unknown = sorted(set(tasks) - set(ID2TASK.values()))
        if unknown:
            raise ValueError(f"unknown tasks {', '.join(unknown)}: ScienceWorld has {', '.join(ID2TASK.values())}.")
        self.tasks, self.heldout = list(tasks) or list(ID2TASK.values()), heldout
        self.simplifications = simplifications
        self.walkthroughs: dict[str, list[str]] = {}
        """Of every game that was started: the commands that win it, by the text of its task."""

    @cached_property
    def _variations(self) -> dict[str, list[tuple[str, int]]]:
        """By split: (task, number of the variation), in the order of the tasks."""
        found: dict[str, list[tuple[str, int]]] = {split: [] for split in SPLITS}
        with simulator() as world:
            for task in self.tasks:
                world.load(task, 0, self.simplifications)
                heldout = world.get_variations_dev if self.heldout == "dev" else world.get_variations_test
                found["train"] += [(task, number) for number in world.get_variations_train()]
                found["heldout"] += [(task, number) for number in heldout()]
        return found

    def size(self, split: str) -> int:
        if split not in SPLITS:
            raise ValueError(f"split must be one of {', '.join(SPLITS)}, not {split!r}.")
        return len(self._variations[split])

    def task_id(self, split: str, index: int) -> str:
        if not 0 <= index < self.size(split):
            raise IndexError(f"There is no task {index} in {split!r}: it has {self.size(split)} tasks.")
        task, number = self._variations[split][index]
        return f"scienceworld-{split}-{task}-{number}"

    def environment(self, split: str, index: int) -> TextGameEnvironment:
        self.task_id(split, index)  # refuses an index that does not exist
        return TextGameEnvironment(lambda: self._open(*self._variations[split][index]))

    def _open(self, task: str, number: int) -> ScienceWorldGame:
        game = ScienceWorldGame(task, number, self.simplifications)
        self.walkthroughs[game.task] = game.walkthrough
        return game


def check_installed() -> None:
    """Raise MissingLibrary that says what to install."""
    if find_spec("scienceworld") is None:
        raise MissingLibrary("ScienceWorld is not installed: pip install 'compactionrl[games]'.")
    if shutil.which("java") is None:
        raise MissingLibrary(
            "ScienceWorld needs Java, and no `java` is on the path: install a Java runtime, version 8 or later "
            "(Debian and Ubuntu: apt install default-jre-headless)."
        )


def start_simulator() -> Any:
    """A ScienceWorldEnv in a Java process of its own; end it with `end_simulator`."""
    check_installed()
    import scienceworld

    return scienceworld.ScienceWorldEnv()


def end_simulator(world: Any) -> None:
    """End the Java process, whatever it is doing, and wait until it is gone."""
    process, gateway = world._gateway.java_process, world._gateway
    world.close = lambda: None  # its finaliser calls it, whenever that comes; it may write to a process that is gone
    gateway.shutdown()
    gateway._gateway_client.is_connected = False  # or objects that are collected later try to tell Java about it
    process.kill()
    process.wait(SECONDS_TO_END)
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            stream.close()
    world._obj_tree_tempdir.cleanup()


@contextlib.contextmanager
def simulator() -> Iterator[Any]:
    world = start_simulator()
    try:
        yield world
    finally:
        end_simulator(world)


class ScienceWorldGame:
    """One variation of one task. A failed task scores 0; ScienceWorld itself gives it less."""

    def __init__(self, task: str, number: int, simplifications: str = "") -> None:
        self._world = start_simulator()
        try:
            self._world.load(task, number, simplifications, generateGoldPath=True)
            self.walkthrough: list[str] = self._world.get_gold_action_sequence()
            first, _ = self._world.reset()
            self.system = SYSTEM.format(commands=", ".join(self._world.get_possible_actions()))
            self.task = f"{self._world.get_task_description()}\n\n{first}".strip()
        except BaseException:
            end_simulator(self._world)
            raise

    def start(self) -> str:
        return self.task

    def step(self, command: str) -> tuple[str, bool]:
        server = self._world.server  # ScienceWorldEnv.step lists every valid command after every step, which is slow
        text = server.step(command).strip()
        return text, bool(server.getCompleted()) or server.getScore() < 0

    def score(self) -> float:
        return min(1.0, max(0.0, float(self._world.server.getScore())))

    def interrupt(self) -> None:
        self._world._gateway.java_process.kill()

    def close(self) -> None:
        end_simulator(self._world)
