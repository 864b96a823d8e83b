"""Cells side by side: in order, never too many, none lost, none run twice, whatever breaks or whoever interrupts."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from study_fakes import HERE, Study, nobody_works, tiny, wait_until

from compactionrl.config import ConfigError
from compactionrl.study import runner as module
from compactionrl.study.grid import grid
from compactionrl.study.runner import alone

CELLS = grid([tiny()], 2, extra=False)
KEYS = {cell.key for cell in CELLS}


@pytest.fixture(autouse=True)
def quick_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POLL", 0.005)


@pytest.fixture
def study(tmp_path: Path) -> Study:
    return Study(tmp_path / "study", CELLS)


def alive(events: list[str]) -> Iterator[set[str]]:
    """The cells at work after each event."""
    at_work: set[str] = set()
    for event in events:
        name, _, key = event.partition(" ")
        assert (key not in at_work) == (name == "start"), "no cell has two processes"
        at_work ^= {key}
        yield set(at_work)


def needs_first(events: list[str]) -> bool:
    """Whether every cell started after what it needs had ended."""
    return all(
        f"end {need.key}" in events[: events.index(f"start {cell.key}")]
        for cell in CELLS
        if f"start {cell.key}" in events
        for need in cell.needs
    )


@pytest.mark.parametrize("jobs", [1, 2, 3, 50])
def test_every_cell_once_after_what_it_needs_and_never_more_than_allowed(study: Study, jobs: int) -> None:
    runner, running = study.runner(jobs), []
    runner.board.show = lambda cells, pending: running.append(len(list(cells)))  # type: ignore[method-assign]
    assert runner.run()
    events = study.events()
    assert sorted(events) == sorted(f"{name} {key}" for key in KEYS for name in ("start", "end"))
    assert max(len(at_work) for at_work in alive(events)) <= jobs
    assert max(running) == jobs if jobs < 4 else 6 <= max(running) <= 13
    assert needs_first(events)
    assert set(study.recorded()) == KEYS
    session = json.loads(study.ledger.read_text())["sessions"]
    assert [(one["jobs"], set(one["cells"])) for one in session] == [(jobs, KEYS)]
    if jobs == 1:
        assert [event.partition(" ")[2] for event in events[::2]] == [cell.key for cell in CELLS]


def test_what_is_finished_is_not_started_again(study: Study) -> None:
    first = Study(study.folder, CELLS[:3])
    assert first.run()
    before = study.recorded()
    assert study.run()
    assert {key: study.events(key) for key in KEYS} == {key: ["start", "end"] for key in KEYS}
    assert {key: study.recorded()[key] for key in before} == before
    assert study.run()
    assert len(study.events()) == 2 * len(KEYS)


@pytest.mark.parametrize("trouble", [{"exit": 1}, {"result": False}, {"exit": -9}])
def test_a_cell_that_breaks_down_is_told_and_stops_only_what_needs_it(study: Study, trouble: dict[str, Any]) -> None:
    study.plan(**{"tiny/full/1": trouble, "tiny/base/2": trouble})
    runner = study.runner()
    assert not runner.run()
    lost = {"tiny/full/1", "tiny/swap/1"} | {key for key in KEYS if key.endswith("/2")}
    assert set(study.recorded()) == KEYS - lost
    assert runner.failed == {key: study.runs / key / "log.txt" for key in ("tiny/full/1", "tiny/base/2")}
    code = trouble.get("exit", 0) % 256
    assert f"tiny/full/1: broke down with exit code {code}; {study.runs}/tiny/full/1/log.txt says why" in study.said
    assert "exit" not in trouble or "this is why" in (study.runs / "tiny/full/1/log.txt").read_text()
    assert not {"start tiny/swap/1", "start tiny/full/2"} & set(study.events())
    study.plan()
    assert study.run(), "the next start tries again"
    assert set(study.recorded()) == KEYS
    assert [study.events(key) for key in KEYS - lost] == [["start", "end"]] * len(KEYS - lost)


def test_a_killed_cell_is_a_broken_one_and_goes_on_where_it_was(study: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    study.plan(**{"tiny/full/1": {"ticks": 30}})
    runner = study.runner()
    ticks = study.runs / "tiny/full/1/ticks"

    def kill_once(seconds: float, sleep: Any = time.sleep) -> None:
        if (one := runner.running.get("tiny/full/1")) and ticks.exists() and int(ticks.read_text()) > 3:
            one.process.kill()
        sleep(seconds)

    with monkeypatch.context() as patch:
        patch.setattr(module.time, "sleep", kill_once)
        assert not runner.run()
    assert "tiny/full/1: broke down with exit code -9" in study.said
    done = int(ticks.read_text())
    assert 3 < done < 30
    assert study.run()
    assert study.recorded()["tiny/full/1"]["evaluation"]


def test_a_cell_that_fails_behind_its_result_is_reported_and_taken_up_later(study: Study) -> None:
    """The result is written last, and whole: what went wrong then, went wrong behind it."""
    study.plan(**{"tiny/base/1": {"late exit": 1}})
    assert not study.run()
    assert {key for key in study.recorded() if key.endswith("/1")} == set()
    assert "tiny/base/1: broke down with exit code 1" in study.said
    study.plan()
    assert study.run()
    assert study.events("tiny/base/1") == ["start", "failed"]
    assert set(study.recorded()) == KEYS


# What a machine lacks


def test_a_policy_that_is_needed_and_lacks_here_is_made_again(study: Study) -> None:
    """The ledger came from another machine, or the runs were deleted."""
    early = Study(study.folder, [cell for cell in CELLS if cell.name in ("base", "full")])
    assert early.run()
    before = study.recorded()
    shutil.rmtree(study.runs)
    (study.folder / "events").unlink()
    assert study.run()
    assert {key: study.events(key) for key in KEYS} == {key: ["start", "end"] for key in KEYS}
    assert needs_first(study.events())
    assert {key: study.recorded()[key] for key in before} == before, "the time is that of the first run"


def test_a_policy_that_nothing_needs_any_more_is_not_made_again(study: Study) -> None:
    assert study.run()
    events = study.events()
    shutil.rmtree(study.runs)
    assert study.run()
    assert study.events() == events


@pytest.mark.parametrize(
    "lost", ["tiny/base/1/base", "tiny/base/1/result.json", "tiny/full/1/checkpoints", "tiny/full/1"]
)
def test_part_of_a_run_is_missing(study: Study, lost: str) -> None:
    early = Study(study.folder, [cell for cell in CELLS if cell.name in ("base", "full", "no-summary")])
    assert early.run()
    path = study.runs / lost
    path.unlink() if path.is_file() else shutil.rmtree(path)
    assert study.run()
    assert set(study.recorded()) == KEYS
    key = "/".join(lost.split("/")[:3])
    assert study.events(key) == ["start", "end"] * 2
    assert not set(study.events()) & {f"no policy {key}" for key in KEYS}


def test_a_result_of_before_is_not_that_of_a_cell_that_is_run_again(study: Study) -> None:
    Study(study.folder, CELLS[:1]).run()
    shutil.rmtree(study.runs / "tiny/base/1/base")
    study.plan(**{"tiny/base/1": {"result": False}})
    assert not study.run()
    assert "tiny/base/1: broke down with exit code 0" in study.said


@pytest.mark.parametrize("change", [{"value": 1}, {"base": "another"}])
def test_a_machine_that_computes_other_numbers_is_refused_every_time(study: Study, change: dict[str, Any]) -> None:
    """Were only the first start refused, the second would train on the policy that had come out differently."""
    early = Study(study.folder, [CELLS[0]])
    assert early.run()
    assert early.cells[0].key == "tiny/base/1"
    before = study.ledger.read_bytes()
    shutil.rmtree(study.runs)
    study.plan(**{"tiny/base/1": change})
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"tiny/base/1 came out differently.*--output"):
            study.run(jobs=1)
        assert json.loads(study.ledger.read_text())["cells"] == json.loads(before)["cells"]
        assert {event.split()[1] for event in study.events()} == {"tiny/base/1"}


def test_what_runs_beside_a_refused_cell_is_stopped_in_good_order(study: Study) -> None:
    Study(study.folder, [CELLS[0]]).run()
    shutil.rmtree(study.runs)
    study.plan(**{"tiny/base/1": {"value": 1, "ticks": 100}, "tiny/base/2": {"ticks": 500}})
    with pytest.raises(ConfigError, match="came out differently"):
        study.run()
    assert study.events("tiny/base/2") == ["start", "stopped"]
    assert int((study.runs / "tiny/base/2/ticks").read_text()) > 0


# What lies in the folders already


@pytest.mark.parametrize("finished", [True, False])
def test_a_folder_with_a_run_of_other_settings_is_refused_before_anything_starts(study: Study, finished: bool) -> None:
    """A base that was made with other settings must not be taken for this one's."""
    study.plan(**({} if finished else {"tiny/base/1": {"exit": 1}}))
    Study(study.folder, [CELLS[0]]).run() if finished else study.run(jobs=1)
    study.plan()
    events, text = study.events(), (study.runs / "tiny/base/1/cell.json").read_text()
    other = Study(study.folder, grid([tiny(warm_start__lr=1e-4)], 1, extra=False))
    other.plan()
    other.ledger = study.folder / "elsewhere" / "study.json"
    with pytest.raises(ConfigError, match=r"tiny/base/1 holds a run with other settings.*--runs"):
        other.run()
    assert other.events() == events
    assert not other.ledger.exists()
    assert (study.runs / "tiny/base/1/cell.json").read_text() == text
    assert study.run()


