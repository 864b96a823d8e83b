"""`compactionrl study`, with real cells in real processes: whole, interrupted, killed; and what it refuses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from study_fakes import TINY, nobody_works, wait_until

from compactionrl.cli import main
from compactionrl.study.runner import alone
from compactionrl.study.study import signals_interrupt

PAPER = ["base", "rl-c", "rl-2c", "no-summary", "segment-loss", "segment-gae", "full"]
SOURCE = Path(__file__).parents[2] / "src"


def arguments(folder: Path, *options: str, setting: Path = TINY) -> list[str]:
    paths = ["--runs", str(folder / "runs"), "--output", str(folder / "out"), "--setting", str(setting)]
    small = ["--evaluation.final_tasks", "4", "--train.steps", "3"]
    return ["study", "--quick", "--seeds", "1", "--jobs", "2", *paths, *small, *options]


def start(folder: Path) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "compactionrl.cli", *arguments(folder)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, env=environment, start_new_session=True, **pipes)


def ledger(folder: Path) -> dict[str, Any]:
    path = folder / "out" / "study.json"
    return json.loads(path.read_text()) if path.exists() else {"cells": {}, "sessions": []}


def without_time(folder: Path) -> dict[str, Any]:
    return {key: {k: v for k, v in cell.items() if k != "seconds"} for key, cell in ledger(folder)["cells"].items()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a study that nobody disturbed, and what it said."""
    folder = tmp_path_factory.mktemp("whole")
    process = start(folder)
    output, _ = process.communicate(timeout=400)
    assert process.returncode == 0, output
    return folder, output


def test_a_study_leaves_every_cell_and_a_report(whole: tuple[Path, str]) -> None:
    folder, output = whole
    found = ledger(folder)
    assert set(found["cells"]) == {f"tiny/{name}/1" for name in [*PAPER, "swap", "perfect"]}
    assert [(one["jobs"], set(one["cells"])) for one in found["sessions"]] == [(2, set(found["cells"]))]
    assert "9 cells, 0 finished before, 2 side by side" in output
    for name in ("study.md", "study.html"):
        assert f"wrote {folder / 'out' / name}" in output
        assert (folder / "out" / name).stat().st_size
    cells = found["cells"]
    assert len({cell["base"] for cell in cells.values()}) == 1
    assert len({cell["fingerprint"] for cell in cells.values()}) == 9
    for key, cell in cells.items():
        modes = ["x1", "x4", "2C", "4C"]
        names = [f"{e}/{s}" for e in ("base", "full") for s in ("base", "full", "no-summary", "perfect", "empty")]
        assert sorted(cell["evaluation"]) == sorted(names if "swap" in key else modes)
        assert all(set(result["outcomes"]) <= {"0", "1"} for result in cell["evaluation"].values())
        assert all(len(result["outcomes"]) == 4 for result in cell["evaluation"].values())
        assert ("curves" in cell) == (cell["variant"] not in ("base", "swap", "perfect"))
        assert all(len(curve) == 3 for curve in cell.get("curves", {}).values())
    one_window = {name: cells[f"tiny/{name}/1"]["curves"]["compactions"] for name in ("rl-c", "rl-2c", "full")}
    assert one_window["rl-c"] == one_window["rl-2c"] == [0, 0, 0]
    assert min(one_window["full"]) > 0
    tokens = {name: cells[f"tiny/{name}/1"]["tokens"] for name in ("no-summary", "full", "rl-c")}
    assert tokens["no-summary"]["trained"] < tokens["full"]["trained"]
    assert tokens["rl-c"]["trained"] == tokens["rl-c"]["sampled"]


def test_a_swap_measures_the_policies_of_its_seed(whole: tuple[Path, str]) -> None:
    """Whoever summarises for itself is measured as in its own cell."""
    cells = ledger(whole[0])["cells"]
    swap = cells["tiny/swap/1"]["evaluation"]
    for name in ("base", "full"):
        assert swap[f"{name}/{name}"] == cells[f"tiny/{name}/1"]["evaluation"]["x4"]


def metrics(folder: Path) -> int:
    """Lines that the arms now at work have logged."""
    return sum(path.read_bytes().count(b"\n") for path in folder.glob("runs/tiny/*/1/metrics.jsonl"))


