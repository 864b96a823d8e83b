"""Metrics: complete lines, cut back exactly, TensorBoard the same."""

import json
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from compactionrl.training.metrics import MetricsLog, flatten


def board(folder: Path) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_lines_after_the_position_are_forgotten_everywhere(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    log.write("value", 3, {"pretraining/loss": 9.0})
    log.write("train", 1, {"loss": 1.0, "bad": float("nan")})
    position = log.position()
    log.write("train", 2, {"loss": 2.0})
    log.file.write(b'{"phase": "tr')  # killed while writing
    log.close()

    log = MetricsLog(tmp_path, position)
    log.write("train", 2, {"loss": 2.5})
    log.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == [
        {"phase": "value", "step": 3, "pretraining/loss": 9.0},
        {"phase": "train", "step": 1, "loss": 1.0},
        {"phase": "train", "step": 2, "loss": 2.5},
    ]
    assert board(tmp_path) == {"pretraining/loss": [(3, 9.0)], "loss": [(1, 1.0), (2, 2.5)]}


def test_a_position_beyond_the_file_pads_nothing(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    log.write("train", 1, {"loss": 1.0})
    log.close()
    log = MetricsLog(tmp_path, 10_000)
    log.close()
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 1
    assert "\0" not in (tmp_path / "metrics.jsonl").read_text()


def test_flatten_keeps_numbers_only() -> None:
    nested = {"a": 1, "b": {"c": 0.5, "d": None, "e": "text"}, "f": [1]}
    assert flatten(nested, "eval/") == {"eval/a": 1.0, "eval/b/c": 0.5}
