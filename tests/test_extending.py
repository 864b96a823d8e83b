"""docs/extending.md: its code runs exactly as it is printed there, and keeps the contracts that the page states."""

import asyncio
import importlib
import json
import math
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from shlex import quote
from types import ModuleType
from typing import Any

import pytest
import torch
from conftest import DEMO

from compactionrl.config import parse_config
from compactionrl.config_toml import dump
from compactionrl.environments.protocol import Response
from compactionrl.models import load_policy
from compactionrl.training.records import read_rollouts

ROOT = Path(__file__).parents[1]
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", (ROOT / "docs" / "extending.md").read_text(), re.DOTALL | re.MULTILINE)
COMPACTIONRL = f"{sys.executable} -P -m compactionrl.cli"
"""As the installed command: the current folder is not importable by itself."""


def blocks(language: str) -> list[str]:
    return [text for name, text in BLOCKS if name == language]


@pytest.fixture
def project(tmp_path: Path, base: Path) -> Path:
    """A folder with the page's modules, and the demo's recipe with the page's sections; a base that knows nothing."""
    for code in blocks("python"):
        name = re.match(r"# (\w+\.py): ", code)
        assert name is not None, "a Python block must begin with its file's name"
        (tmp_path / name[1]).write_text(code)
    (sections,) = blocks("toml")
    config = tomllib.loads(DEMO.read_text()) | tomllib.loads(sections)
    config["model"]["path"] = str(base)
    (tmp_path / "own.toml").write_text(dump(parse_config(config)))
    return tmp_path


@pytest.fixture
def modules(project: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[ModuleType, ModuleType]:
    monkeypatch.syspath_prepend(project)
    for name in ("own_environment", "own_sampler"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module("own_environment"), importlib.import_module("own_sampler")


def run(command: str, folder: Path, **options: Any) -> None:
    """A line of the page, with smaller numbers."""
    line = command.replace("compactionrl", COMPACTIONRL) + "".join(
        f" --{k}={quote(str(v))}" for k, v in options.items()
    )
    line = line.replace("PYTHONPATH=.", f"PYTHONPATH=.:{ROOT / 'src'}")
    ran = subprocess.run(line, shell=True, cwd=folder, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


def test_the_commands(project: Path) -> None:
    train, evaluate = "".join(blocks("sh")).splitlines()
    short = {"limits.turns": 12}
    small = {"train.steps": 2, "train.rollouts_per_step": 2, "train.value_pretraining_steps": 1, "evaluation.every": 0}
    run(train, project, **short, **small, **{"run.folder": "run", "evaluation.tasks": 1, "evaluation.modes": '["x4"]'})

    metrics = [json.loads(line) for line in (project / "run" / "metrics.jsonl").read_text().splitlines()]
    trained = [line for line in metrics if line["phase"] == "train"]
    assert [line["step"] for line in trained] == [1, 2]
    for line in trained:
        assert line["ratio/mean"] == pytest.approx(1, abs=1e-5)
        assert line["rollout/dropped"] == 0
    for step in (1, 2):
        rollouts = read_rollouts(project / "run" / "rollouts" / f"step-{step:06}.parquet")
        assert len(rollouts) == 2
        assert {v for r in rollouts for w in r.windows for v in w.versions} == {-1, step - 1}
        assert all(r.details["secret"] % 2 == 0 for r in rollouts)
        assert any(r.compactions for r in rollouts)

    run(evaluate.replace("20", "2"), project, **short, **{"evaluation.modes": '["x1"]', "sampling.temperature": 0})


def test_the_environment(modules: tuple[ModuleType, ModuleType]) -> None:
    """It can be solved, answers whatever is said, and its splits share no task."""
    tasks = modules[0].GuessTasks(highest=99)
    secrets = {s: {tasks.environment(s, i).secret for i in range(tasks.size(s))} for s in ("train", "heldout")}
    assert secrets["train"] | secrets["heldout"] == set(range(100))
    assert not secrets["train"] & secrets["heldout"]

    async def play() -> list[float]:
        environment = tasks.environment("heldout", 30)
        low, high = 0, 99
        for nonsense in ("", "ten", "1" * 5000, "-3", "1.5"):
            assert (await environment.step(Response(nonsense))).text == "a number"
        rewards = [(await environment.verify()).reward]
        while True:
            middle = (low + high) // 2
            observation = await environment.step(Response(f" {middle}\n"))
            if observation.done:
                return [*rewards, (await environment.verify()).reward, middle]
            low, high = (middle + 1, high) if observation.text == "higher" else (low, middle - 1)

    assert asyncio.run(play()) == [0.0, 1.0, 61]


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_the_sampler(modules: tuple[ModuleType, ModuleType], base: Path, temperature: float) -> None:
    """Its log-probabilities are those of one forward over everything; stops, seeds, greedy choice."""
    policy = load_policy(base)
    sampler = modules[1].PlainSampler(policy)
    prompt = [5, 6, 7]

    def sample(temperature: float = temperature, seed: int = 3, stop: tuple[int, ...] = ()) -> Any:
        request = {"max_tokens": 20, "stop_token_ids": stop, "temperature": temperature, "top_p": 1.0, "seed": seed}
        return asyncio.run(sampler.sample(prompt, affinity="a", **request))

    sampler.weights_changed(4)
    found = sample()
    ids = torch.tensor([*prompt, *found.token_ids])
    logp = (policy(ids, [len(ids)]) @ policy.head_weight.T / temperature).log_softmax(1)[2:-1]
    expected = logp.gather(1, ids[3:, None]).squeeze(1)
    torch.testing.assert_close(torch.tensor(found.logprobs), expected.detach(), rtol=1e-4, atol=1e-4)
    assert (found.finish, len(found.token_ids), found.versions) == ("length", 20, [4] * 20)
    assert sample() == found
    assert sample(seed=2**63 - 1).token_ids != found.token_ids

    stopped = sample(stop=(found.token_ids[7],))
    first = found.token_ids.index(found.token_ids[7])
    assert (stopped.token_ids, stopped.finish) == (found.token_ids[: first + 1], "stop")

    greedy = sample(temperature=0)
    assert greedy.token_ids == sample(temperature=0, seed=9).token_ids
    assert all(math.isfinite(x) and x <= 0 for x in greedy.logprobs)
    with pytest.raises(ValueError, match=r"sampling\.top_p"):
        asyncio.run(
            sampler.sample(prompt, max_tokens=1, stop_token_ids=(), temperature=1.0, top_p=0.9, seed=0, affinity="a")
        )
