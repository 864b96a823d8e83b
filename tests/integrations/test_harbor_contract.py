"""The same task folders through Harbor and through our loader: the same rewards. Needs Harbor (Python 3.12) and bubblewrap."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from _needs_harbor import BWRAP  # skips the module where Harbor or a sandbox cannot be had
from harbor.models.trial.config import AgentConfig, EnvironmentConfig, TaskConfig, TrialConfig
from harbor.trial.trial import Trial

from compactionrl.environments.harbor_task import HarborTask, run_nothing, run_oracle
from compactionrl.environments.reward import VerifierError
from compactionrl.sandboxes.bwrap import BwrapSandbox
from compactionrl.terminal_tasks.catalogue import instances, write_tasks


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HARBOR_TELEMETRY", "off")
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")


async def through_harbor(folder: Path, agent: str, trials: Path) -> Any:
    trial = await Trial.create(
        TrialConfig(
            task=TaskConfig(path=folder),
            trials_dir=trials,
            trial_name=f"{folder.name}__{agent}",
            agent=AgentConfig(name=agent),
            environment=EnvironmentConfig(import_path=BWRAP),
        )
    )
    return await trial.run()


async def through_ours(folder: Path, agent: str) -> dict[str, float]:
    task = HarborTask(folder)
    run: Callable[..., Any] = {"oracle": run_oracle, "nop": run_nothing}[agent]
    return (await run(task, BwrapSandbox(workdir=task.workdir, network=task.network))).details["rewards"]


@pytest.mark.parametrize("agent", ["oracle", "nop"])
@pytest.mark.parametrize("task", list(instances()), ids=lambda task: task.name)
def test_our_tasks(task: Any, agent: str, tmp_path: Path) -> None:
    (folder,) = write_tasks(tmp_path / "tasks", [task])
    result = asyncio.run(through_harbor(folder, agent, tmp_path / "trials"))
    assert result.exception_info is None, result.exception_info
    assert result.verifier_result.rewards == asyncio.run(through_ours(folder, agent))
    assert result.verifier_result.rewards["reward"] == (1.0 if agent == "oracle" else 0.0)


DOCKERFILE = """\
FROM debian:bookworm-slim
ENV COLOUR=blue NAME="two words"
WORKDIR /app/inner
COPY given.txt /app/inner/
RUN echo "$COLOUR $NAME $(pwd)" > made.txt
"""
TOML = """\
version = "1.0"
[environment]
network_mode = "no-network"
env = { OF_THE_TASK = "yes" }
[verifier]
timeout_sec = 60
"""
REWARDS = "/logs/verifier/reward"


def hand_written(folder: Path, test: str, solve: str = "true") -> Path:
    files = {
        "task.toml": TOML,
        "instruction.md": "Do it.",
        "environment/Dockerfile": DOCKERFILE,
        "environment/given.txt": "given",
        "tests/test.sh": f"#!/bin/bash\n{test}\n",
        "solution/solve.sh": f"#!/bin/bash\n{solve}\n",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize(
    ("test", "solve", "rewards"),
    [
        (f"[ $(wc -l < /proc/net/dev) -le 3 ]; echo $((1 - $?)) > {REWARDS}.txt", "true", {"reward": 1}),
        (f"echo 0.25 > {REWARDS}.txt; exit 3", "true", {"reward": 0.25}),
        (
            f'echo 0.25 > {REWARDS}.txt; echo \'{{"reward": 0.5, "speed": 2}}\' > {REWARDS}.json',
            "true",
            {"reward": 0.5, "speed": 2},
        ),
        (
            f"ls {REWARDS}.json && exit; echo 0 > {REWARDS}.txt",
            f"echo '{{\"reward\": 1}}' > {REWARDS}.json",
            {"reward": 0},
        ),
        (
            f"cp /app/inner/seen.txt {REWARDS}.txt",
            "ls /tests > /dev/null 2>&1; echo $((1 - ($? == 0))) > seen.txt",
            {"reward": 1},
        ),
        (
            f"[ \"$(cat /app/inner/made.txt)\" = 'blue two words /app/inner' ]; echo $((1 - $?)) > {REWARDS}.txt",
            "true",
            {"reward": 1},
        ),
        (
            f"[ \"$COLOUR $OF_THE_TASK $(pwd) $(<given.txt)\" = 'blue yes /app/inner given' ]; echo $((1 - $?)) > {REWARDS}.txt",
            "true",
            {"reward": 1},
        ),
        (
            f"[ \"$(cat /app/inner/who.txt)\" = 'blue yes /app/inner' ]; echo $((1 - $?)) > {REWARDS}.txt",
            'echo "$COLOUR $OF_THE_TASK $(pwd)" > who.txt',
            {"reward": 1},
        ),
    ],
    ids=[
        "no network",
        "exit status",
        "json first",
        "left behind",
        "tests come later",
        "built",
        "tests' place",
        "solution's place",
    ],
)
def test_tasks_of_all_sorts(test: str, solve: str, rewards: dict[str, float], tmp_path: Path) -> None:
    folder = hand_written(tmp_path / "task", test, solve)
    result = asyncio.run(through_harbor(folder, "oracle", tmp_path / "trials"))
    assert result.exception_info is None, result.exception_info
    assert result.verifier_result.rewards == asyncio.run(through_ours(folder, "oracle")) == rewards


@pytest.mark.parametrize(
    "test",
    [
        "true",
        f"touch {REWARDS}.txt",
        f"echo one > {REWARDS}.txt",
        f"echo nan > {REWARDS}.txt",
        f"echo '{{' > {REWARDS}.json; echo 1 > {REWARDS}.txt",
        f'echo \'{{"reward": "1"}}\' > {REWARDS}.json',
        f"echo '{{\"reward\": {{}}}}' > {REWARDS}.json",
        f"echo '[1]' > {REWARDS}.json",
    ],
)
def test_no_reward_is_nobodys_failure(test: str, tmp_path: Path) -> None:
    folder = hand_written(tmp_path / "task", test)
    result = asyncio.run(through_harbor(folder, "nop", tmp_path / "trials"))
    assert result.exception_info is not None
    assert result.verifier_result is None
    with pytest.raises(VerifierError):
        asyncio.run(through_ours(folder, "nop"))
