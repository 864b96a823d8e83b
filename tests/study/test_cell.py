"""What a cell computes, and what it keeps of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from study_fakes import tiny

from compactionrl.build import DEMO
from compactionrl.config import Config, load_config, parse_config
from compactionrl.evaluation.report import read_metrics
from compactionrl.measure import measure
from compactionrl.study.cell import CURVES, STOPPED, compress, explained_variance, run_cell, run_swap, training_seconds
from compactionrl.study.grid import Cell
from compactionrl.training.atomic import describe
from compactionrl.training.records import read_rollouts

RECIPE = Path(__file__).parents[2] / "recipes" / "demo.toml"
LONG = {"seed": 1, "notes": [16, 18], "facts": 4, "values": 8, "n_train": 1000, "n_heldout": 100}
"""Tasks that the packaged base knows, all of them too long for one window."""


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def recipe(**overrides: Any) -> Config:
    return load_config(RECIPE, {key.replace("__", "."): value for key, value in overrides.items()})


def prepared(root: Path, cell: Cell, config: Config | None = None) -> Path:
    """The folder of a cell that is about to run."""
    folder = root / cell.key
    folder.mkdir(parents=True)
    policies = {need.name: str(need.policy_folder(root, need.name)) for need in cell.needs}
    config = config or cell.config(root)
    spec = {"kind": cell.kind, "config": config.model_dump(mode="json"), "policies": policies}
    (folder / "cell.json").write_text(json.dumps(spec))
    return folder


def solved(evaluation: dict[str, Any]) -> int:
    return evaluation["outcomes"].count("1")


# The three kinds


@pytest.fixture(scope="module")
def swap() -> tuple[Config, dict[str, Any]]:
    """The packaged base in all three roles."""
    config = recipe(environment__options=LONG, evaluation__final_tasks=12)
    return config, run_swap(config, dict.fromkeys(("base", "full", "no-summary"), DEMO))


def test_a_summariser_that_forgets_nothing_beats_one_that_forgets_all(swap: tuple[Config, dict[str, Any]]) -> None:
    found = swap[1]["evaluation"]
    summarisers = ("base", "full", "no-summary", "perfect", "empty")
    assert set(found) == {f"{executor}/{name}" for executor in ("base", "full") for name in summarisers}
    for executor in ("base", "full"):
        assert solved(found[f"{executor}/perfect"]) > solved(found[f"{executor}/base"])
        assert solved(found[f"{executor}/perfect"]) >= 6
        assert solved(found[f"{executor}/empty"]) == 0
        assert found[f"{executor}/empty"]["compacted"]["n"] == 12, "every task needs a summary"


def test_policies_that_are_the_same_are_measured_alike(swap: tuple[Config, dict[str, Any]]) -> None:
    """Whoever writes the summaries: tasks and random streams are the same, and so is an evaluation without any swap."""
    config, result = swap
    found = result["evaluation"]
    for name in ("base", "full", "no-summary", "perfect", "empty"):
        assert found[f"base/{name}"] == found[f"full/{name}"]
    assert found["base/base"] == found["base/full"] == found["base/no-summary"]
    plain = measure(config, DEMO, modes=["x4"], n_tasks=12)["x4"]
    assert found["base/base"] == compress(plain)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Cell, dict[str, Any]]:
    root = tmp_path_factory.mktemp("runs")
    cell = Cell(tiny(), "base", 1)
    return root, cell, run_cell(prepared(root, cell))


def test_a_base_is_made_once_and_measured(base: tuple[Path, Cell, dict[str, Any]]) -> None:
    root, cell, result = base
    folder = root / cell.key
    weights = folder / "base" / "model.safetensors"
    assert result["base"] == describe(weights)["sha256"]
    assert list(result["evaluation"]) == ["x1", "x4", "2C", "4C"]
    assert all(len(found["outcomes"]) == 8 for found in result["evaluation"].values())
    changed = weights.stat().st_mtime_ns
    again = run_cell(folder)
    assert weights.stat().st_mtime_ns == changed
    assert {**again, "seconds": 0} == {**result, "seconds": 0}


def test_another_seed_is_another_base(base: tuple[Path, Cell, dict[str, Any]], tmp_path: Path) -> None:
    other = run_cell(prepared(tmp_path, Cell(base[1].setting, "base", 2)))
    assert other["base"] != base[2]["base"]


def test_a_perfect_player_solves_what_its_windows_hold(base: tuple[Path, Cell, dict[str, Any]]) -> None:
    """Two facts in at most 12 notes: four windows, or one of 4C, hold them all; one of C holds the short tasks."""
    root, cell, result = base
    folder = prepared(root, Cell(cell.setting, "perfect", cell.seed))
    perfect = run_cell(folder)
    outcomes = {mode: found["outcomes"] for mode, found in perfect["evaluation"].items()}
    assert outcomes["4C"] == outcomes["x4"] == "1" * 8
    assert 0 < outcomes["x1"].count("1") < 8
    assert perfect["evaluation"]["x1"]["budget_exhausted"] == outcomes["x1"].count("0") / 8
    assert perfect["base"] == result["base"], "it lends its tokenizer"


@pytest.fixture(scope="module")
def trained(base: tuple[Path, Cell, dict[str, Any]]) -> tuple[Path, dict[str, Any]]:
    root, cell, _ = base
    folder = prepared(root, Cell(cell.setting, "full", 1))
    return folder, run_cell(folder)


def test_a_training_run_is_measured_behind_its_last_update(trained: tuple[Path, dict[str, Any]], base: Any) -> None:
    folder, result = trained
    config = parse_config(json.loads((folder / "cell.json").read_text())["config"])
    policy = Cell(tiny(), "swap", 1).policy_folder(base[0], "full")
    assert policy.is_relative_to(folder)
    plain = measure(config, policy, modes=["x1", "x4", "2C", "4C"], n_tasks=8)
    assert result["evaluation"] == {mode: compress(found) for mode, found in plain.items()}
    assert result["base"] == base[2]["base"]
    assert describe(policy / "model.safetensors")["sha256"] != result["base"]


def test_curves_and_tokens_are_those_of_the_policy_updates(trained: tuple[Path, dict[str, Any]]) -> None:
    folder, result = trained
    batches = [read_rollouts(folder / "rollouts" / f"step-{step:06}.parquet") for step in (1, 2, 3)]
    sampled = sum(rollout.token_counts()["sampled"] for batch in batches for rollout in batch)
    assert (result["tokens"]["sampled"], result["tokens"]["rollouts"]) == (sampled, 24)
    assert 0 < result["tokens"]["trained"] < sampled, "some wrote no good summaries"
    assert all(len(curve) == 3 for curve in result["curves"].values())
    rewards = [sum(rollout.reward for rollout in batch) / 8 for batch in batches]
    assert result["curves"]["reward"] == pytest.approx(rewards, abs=1e-4)
    compactions = [sum(rollout.compactions for rollout in batch) / 8 for batch in batches]
    assert result["curves"]["compactions"] == pytest.approx(compactions, abs=1e-4)


def test_a_finished_run_that_is_asked_for_again_comes_out_the_same(trained: tuple[Path, dict[str, Any]]) -> None:
    folder, result = trained
    metrics = (folder / "metrics.jsonl").read_bytes()
    assert {**run_cell(folder), "seconds": 0} == {**result, "seconds": 0}
    assert (folder / "metrics.jsonl").read_bytes() == metrics


def test_a_cell_stops_with_a_checkpoint_when_its_parent_is_gone(
    trained: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    """Long before its end, however the parent died: all that it notices is that its stdin ends."""
    done = parse_config(json.loads((trained[0] / "cell.json").read_text())["config"]).model_dump()
    done["run"]["folder"], done["train"]["steps"] = str(tmp_path / "tiny/full/1"), 100_000
    cell = Cell(tiny(), "full", 1)
    folder = prepared(tmp_path, cell, parse_config(done))
    source = Path(__file__).parents[2] / "src"
    with (folder / "log.txt").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "compactionrl.study.cell", str(folder)],
            env=os.environ | {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
        )
    metrics = folder / "metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and metrics.read_bytes().count(b"\n") >= 2):
        time.sleep(0.01)
    assert process.stdin is not None
    process.stdin.close()
    try:
        assert process.wait(timeout=300) == STOPPED, (folder / "log.txt").read_text()
    finally:
        process.kill()
    assert not (folder / "result.json").exists()
    updates = [line for line in read_metrics(metrics) if line["phase"] == "train"]
    assert (folder / "checkpoints" / f"step-{len(updates):06}").is_dir()


def test_every_curve_is_drawn_from_a_figure_that_training_logs(tmp_path: Path) -> None:
    """With a base that solves some tasks, and writes summaries, none of them is undefined throughout."""
    config = recipe(
        model__path=str(DEMO),
        environment__options=LONG,
        train__steps=2,
        train__rollouts_per_step=12,
        train__value_pretraining_steps=1,
        evaluation__every=0,
        evaluation__tasks=2,
        evaluation__modes=["x1", "x4"],
        run__folder=str(tmp_path / "tiny/full/1"),
    )
    cell = Cell(tiny(), "full", 1)
    base = cell.policy_folder(tmp_path, "base")
    base.mkdir(parents=True)
    (base / "model.safetensors").symlink_to(DEMO / "model.safetensors")
    result = run_cell(prepared(tmp_path, cell, config))
    assert set(result["curves"]) == set(CURVES)
    assert [name for name, curve in result["curves"].items() if curve == [None, None]] == []
    assert {"segment_0", "segment_1"} <= set(result["explained_variance"])
    assert "all" not in result["explained_variance"]
    assert set(result["seconds"]) == {"wall", "cpu"}
    json.dumps(result, allow_nan=False)


# What is kept


def test_an_evaluation_is_kept_without_what_the_report_does_not_need() -> None:
    figures = {
        "compactions": 1.23456,
        "tool_calls": 2.0,
        "turns": 3.0,
        "summary_tokens": None,
        "response_tokens": 4.0,
        "budget_exhausted": 0.25,
        "errors": 1,
    }
    compacted = {"n": 3, "pass_at_1": 1 / 3, "low": 0.0, "high": 1.0}
    full = {**figures, "outcomes": "01-", "compacted": compacted, "ends": {"budget": 1}, "pass_at_1": 0.5}
    kept = {**figures, "compactions": 1.2346, "outcomes": "01-", "compacted": {"n": 3, "pass_at_1": 1 / 3}}
    assert compress(full) == kept
    nobody = {**full, "compacted": {"n": 0, "pass_at_1": None}}
    assert compress(nobody)["compacted"] == {"n": 0, "pass_at_1": None}


def test_explained_variance_is_averaged_over_the_batches_that_have_it() -> None:
    prefix = "explained_variance/segment_"
    lines = [{f"{prefix}0": 0.5, f"{prefix}6+": -1.0, "explained_variance/all": 9.0}, {f"{prefix}0": 0.25}, {}]
    assert explained_variance(lines) == {"segment_0": 0.375, "segment_6+": -1.0}
    assert explained_variance([]) == explained_variance([{"phase": "train"}]) == {}


def test_seconds_are_those_of_all_batches() -> None:
    metrics = [
        {"phase": "value", "pretraining/time/total": 1.0, "pretraining/time/cpu": 0.5},
        {"phase": "eval", "eval/x4/pass_at_1": 1.0},
        {"phase": "train", "time/total": 2.0, "time/cpu": 1.5},
    ]
    assert (training_seconds(metrics, "wall"), training_seconds(metrics, "cpu")) == (3.0, 2.0)