def test_results_that_were_never_recorded_are_taken_up(study: Study) -> None:
    assert study.run()
    whole = study.recorded()
    study.ledger.unlink()
    events = study.events()
    assert study.run()
    assert study.recorded() == whole
    assert study.events() == events
    assert set(json.loads(study.ledger.read_text())["sessions"][0]["cells"]) == KEYS


# Interruptions


def interrupted(study: Study, seconds: float) -> bool:
    """Run with a Ctrl-C after `seconds`; whether it came to its end before."""
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
    try:
        try:
            timer.start()
            return study.run(jobs=3)
        finally:
            timer.cancel()
            timer.join()
    except KeyboardInterrupt:
        return False


@pytest.mark.parametrize("seed", range(3))
def test_ctrl_c_at_any_moment_loses_nothing(study: Study, seed: int) -> None:
    """Between any two instructions, again and again, until it ends by itself."""
    rng = random.Random(seed)
    known: dict[str, Any] = {}
    history: dict[str, list[str]] = {}
    interruptions = 0
    while not interrupted(study, rng.uniform(0.0, 0.02 * interruptions)):
        interruptions += 1
        wait_until(lambda: nobody_works(study.runs))
        found = study.recorded()
        assert {key: found[key] for key in known} == known
        assert {key: study.events(key) for key in history} == history, "what is recorded is not run again"
        known, history = found, {key: study.events(key) for key in found}
    assert interruptions > 3
    assert set(study.recorded()) == KEYS
    assert {event.split()[0] for event in study.events()} <= {"start", "stopped", "end"}


