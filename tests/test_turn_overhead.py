"""The benchmark of our own cost per turn: what it plays is what it says, and the model's time is not in it."""

import importlib
import sys
import time
from typing import Any

import pytest
from test_benchmarks import BENCHMARKS, runner

sys.path.append(str(BENCHMARKS))
turn_overhead = importlib.import_module("turn_overhead")


def test_every_figure_of_the_page_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turn_overhead, "LONG_TURNS", 3)
    monkeypatch.setattr(turn_overhead, "LONG_ROLLOUTS", 2)
    results = turn_overhead.measure(2, rollouts=4)
    assert set(results) == {key for key in runner.FIGURES if key.startswith("turn_overhead")}
    for key, result in results.items():
        low, high = result["spread"]
        assert 0 < low <= result["median"] <= high
        assert "share" not in key or high < 100


def test_a_script_says_the_same_again_whatever_else_runs() -> None:
    """At any concurrency the rollouts are the expert's own, and only the first time does the expert work."""
    config = turn_overhead.load_config(turn_overhead.RECIPE)
    folder = turn_overhead.build.model_folder(config)
    chat, tasks = turn_overhead.build.build_chat(config, folder), turn_overhead.build.build_tasks(config)
    setting = turn_overhead.Setting(config, tasks, chat, 6)
    expert = turn_overhead.Demonstrator(tasks, chat.tokenizer.base)
    script = turn_overhead.Script(expert)
    played: list[Any] = [setting.play(expert, 6)[0], setting.play(script, 6)[0]]
    script.source = None
    played += [setting.play(script, size)[0] for size in (1, 3)]
    windows = [[window.token_ids for rollout in rollouts for window in rollout.windows] for rollouts in played]
    assert windows == [windows[0]] * 4
    assert sum(rollout.compactions for rollout in played[0]) > 0


def test_what_the_sampler_computes_is_taken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(self: Any) -> int:
        until = time.process_time() + 0.05
        while time.process_time() < until:
            pass
        return 1

    monkeypatch.setattr(turn_overhead.LocalSampler, "_step", step)
    sampler = object.__new__(turn_overhead.TimedSampler)
    for number in (1, 2):
        assert sampler._step() == 1
        assert sampler.cpu_seconds >= 0.05 * number
