"""Which instances there are, what their folders hold, and that no two splits share one."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from compactionrl.cli import main
from compactionrl.terminal_tasks import GRADES, KINDS, Draft, TerminalTask, instances, make_task, write_tasks

CANONICAL = list(instances())


def test_the_canonical_ones_are_every_kind_in_every_grade() -> None:
    assert [(task.kind, task.grade) for task in CANONICAL] == [(kind, grade) for kind in KINDS for grade in GRADES]
    assert len(CANONICAL) == 24
    assert {(task.split, task.seed) for task in CANONICAL} == {("heldout", 0)}


@pytest.mark.parametrize("task", CANONICAL, ids=lambda task: task.name)
class TestFolder:
    def test_holds_what_harbor_asks_for(self, task: TerminalTask) -> None:
        folder = task.folder()
        settings = tomllib.loads(folder["task.toml"])
        assert settings["schema_version"] == "1.4"
        assert settings["environment"]["network_mode"] == "no-network"
        assert settings["metadata"] == {
            "kind": task.kind,
            "grade": task.grade,
            "split": task.split,
            "seed": task.seed,
            "content_hash": task.content_hash(),
        }
        assert {"instruction.md", "tests/test.sh", "solution/solve.sh", "environment/Dockerfile"} <= set(folder)
        used = {line.split()[0] for line in folder["environment/Dockerfile"].splitlines() if line[:1].isalpha()}
        assert used <= {"FROM", "WORKDIR", "ENV", "COPY", "RUN"}

    def test_is_small_and_yet_more_than_one_look(self, task: TerminalTask) -> None:
        folder = task.folder()
        assert sum(len(text.encode()) for text in folder.values()) < 300_000
        seen = [text for path, text in folder.items() if path.startswith("environment/app/")]
        files, characters = {"easy": (12, 12_000), "medium": (24, 30_000), "hard": (40, 60_000)}[task.grade]
        assert len(seen) >= files
        assert sum(map(len, seen)) >= characters

    def test_the_answer_is_not_in_what_the_agent_sees(self, task: TerminalTask) -> None:
        seen = "\n".join(task.draft.files.values()) + task.draft.instruction
        assert task.name not in seen
        assert task.content_hash() not in seen
        if task.draft.verify == "answers":
            for name, value in task.draft.expected.items():
                assert f"{name}: {value}" not in seen

    def test_the_same_seed_gives_the_same_bytes(self, task: TerminalTask) -> None:
        assert make_task(task.kind, task.grade, task.split, task.seed).folder() == task.folder()


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_grow_with_their_grade(kind: str) -> None:
    shown = [task.draft.files.values() for task in CANONICAL if task.kind == kind]
    files, characters = [len(texts) for texts in shown], [sum(map(len, texts)) for texts in shown]
    assert files == sorted(set(files))
    assert characters == sorted(set(characters))


def test_bytes_do_not_depend_on_the_process() -> None:
    """String hashing differs between processes: no set's order may get into a task."""
    script = "from compactionrl.terminal_tasks import instances\nprint(*(task.content_hash() for task in instances()))"
    env = {**os.environ, "PYTHONHASHSEED": "77"}
    printed = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True).stdout
    assert printed.split() == [task.content_hash() for task in CANONICAL]


def test_no_two_instances_are_the_same_task() -> None:
    """Training and held-out ones least of all: by content, and file by file but for what every instance has."""
    count = 2
    train, heldout = (list(instances(split, count=count)) for split in ("train", "heldout"))
    hashes = [task.content_hash() for task in (*train, *heldout)]
    assert len(set(hashes)) == 2 * count * 24
    for kind in KINDS:
        of_train, of_heldout = ([task for task in tasks if task.kind == kind] for tasks in (train, heldout))
        common = {"README.md", "run.py", "unseal.py", "stages/__init__.py", "harbour/__init__.py"}
        texts = {text for task in of_train for path, text in task.draft.files.items() if path not in common}
        assert not texts & {
            text for task in of_heldout for path, text in task.draft.files.items() if path not in common
        }


def test_what_is_written_is_the_folder(tmp_path: Path) -> None:
    (folder,) = write_tasks(tmp_path, CANONICAL[:1])
    written = {file.relative_to(folder).as_posix(): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    assert written == {path: text.encode() for path, text in CANONICAL[0].folder().items()}
    assert os.access(folder / "tests/test.sh", os.X_OK)
    assert os.access(folder / "solution/solve.sh", os.X_OK)


def test_the_same_content_under_another_name_is_refused(tmp_path: Path) -> None:
    draft = Draft("Do it.", {"a.txt": "a\n"}, {"a": "1"}, solve="witnesses")
    one, two = (TerminalTask("witnesses", "easy", split, 0, draft) for split in ("train", "heldout"))
    with pytest.raises(ValueError, match=r"witnesses-easy-heldout-0 is the same task as .*witnesses-easy-train-0"):
        write_tasks(tmp_path / "a", [one, two])
    write_tasks(tmp_path / "b", [one])
    with pytest.raises(ValueError, match="the same task"):
        write_tasks(tmp_path / "b", [two])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("puzzles", "easy", "train", 0), "There is no 'puzzles'"),
        (("witnesses", "simple", "train", 0), "There is no 'simple'"),
        (("witnesses", "easy", "test", 0), "There is no 'test'"),
        (("witnesses", "easy", "train", -1), "seed must be 0 or more"),
    ],
)
def test_instances_that_there_are_not(arguments: tuple[str, str, str, int], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make_task(*arguments)


class TestCommand:
    def test_writes_the_canonical_ones(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.run(str(tmp_path / "out"))
        assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(task.name for task in CANONICAL)
        assert "24 tasks" in capsys.readouterr().out

    def test_writes_as_many_as_are_asked_for(self, tmp_path: Path) -> None:
        self.run(str(tmp_path), "--grade", "easy", "--split", "train", "--count", "2", "--seed", "5")
        names = {path.name for path in tmp_path.iterdir()}
        assert names == {f"{kind}-easy-train-{seed}" for kind in KINDS for seed in (5, 6)}

    @pytest.mark.parametrize(
        ("arguments", "says"), [(["--grade", "odd"], "There is no 'odd'"), (["--split", "dev"], "There is no 'dev'")]
    )
    def test_refuses(self, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str) -> None:
        with pytest.raises(SystemExit, match="2"):
            main(["tasks", str(tmp_path), *arguments])
        assert says in capsys.readouterr().err

    def test_never_writes_over_a_task(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.run(str(tmp_path), "--grade", "easy")
        with pytest.raises(SystemExit, match="2"):
            main(["tasks", str(tmp_path), "--grade", "easy"])
        assert re.search(r"config-archaeology-easy-heldout-0 is there already", capsys.readouterr().err)

    @staticmethod
    def run(*arguments: str) -> None:
        with pytest.raises(SystemExit, match="0"):
            main(["tasks", *arguments])


def test_expected_values_are_json() -> None:
    for task in CANONICAL:
        assert json.loads(task.folder()["tests/expected.json"]) == task.draft.expected