def test_ctrl_c_waits_until_every_cell_has_stopped(study: Study) -> None:
    study.plan(**{key: {"ticks": 1000} for key in KEYS})
    runner = study.runner()
    timer = threading.Thread(
        target=lambda: (wait_until(lambda: len(study.events()) == 2), os.kill(os.getpid(), signal.SIGINT))
    )
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        runner.run()
    timer.join()
    assert sorted(study.events()) == sorted(
        f"{name} tiny/base/{seed}" for name in ("start", "stopped") for seed in (1, 2)
    )
    assert not runner.running


def spawn(study: Study, jobs: int = 2) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": f"{HERE.parents[1] / 'src'}:{HERE}"}
    command = [sys.executable, str(HERE / "run_study.py"), str(study.folder), str(jobs)]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "holds the folder\n"
    return process


def test_the_cells_of_a_killed_study_stop_and_the_next_one_goes_on(study: Study, tmp_path: Path) -> None:
    whole = Study(tmp_path / "whole", CELLS)
    plan = {key: {"ticks": 20} for key in KEYS}
    for one in (whole, study):
        one.plan(**plan)
    assert whole.run(8)
    rng = random.Random(1)
    for _ in range(3):
        before = study.recorded()
        events = len(study.events())
        process = spawn(study)
        wait_until(lambda n=events: len(study.events()) > n)  # type: ignore[misc]
        time.sleep(rng.uniform(0, 0.4))
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        wait_until(lambda: nobody_works(study.runs))
        assert {key: study.recorded()[key] for key in before} == before
    assert any(event.startswith("stopped") for event in study.events())
    assert study.run(8)
    assert study.without_time() == whole.without_time()
    ticks = {key: int((study.runs / key / "ticks").read_text()) for key in KEYS}
    assert ticks == dict.fromkeys(KEYS, 20)


def test_a_new_study_waits_for_the_cells_of_a_killed_one(study: Study) -> None:
    """A cell that is slow to stop, and its successor, never work in one folder at the same time."""
    study.plan(**{"tiny/base/1": {"deaf": True, "ticks": 60}})
    process = spawn(study, jobs=1)
    wait_until(lambda: study.events() == ["start tiny/base/1"])
    process.kill()
    process.communicate()
    with alone(study.runs):  # a cell holds its own folder, not the study's
        assert not nobody_works(study.runs)
        Study(study.folder, CELLS[:1], keep_plan=True).run()
    assert study.events("tiny/base/1") == ["start", "start", "end", "end"]
    assert set(study.recorded()) == {"tiny/base/1"}


def test_one_study_at_a_time_in_a_folder(study: Study, tmp_path: Path) -> None:
    study.plan(**{key: {"ticks": 1000} for key in KEYS})
    process = spawn(study)
    for folders in ((study.runs,), (tmp_path / "free", study.runs), (study.runs, study.runs / ".")):
        with pytest.raises(ConfigError, match=rf"another study is at work in {study.runs}.*--runs"), alone(*folders):
            raise AssertionError("two studies in one folder")
    process.kill()
    process.communicate()
    with alone(study.runs, study.runs / "."), alone(tmp_path / "free"):
        """Given twice, a folder is held once."""
    wait_until(lambda: nobody_works(study.runs))
    assert not study.recorded()
