"""A whole rollout in a real sandbox, with real tokens, tool calls and compactions; only the policy's words are scripted."""

import asyncio
import json
from dataclasses import dataclass, field

import pytest
from harbor_folders import need_bwrap, write_task

from compactionrl.config import ContextConfig, LimitsConfig
from compactionrl.environments.harbor_tasks import HarborTasks
from compactionrl.rollout.chat import ChatFormat
from compactionrl.rollout.loop import RolloutSettings, run_rollout
from compactionrl.samplers.protocol import Sampled

CONTEXT = ContextConfig(
    budget=1700,
    threshold=700,
    response_tokens=200,
    min_response=20,
    summary_tokens=100,
    max_compactions=3,
    tail_steps=1,
)


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def run(*commands):
    return call("execute_commands", commands=[{"command": command} for command in commands])


@dataclass
class Scripted:
    """A sampler: asked for a summary it writes one, else it says the next of its lines."""

    tokenizer: object
    lines: list[str]
    prompts: list[str] = field(default_factory=list)

    async def sample(self, token_ids, *, max_tokens, **_):
        self.prompts.append(self.tokenizer.decode(list(token_ids)))
        summary = "Write a summary" in self.prompts[-1].rpartition("<|im_start|>user")[2]
        text = "Nine lines were printed; x is set." if summary else self.lines.pop(0)
        ids = self.tokenizer.encode(f"{text}<|im_end|>")
        assert len(ids) <= max_tokens
        return Sampled(ids, [0.0] * len(ids), "stop", [0] * len(ids))

    async def release(self, affinity):
        pass


@pytest.fixture
def play(tmp_path, qwen3_tokenizer):
    need_bwrap()

    def play(lines, turns=20, **files):
        write_task(tmp_path / "train" / "one", **files)
        tasks = HarborTasks(tmp_path / "train", output_bytes=1000, sandbox_options={"shell": "persistent"})
        sampler = Scripted(qwen3_tokenizer, list(lines))
        settings = RolloutSettings(CONTEXT, LimitsConfig(turns=turns))
        rollout = asyncio.run(
            run_rollout(
                tasks.environment("train", 0),
                sampler,
                ChatFormat(qwen3_tokenizer, "qwen3"),
                settings,
                rollout_id="r",
                task_id="one",
                seed=0,
            )
        )
        return rollout, sampler

    return play


def test_the_shell_outlives_its_windows(play):
    long = "printf 'a line of words %.0s' {1..100}"
    calls = [
        run("mkdir deep; cd deep; x=7"),
        *3 * [run(long)],
        run('pwd; echo "$x" > ../seven.txt', "cat ../seven.txt"),
        *2 * [call("task_complete")],
    ]
    lines = [f"<think>\n\n</think>\n\n{line}" for line in calls]
    rollout, sampler = play(lines)
    assert rollout.error is None
    assert (rollout.end, rollout.reward, rollout.turns) == ("submitted", 1.0, 7)
    assert rollout.compactions >= 2
    seen = "".join(sampler.prompts)
    assert "bytes left out" in seen
    assert "/app/deep" in seen
    assert rollout.details["rewards"] == {"reward": 1.0}


def test_the_agents_time_ends_a_rollout_that_is_judged_all_the_same(play):
    lines = [run("echo 7 > seven.txt"), run("sleep 60"), "never said"]
    rollout, sampler = play(lines, task_dot_toml="[agent]\ntimeout_sec = 2\n")
    assert (rollout.end, rollout.reward) == ("time", 1.0)
    assert sampler.lines == ["never said"]


def test_tests_that_give_no_reward_end_it_with_an_error(play):
    rollout, _ = play([run("ls")], turns=1, tests__test_dot_sh="#!/bin/bash\necho nan > /logs/verifier/reward.txt\n")
    assert rollout.end == "error"
    assert "VerifierError: reward.txt" in rollout.error