def test_killed_and_interrupted_it_goes_on_and_ends_the_same(whole: tuple[Path, str], tmp_path: Path) -> None:
    runs = tmp_path / "runs" / "tiny"
    trained = ("full", "no-summary")
    moments: list[tuple[int, Callable[[], bool]]] = [
        (signal.SIGKILL, lambda: any(runs.glob("base/1/*base"))),  # being written, or just there
        (signal.SIGKILL, lambda: metrics(tmp_path) >= 2),
        (signal.SIGINT, lambda: metrics(tmp_path) >= 4),
        (signal.SIGKILL, lambda: {f"tiny/{name}/1" for name in trained} <= set(ledger(tmp_path)["cells"])),
    ]
    for number, reached in moments:
        before = ledger(tmp_path)["cells"]
        process = start(tmp_path)
        wait_until(lambda process=process, reached=reached: reached() or process.poll() is not None)
        os.killpg(process.pid, number)  # as a terminal does
        output, _ = process.communicate(timeout=200)
        if number == signal.SIGINT:
            assert process.returncode == 1, output
            assert "stopped: every cell has a checkpoint; the same command goes on" in output
            assert f"wrote {tmp_path / 'out' / 'study.md'}" in output
            assert nobody_works(tmp_path / "runs"), "it waits for its cells"
        else:
            assert process.returncode == -signal.SIGKILL, output
            wait_until(lambda: nobody_works(tmp_path / "runs"))  # orphans stop by themselves
        assert "broke down" not in output
        after = ledger(tmp_path)["cells"]
        assert {key: after[key] for key in before} == before
    found, expected = without_time(tmp_path), without_time(whole[0])
    assert {"tiny/base/1", "tiny/full/1", "tiny/no-summary/1"} <= set(found)
    assert found == {key: expected[key] for key in found}


# Without running anything


def test_sigterm_stops_a_study_as_ctrl_c_does() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with signals_interrupt(), pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


def refused(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    with pytest.raises(SystemExit) as stopped:
        main(list(options))
    assert stopped.value.code == 2
    return capsys.readouterr().err


def test_a_finished_study_is_only_reported_again(whole: tuple[Path, str], capsys: pytest.CaptureFixture[str]) -> None:
    folder = whole[0]
    cells = ledger(folder)["cells"]
    (folder / "out" / "study.md").unlink()
    with pytest.raises(SystemExit) as ended:
        main(arguments(folder))
    assert ended.value.code == 0
    said = capsys.readouterr().out.replace("\n", "")
    assert "9 cells, 9 finished before" in said
    assert "started" not in said
    assert ledger(folder)["cells"] == cells
    assert (folder / "out" / "study.md").exists()


def test_other_settings_are_not_mixed_in(whole: tuple[Path, str], capsys: pytest.CaptureFixture[str]) -> None:
    folder = whole[0]
    before = (folder / "out" / "study.json").read_bytes()
    said = refused(capsys, *arguments(folder, "--train.alpha", "2"))
    assert "holds the setting tiny with another train.alpha" in said
    assert "--output" in said
    assert (folder / "out" / "study.json").read_bytes() == before
    said = refused(capsys, *arguments(folder, "--train.alpha", "2", "--output", str(folder / "another")))
    assert "tiny/base/1 holds a run with other settings" in said
    assert "--runs" in said


@pytest.mark.parametrize("held", ["runs", "out"])
def test_two_studies_in_one_folder(held: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither of the runs nor of the ledger: each would overwrite what the other has finished."""
    with alone(tmp_path / held):
        assert f"another study is at work in {tmp_path / held}" in refused(capsys, *arguments(tmp_path))
    assert not (tmp_path / "out" / "study.json").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--setting", "nowhere"], "--setting nowhere: choose one of"),
        (["--train.stepz", "3"], "did you mean train.steps?"),
        (["--run.seed", "3"], "--run.seed: a study sets this itself; use --seeds"),
        (["--model.path", "demo"], "model.path must be 'warm-start'"),
        (["--train.estimator", "segment"], "would be the same run"),
        (["--sampling.temperature", "0"], "sampling.temperature 0 cannot be trained"),
        (["--context.budget", "60"], "context.budget"),
        (["--environment.options.values", "0"], "values must be an integer"),
    ],
)
def test_what_cannot_be_studied_is_refused_before_anything_is_written(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refused(capsys, *arguments(tmp_path, *options))
    assert not list(tmp_path.iterdir())


def test_a_cell_that_cannot_run_is_reported_and_so_is_the_rest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """There is no such demonstrator, which only a cell finds out."""
    with pytest.raises(SystemExit) as stopped:
        main(arguments(tmp_path, "--warm_start.demonstrator", "nowhere:Demonstrator"))
    assert stopped.value.code == 1
    said = capsys.readouterr().out.replace("\n", "")
    log = tmp_path / "runs" / "tiny" / "base" / "1" / "log.txt"
    assert f"not finished: tiny/base/1; see {log}" in said
    assert "cannot import 'nowhere:Demonstrator'" in log.read_text()
    assert ledger(tmp_path)["cells"] == {}
    assert (tmp_path / "out" / "study.md").exists()
