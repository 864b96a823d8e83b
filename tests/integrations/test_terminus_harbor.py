"""Stock Terminus-2, run by Harbor against a scripted server that returns token ids: its ledger is what was said."""

import asyncio
import json
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from _needs_harbor import BWRAP  # skips the module where Harbor or a sandbox cannot be had

if not shutil.which("tmux"):
    pytest.skip("Terminus-2 needs tmux", allow_module_level=True)

from harbor.models.trial.config import AgentConfig, EnvironmentConfig, TaskConfig, TrialConfig
from harbor.trial.trial import Trial
from test_harbor_agent import FILES

from compactionrl.integrations.terminus import import_trial
from compactionrl.rollout.ledger import CONTEXT
from compactionrl.training.tokenizer import build_tokenizer

WINDOW = 9000
"""Terminus-2 hands over when fewer than 8000 tokens are left, by a count of its own."""


class Server(ThreadingHTTPServer):
    """Speaks vLLM's chat route. `said`: (prompt, completion) of every request that was answered, in order."""

    def __init__(self) -> None:
        self.tokenizer = build_tokenizer(["terminal command answer"])
        self.said: list[tuple[list[int], list[int]]] = []
        self.turns, self.cut = 0, False
        super().__init__(("127.0.0.1", 0), Handler)

    def reply(self, asked: str) -> tuple[list[int], bool]:
        """Ids, and whether they were cut: once, in the fourth turn, whose text is then said again."""
        ids = self.tokenizer.encode(self.answer(asked), add_special_tokens=False)
        if self.turns == 4 and not self.cut:
            self.turns, self.cut = 3, True
            return ids[:20], True
        return [*ids, self.tokenizer.eos_token_id], False

    def answer(self, asked: str) -> str:
        if "hand off your work" in asked:
            return f"Summary {self.turns}: looked around."
        if "picking up work" in asked:
            return f"Questions {self.turns}: where is the answer?"
        if "has a few questions for you" in asked:
            return f"Answers {self.turns}: in answer.txt."
        self.turns += 1
        command = {1: "ls\n", 2: "seq 2000\n", 5: "echo 42 > /app/answer.txt\n"}.get(self.turns)
        commands = [{"keystrokes": command, "duration": 0.1}] if command else []
        return json.dumps({"analysis": "", "plan": "", "commands": commands, "task_complete": self.turns >= 6})


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server, tokenizer = self.server, self.server.tokenizer
        text = tokenizer.apply_chat_template(body["messages"], tokenize=False, add_generation_prompt=True)
        prompt = tokenizer.encode(text, add_special_tokens=False)
        ids, cut = server.reply(body["messages"][-1]["content"])
        server.said += [] if cut else [(prompt, ids)]
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": tokenizer.decode(ids, skip_special_tokens=True)},
            "finish_reason": "length" if cut else "stop",
            "token_ids": ids,
            "logprobs": {"content": [{"token": "", "logprob": -0.5, "bytes": None, "top_logprobs": []} for _ in ids]},
        }
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ids), "total_tokens": len(prompt) + len(ids)}
        reply = {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "usage": usage}
        data = json.dumps({**reply, "prompt_token_ids": prompt, "choices": [choice]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        return


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_what_stock_terminus_recorded_is_what_was_said(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HARBOR_TELEMETRY", "off")
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    monkeypatch.setenv("HOSTED_VLLM_API_KEY", "none")
    for name, text in FILES.items():
        (tmp_path / "task" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "task" / name).write_text(text.replace("{seconds}", "60"))
    options = {
        "api_base": f"http://127.0.0.1:{server.server_port}/v1",
        "collect_rollout_details": True,
        "record_terminal_session": False,
        "model_info": {
            "max_input_tokens": WINDOW,
            "max_output_tokens": 500,
            "input_cost_per_token": 0,
            "output_cost_per_token": 0,
        },
    }
    config = TrialConfig(
        task=TaskConfig(path=tmp_path / "task"),
        trials_dir=tmp_path / "trials",
        trial_name="trial",
        agent=AgentConfig(name="terminus-2", model_name="hosted_vllm/m", kwargs=options),
        environment=EnvironmentConfig(import_path=BWRAP),
    )

    async def run() -> Any:
        return await (await Trial.create(config)).run()

    result = asyncio.run(run())
    assert result.exception_info is None, result.exception_info
    rollout = import_trial(tmp_path / "trials" / "trial")
    assert (rollout.reward, rollout.end) == (1.0, "submitted")
    found = [
        (window.token_ids[: turn.start], window.token_ids[turn.start : turn.end])
        for window in rollout.windows
        for turn in window.turns
        if window.segment_ids[turn.start] != CONTEXT
    ]
    assert sorted(found) == sorted(server.said)
    assert rollout.details["hand-offs"] >= 1
    assert rollout.details["unrecorded responses"] == 1
    assert rollout.token_counts()["trained"] == sum(len(ids) for _, ids in server.said)
