"""The comparison of asynchronous with synchronous training: what its page says is what its runs' files hold."""

import asyncio
import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from compactionrl.environments.notes import NotesTasks
from compactionrl.environments.protocol import Response
from compactionrl.rollout.ledger import Rollout, Segment, Window
from compactionrl.training.records import write_rollouts

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
asynchronous: Any = import_module("asynchronous")


def test_slow_tasks_are_the_same_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Word for word, and each step takes its time: 50 to 200 ms, or 2 s."""
    naps = []

    async def sleep(seconds: float) -> None:
        naps.append(seconds)

    monkeypatch.setattr(asynchronous.asyncio, "sleep", sleep)
    options = {"seed": 1, "notes": [5, 9], "n_train": 50, "n_heldout": 50}

    async def play(tasks: Any, index: int) -> list[str]:
        environment = tasks.environment("train", index)
        said = [message["content"] for message in await environment.start()]
        for command in (*environment.task.commands, "nonsense", "answer " + " ".join(environment.task.answer)):
            said.append((await environment.step(Response(command))).text)
        return [*said, str((await environment.verify()).reward)]

    for index in range(10):
        plain, slow = (asyncio.run(play(kind(**options), index)) for kind in (NotesTasks, asynchronous.SlowNotes))
        assert plain == slow
        assert plain[-1] == "1.0"
    assert len(naps) > 70
    assert all(nap == 2 or 0.05 <= nap <= 0.2 for nap in naps)


def finished(run: Any, ages: list[int]) -> None:
    """The files of a run whose update n trains tokens that were `ages[n - 1]` versions old."""
    (run.folder / "rollouts").mkdir(parents=True)
    lines = []
    for number, age in enumerate(ages, 1):
        window = Window()
        window.append_context([1], "user")
        window.append_sampled([2], [-1.0], [number - 1 - age], Segment("execution", 0))
        rollout = Rollout("r", "t", [window], end="submitted")
        write_rollouts(run.folder / "rollouts" / f"step-{number:06}.parquet", [rollout], [{}])
        line = {f"time/{name}": 2.0 * number for name in ("total", "collect", "update", "overlap", "cpu")}
        fractions = {f"ratio/{kind}_fraction": 0.25 for kind in ("clip", "truncated", "masked")}
        lines.append({"phase": "train", "step": number, **line, **fractions, "ratio/kl_to_sampler": 0.5})
    lines.append({"phase": "eval", "step": len(ages)} | {f"eval/x4/{k}": v for k, v in RATES.items()})
    (run.folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


RATES = {"pass_at_1": 0.75, "low": 0.7, "high": 0.8}


def test_a_run_is_read_as_it_was(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(asynchronous, "RUNS", tmp_path)
    run = asynchronous.quality_run(2, "masked", 11, 3)
    assert not run.complete
    finished(run, [0, 1, 2])
    assert run.complete
    found = asynchronous.quality(run)
    assert found["ages"] == {"mean": 1.0, "max": 2.0, "spanning": 0.0}
    assert (found["pass"], found["acted_on"], found["kl"]) == (0.75, 0.25, 0.5)
    assert found["cpu_minutes"] == pytest.approx((2 + 4 + 6) / 60)
    assert asynchronous.times(run)["total"] == 4
    (run.folder / "rollouts" / "step-000002.parquet").unlink()
    with pytest.raises(AssertionError):
        asynchronous.ages(run)


def test_the_page(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every run that is named is in it: none of its figures is made up, and none left out."""
    monkeypatch.setattr(asynchronous, "RUNS", tmp_path)
    monkeypatch.setattr(asynchronous, "TIMED_UPDATES", 2)
    began: list[str] = []

    def run(self: Any) -> None:
        began.append(self.name)
        if "train.staleness" in self.options:
            finished(self, [0, self.options["train.staleness"]])

    monkeypatch.setattr(asynchronous.Run, "__call__", run)
    found = asynchronous.measure([11, 12], 2, 1, timed=True)
    assert len(began) == len(set(began)) == 2 + 9 * 2 + 6 * 2
    page = asynchronous.page(found)
    assert "| 2 | masked | 75.0 | 75.0 | **75.0** | 25.0% | 0.5000 | 1.00 | 2 |" in page
    assert "| slow | 1 | **3.0** | 3.0, 3.0 | 1.00x | 3.0 | 3.0 | 3.0 | 3.0 | 0.50 | 1 | 0% |" in page
    assert "about ±5.0" in page
    widths = [{row.count("|") for row in part.splitlines() if row.startswith("|")} for part in page.split("##")[1:]]
    assert all(len(width) == 1 for width in widths)
