"""`compactionrl eval` on endpoints of text: a real model behind our own chat route, a summariser, and an endpoint that fails."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from conftest import DEMO
from eval_server import results, serving
from fake_chat import FakeChat, completion, usage
from fake_servers import disconnect, half, hang, raw, running, status

from compactionrl.build import DEMO as BASE
from compactionrl.cli import main
from compactionrl.evaluation.rollout_file import read_rollouts
from compactionrl.rollout.ledger import Rollout
from compactionrl.rollout.text_chat import TextFormat

ROOMY = ["--context.budget", "220", "--context.threshold", "60", "--concurrency", "4"]


def evaluate(folder: Path, *arguments: str) -> list[Rollout]:
    with pytest.raises(SystemExit) as ended:
        main(["eval", str(DEMO), *ROOMY, *arguments, "--output", str(folder)])
    assert not ended.value.code
    return list(read_rollouts(folder / "rollouts.jsonl.gz"))


def test_a_real_model_behind_the_chat_route(tmp_path: Path) -> None:
    with serving(BASE, **{"sampling.concurrency": 4}) as url:
        rollouts = evaluate(tmp_path / "r", "--url", url, "--api", "chat", "--limit", "8", "--modes", "x1,x4")
    assert len(rollouts) == 16
    assert all(rollout.approximate and rollout.end in ("submitted", "budget", "turns") for rollout in rollouts)
    assert all(segment.excluded == "sampled as text" for rollout in rollouts for segment in rollout.segments)
    assert any(rollout.compactions for rollout in rollouts)
    sampled = [
        turn for r in rollouts for w in r.windows for turn in w.turns if turn.role == "assistant" and turn.reported
    ]
    assert sampled
    # The server's words are taken for what its context holds: a word of this model is one token, and more pieces.
    assert all(turn.reported.completion <= 16 for turn in sampled)  # type: ignore[union-attr]
    assert "**Budgets are approximate**" in (tmp_path / "r" / "report.md").read_text()
    assert results(tmp_path / "r")["about"]["exact"] is False


def test_greedily_text_comes_to_what_tokens_come_to(tmp_path: Path) -> None:
    """The same model, asked with text and with token ids: the same answers, where nothing depends on a count."""
    common = ["--modes", "x1", "--limit", "12", "--context.budget", "480", "--sampling.temperature", "0"]
    found = {}
    with serving(BASE, **{"sampling.concurrency": 4}) as url:
        for api, tokenizer in (("chat", []), ("vllm", ["--tokenizer", str(BASE)])):
            rollouts = evaluate(tmp_path / api, "--url", url, "--api", api, *tokenizer, *common)
            found[api] = {r.task_id: (r.end, r.reward, r.turns) for r in rollouts}
    assert found["chat"] == found["vllm"]
    assert any(reward == 1.0 for _, reward, _ in found["chat"].values())


def test_a_summariser_that_takes_text_for_a_policy_of_tokens(tmp_path: Path) -> None:
    server = FakeChat(lambda body: completion("found cup5", "stop", usage(len(json.dumps(body)) // 4, 3)), context=4096)
    with running(server):
        rollouts = evaluate(tmp_path / "r", "--summariser", f"own,{server.url}", "--limit", "6", "--modes", "x4")
    swapped = [rollout for rollout in rollouts if rollout.id.startswith("x4+") and rollout.compactions]
    assert swapped
    summaries = [segment for rollout in swapped for segment in rollout.segments if segment.kind == "summary"]
    assert {segment.excluded for segment in summaries} == {"written by another summariser"}
    assert not any(rollout.approximate for rollout in rollouts)
    body = server.bodies[0]
    assert body["messages"][-1]["content"].endswith("summarise")
    assert body["messages"][2] == {"role": "assistant", "content": "next"}


def test_rollouts_on_an_endpoint_that_fails_end_by_name(tmp_path: Path) -> None:
    rng = random.Random(0)
    faults = [status(500), status(429), disconnect, half, raw(b"\xff"), raw(b"{}"), hang]

    def reply(body: dict[str, Any]) -> dict[str, Any]:
        server.faults.append(rng.choice([*faults, *[lambda _, good: good] * 40]))
        said = rng.choice(["next", "answer cup5", "", "<|im_end|>", "\ud800\0" * 50, "next " * 3000])
        counted = rng.choice([None, usage(1, 1), usage(len(json.dumps(body["messages"])) // 4, 3), usage(10**9, 10**9)])
        return completion(said, rng.choice(["stop", "length", None]), counted)

    server = FakeChat(reply, context=4096)
    options = ["--server.retries", "1", "--server.request_seconds", "0.3", "--train.retries", "0"]
    folder = tmp_path / "r"
    options += ["--url", server.url, "--api", "chat", "--limit", "8", "--modes", "x1,x4", "--output", str(folder)]
    with running(server), pytest.raises(SystemExit) as ended:
        main(["eval", str(DEMO), *ROOMY, *options])
    arms = results(folder)["arms"]
    causes = {cause.partition(":")[0] for arm in arms.values() for cause in arm["error_causes"]}
    assert causes <= {"ServerFailed", "ServerUnreachable", "ServerTimeout", "MalformedReply"}
    assert sum(arm["n"] + arm["errors"] for arm in arms.values()) == 16
    assert bool(ended.value.code) == any(arm["errors"] for arm in arms.values())
    for rollout in read_rollouts(folder / "rollouts.jsonl.gz"):
        assert rollout.end in ("submitted", "budget", "turns")
        for window in rollout.windows:
            TextFormat().messages(window.token_ids)
