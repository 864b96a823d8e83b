"""Tables say what the results say; curves are drawn from the metrics alone."""

from pathlib import Path

from PIL import Image
from rich.console import Console
from rich.table import Table

from compactionrl.evaluation.behaviour import behaviour
from compactionrl.evaluation.report import behaviour_table, curves, pass_table, read_metrics
from compactionrl.rollout.ledger import Rollout


def result(solved: int, failed: int) -> dict:
    rollouts = [Rollout(f"s{i}", f"solved-{i}", reward=1.0, end="submitted", turns=1) for i in range(solved)]
    rollouts += [Rollout(f"f{i}", f"failed-{i}", end="budget", turns=1) for i in range(failed)]
    return behaviour(rollouts) | {"errors": 2}


def printed(table: Table) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def test_pass_table() -> None:
    lines = printed(pass_table({"base": {"x1": result(0, 20), "x4": result(5, 5)}, "trained": {"x4": result(0, 0)}}))
    base = next(line for line in lines.splitlines() if "base" in line)
    trained = next(line for line in lines.splitlines() if "trained" in line)
    assert "0.0 (0.0–16.1)" in base  # 0 of 20, Newcombe (1998)
    assert "50.0 (23.7–76.3)" in base
    assert "–" in trained
    assert "%" not in trained


def test_behaviour_table_shows_errors_beside_every_figure() -> None:
    lines = printed(behaviour_table({"base": {"x4": result(3, 1)}, "trained": {"x4": result(0, 0)}})).splitlines()
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines if line.startswith("│")]
    table = {label: cells for label, *cells in rows}
    assert table["rollouts"] == ["4", "0"]
    assert table["errors (left out)"] == ["2", "2"]
    assert table["reward"] == ["0.75", "–"]
    assert table["out of budget"] == ["25.0%", "–"]
    assert table["Pass@1 of those"] == ["–", "–"]


def test_curves_draw_what_is_there(tmp_path: Path) -> None:
    metrics = [{"step": step, "reward": step / 10} for step in range(5)] + [{"step": 4, "pass": None}]
    path = tmp_path / "new" / "curves.png"
    curves(metrics, {"reward": {"reward": "reward"}, "Pass@1": {"x1": "pass", "x4": "missing"}}, path)
    with Image.open(path) as image:
        assert image.width > 2 * image.height


def test_metrics_are_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n{"step": 1, "reward": 0.5}\n')
    assert read_metrics(path) == [{"step": 0}, {"step": 1, "reward": 0.5}]
