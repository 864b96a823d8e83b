"""Our agent in trials of Harbor's: what Harbor is told, also when its time is over or something breaks."""

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from _needs_harbor import AGENT, BWRAP  # skips the module where Harbor or a sandbox cannot be had
from harbor.models.task.task import Task
from harbor.models.trajectories.trajectory import Trajectory
from harbor.models.trial.config import AgentConfig, EnvironmentConfig, TaskConfig, TrialConfig
from harbor.trial.trial import Trial

from compactionrl.agents import Agent
from compactionrl.config import PLACEHOLDER, RETRY_REQUEST, SUMMARY_REQUEST
from compactionrl.environments.terminal_tools import TOOLS, system_prompt
from compactionrl.evaluation.rollout_file import read_rollouts
from compactionrl.integrations import harbor_agent
from compactionrl.integrations.harbor import CompactionAgent
from compactionrl.results_folder import find_rollout
from compactionrl.rollout.chat import ChatFormat
from compactionrl.samplers.protocol import Sampled, SamplerError
from compactionrl.training.tokenizer import build_tokenizer

FILES = {
    "task.toml": 'version = "1.0"\n[agent]\ntimeout_sec = {seconds}\n[environment]\nnetwork_mode = "no-network"\n',
    "instruction.md": "Write 42 to answer.txt.",
    "environment/Dockerfile": "FROM debian\nWORKDIR /app\n",
    "tests/test.sh": '#!/bin/bash\n[ "$(< /app/answer.txt)" = 42 ]; echo $((1 - $?)) > /logs/verifier/reward.txt\n',
}


def chat() -> ChatFormat:
    """Every word of the prompts is a token, digits are bytes."""
    told = [system_prompt("native", output_bytes=30000, seconds=60, most_seconds=600), json.dumps(TOOLS)]
    words = [*FILES.values(), *told, SUMMARY_REQUEST, RETRY_REQUEST, PLACEHOLDER, call("echo"), DONE]
    framed = ChatFormat(build_tokenizer(words)).prompt([{"role": "user", "content": "a"}], TOOLS)
    return ChatFormat(
        build_tokenizer([*words, *(ChatFormat(build_tokenizer(words)).decode(each.ids) for each in framed)])
    )


def call(command: str) -> str:
    arguments = json.dumps({"commands": [{"command": command}]})
    return '<tool_call>\n{"name": "execute_commands", "arguments": ' + arguments + "}\n</tool_call>"


DONE = '<tool_call>\n{"name": "task_complete", "arguments": {}}\n</tool_call>'
HANG = "hang"


class Scripted:
    """Says one thing after the other; HANG: nothing, for ever. An exception is raised."""

    def __init__(self, chat: ChatFormat, script: Sequence[str | Exception]) -> None:
        self.chat, self.script, self.requests, self.closed = chat, list(script), [], 0

    async def sample(self, token_ids: Sequence[int], **_: Any) -> Sampled:
        said = self.script.pop(0)
        if said is HANG:
            await asyncio.sleep(1000)
        if isinstance(said, Exception):
            raise said
        ids = [*self.chat.tokenizer.base.encode(said, add_special_tokens=False), self.chat.stop_token_ids[0]]
        self.requests.append((list(token_ids), ids))
        return Sampled(ids, [-0.5 - i / 1024 for i in range(len(ids))], "stop", [0] * len(ids))

    async def release(self, affinity: str) -> None:
        return

    async def close(self) -> None:
        self.closed += 1


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("HARBOR_TELEMETRY", "off")
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")

    def use(*script: str | Exception) -> Scripted:
        format = chat()
        sampler = Scripted(format, script)

        async def resolved(config: Any) -> Any:
            return config

        async def opened(config: Any, modes: Sequence[str]) -> Agent:
            return Agent(format, sampler, "a script")

        monkeypatch.setattr(harbor_agent, "resolve", resolved)
        monkeypatch.setattr(harbor_agent, "open_agent", opened)
        return sampler

    return use


def run(folder: Path, seconds: float = 60, **options: Any) -> tuple[Any, Path]:
    """The result of a trial, and the agent's folder of it."""
    for name, text in FILES.items():
        (folder / "task" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "task" / name).write_text(text.replace("{seconds}", str(seconds)))
    agent = {"api_base": "http://127.0.0.1:9", "context_limit": "16k", **options}
    config = TrialConfig(
        task=TaskConfig(path=folder / "task"),
        trials_dir=folder / "trials",
        trial_name="trial",
        agent=AgentConfig(import_path=AGENT, kwargs=agent),
        environment=EnvironmentConfig(import_path=BWRAP),
    )

    async def one() -> Any:
        return await (await Trial.create(config)).run()

    return asyncio.run(one()), folder / "trials" / "trial" / "agent"


def test_a_task_is_solved_across_a_compaction(scripted: Any, tmp_path: Path) -> None:
    sampler = scripted(call("seq 20000"), "42 is the answer.", call("echo 42 > answer.txt"), DONE, DONE)
    result, folder = run(tmp_path, context_limit="8k", terminal={"output_bytes": 6200})
    assert result.exception_info is None, result.exception_info
    assert result.verifier_result.rewards == {"reward": 1.0}
    told = result.agent_result
    assert [detail["extra"]["kind"] for detail in told.rollout_details] == [
        ["execution"],
        ["summary"],
        ["execution"] * 3,
    ]
    given = [
        pair
        for detail in told.rollout_details
        for pair in zip(detail["prompt_token_ids"], detail["completion_token_ids"], strict=True)
    ]
    assert given == sampler.requests
    assert told.n_input_tokens == sum(len(prompt) for prompt, _ in sampler.requests)
    assert told.n_output_tokens == sum(len(ids) for _, ids in sampler.requests)
    wanted = {"end": "submitted", "compactions": 1, "turns": 4, "mode": "x4", "context_limit": 8192}
    assert {key: told.metadata[key] for key in wanted} == wanted
    trajectory = Trajectory.model_validate_json((folder / "trajectory.json").read_text())
    assert [step.extra for step in trajectory.steps if step.source == "system"][1] == {
        "context_management": {"type": "compaction", "boundary": "replace"}
    }
    (rollout,) = read_rollouts(folder / "rollouts.jsonl.gz")
    assert (rollout.id, rollout.end, rollout.compactions) == ("x4-trial__agent", "submitted", 1)
    assert find_rollout(folder, "x4-trial__agent")[2].budget == 8192
    assert sampler.closed == 1
    again = json.loads((tmp_path / "trials" / "trial" / "result.json").read_text())
    assert again["agent_result"]["rollout_details"] == told.rollout_details


def test_x1_never_compacts(scripted: Any, tmp_path: Path) -> None:
    scripted(call("seq 20000"), call("echo 42 > answer.txt"), DONE, DONE)
    result, _ = run(tmp_path, context_limit="8k", mode="x1")
    told = result.agent_result.metadata
    assert (told["end"], told["windows"], told["turns"]) == ("budget", 1, 1)
    assert result.verifier_result.rewards == {"reward": 0.0}


@pytest.mark.parametrize("hangs", [[HANG], [call("sleep 600")]], ids=["the model", "a command"])
def test_when_the_time_is_over_what_there_is_is_kept(scripted: Any, tmp_path: Path, hangs: list[str]) -> None:
    sampler = scripted(call("echo 42 > answer.txt"), *hangs)
    result, folder = run(tmp_path, seconds=2)
    assert result.exception_info.exception_type == "AgentTimeoutError"
    assert result.verifier_result.rewards == {"reward": 1.0}
    told = result.agent_result
    assert (told.metadata["end"], told.metadata["error"]) == ("time", None)
    given = [ids for detail in told.rollout_details for ids in detail["completion_token_ids"]]
    assert given == [ids for _, ids in sampler.requests]
    (rollout,) = read_rollouts(folder / "rollouts.jsonl.gz")
    assert rollout.token_counts()["trained"] == sum(map(len, given)) == told.n_output_tokens
    Trajectory.model_validate_json((folder / "trajectory.json").read_text())
    assert sampler.closed == 1


def test_a_rollout_that_broke_down_is_not_verified(scripted: Any, tmp_path: Path) -> None:
    scripted(call("ls"), SamplerError("the server is gone"))
    result, folder = run(tmp_path)
    assert "the server is gone" in result.exception_info.exception_message
    assert result.verifier_result is None
    assert len(result.agent_result.rollout_details) == 1
    (rollout,) = read_rollouts(folder / "rollouts.jsonl.gz")
    assert rollout.token_counts()["trained"] == 0


def test_the_task_can_be_given_in_fenced_commands(scripted: Any, tmp_path: Path) -> None:
    scripted("```bash\necho 42 > answer.txt\n```", "```bash\ntask_complete\n```", "```bash\ntask_complete\n```")
    result, _ = run(tmp_path, terminal={"tools": "fenced"})
    assert result.exception_info is None, result.exception_info
    assert result.verifier_result.rewards == {"reward": 1.0}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "api_base"),
        ({"api_base": "http://x"}, "context_limit"),
        ({"api_base": "http://x", "context_limit": "8k", "modes": "x4"}, "Unknown option 'modes'"),
        ({"api_base": "http://x", "context_limit": "much"}, "much"),
        ({"api_base": "http://x", "context_limit": 8192, "mode": "x"}, "unknown mode 'x'"),
        ({"api_base": "http://x", "context_limit": 8192, "api": "tgi"}, "api"),
        ({"api_base": "http://x", "context_limit": 8192, "keys": {"context.budgets": 1}}, "context.budget"),
        ({"api_base": "http://x", "context_limit": 8192, "terminal": {"tool": 1}}, "terminal: .*tool"),
        ({"api_base": "http://x", "context_limit": 8192, "terminal": {"tools": "x"}}, "terminal: tools must be"),
    ],
)
def test_what_cannot_work_is_refused_at_once(options: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=says):
        CompactionAgent(logs_dir=tmp_path, **options)


def test_without_a_tokenizer_the_model_is_asked_for_text(tmp_path: Path) -> None:
    plain = CompactionAgent(
        logs_dir=tmp_path, model_name="hosted_vllm/org/m", api_base="http://x/v1", context_limit="8k"
    )
    assert (plain.config.sampling.sampler, plain.config.server.model) == ("chat", "org/m")
    assert plain.config.server.urls == ["http://x"]
    exact = CompactionAgent(logs_dir=tmp_path, api_base="http://x", context_limit="8k", tokenizer=str(tmp_path))
    assert (exact.config.sampling.sampler, exact.config.model.path) == ("auto", str(tmp_path))


def test_nothing_heavy_is_loaded() -> None:
    assert "torch" not in sys.modules
    assert Task.__module__.startswith("harbor")
