"""A server of ours in a thread, over real HTTP, and what its replies are compared with."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import torch
from conftest import DEMO as RECIPE

from compactionrl.build import DEMO
from compactionrl.config import load_config
from compactionrl.models import load_policy
from compactionrl.samplers.local import LocalSampler
from compactionrl.samplers.protocol import Sampled
from compactionrl.serving.app import create_app
from compactionrl.serving.model import ServedModel
from compactionrl.serving.serve import Server, listen, open_model
from compactionrl.serving.weights import Weights

LENGTH = 512
"""Positions of the packaged base."""
PROMPT = [398, 302, 220, 17, 44, 301, 399]


@dataclass
class Running:
    url: str
    model: ServedModel
    server: Server

    @contextmanager
    def client(self) -> Iterator[httpx.Client]:
        with httpx.Client(base_url=self.url, timeout=60) as client:
            yield client

    def get(self, path: str, **options: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=60, **options)

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=60, **options)

    def complete(self, prompt: Any = PROMPT, **body: Any) -> Any:
        """The reply to one request of the token route, with token ids and log-probabilities."""
        reply = self.post("/v1/completions", {"prompt": prompt, "logprobs": 0, "return_token_ids": True, **body})
        assert reply.status_code == 200, reply.text
        return reply.json()

    def chat(self, *messages: dict[str, Any], **body: Any) -> Any:
        reply = self.post("/v1/chat/completions", {"messages": messages, **body})
        assert reply.status_code == 200, reply.text
        return reply.json()

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait for what has to happen soon."""
        deadline = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def answer(self, *texts: str, finish: str = "stop") -> None:
        """From now on the model says `texts`, one after the other, whatever it is asked."""
        replies = iter(texts)

        async def sample(prompt: list[int], *, stop_token_ids: list[int], **_: Any) -> Sampled:
            ids = self.model.chat.tokenizer.base.encode(next(replies), add_special_tokens=False)
            ids += stop_token_ids[:1] if finish == "stop" else []
            return Sampled(ids, [-0.5] * len(ids), finish, [0] * len(ids))  # type: ignore[arg-type]

        self.model.engine.sample = sample  # type: ignore[assignment, method-assign]


@contextmanager
def running(
    folder: Path = DEMO,
    *,
    name: str = "demo",
    max_length: int | None = None,
    key: str = "",
    weights_from: Path | None = None,
    rows: int = 64,
) -> Iterator[Running]:
    listener = listen("127.0.0.1", 0)
    config = load_config(RECIPE, {"sampling.concurrency": rows})
    model = open_model(config, folder, name=name, max_length=max_length)
    server = Server(model, create_app(model, Weights(model, weights_from), key))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    thread.start()
    try:
        running = Running(url, model, server)
        running.until(lambda: server.started)
        yield running
    finally:
        server.stop()
        thread.join()
    assert not model.sessions.busy


@cache
def loaded(folder: Path) -> Any:
    return load_policy(folder)


@cache
def reference(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def in_process(prompt: list[int] = PROMPT, folder: Path = DEMO, **changes: Any) -> Sampled:
    """The same request to a LocalSampler."""
    options: dict[str, Any] = {
        "max_tokens": 16, "stop_token_ids": [399, 397], "temperature": 1.0, "top_p": 1.0, "seed": 0, "affinity": "a",
    }  # fmt: skip
    sampler = LocalSampler(loaded(folder), max_tokens_per_row=LENGTH)
    return asyncio.run(sampler.sample(prompt, **(options | changes)))


@torch.no_grad()
def all_logprobs(ids: list[int], folder: Path = DEMO, temperature: float = 1.0) -> torch.Tensor:
    """[n, V], float64, by Hugging Face's own model: row i is of the token behind ids[i]."""
    return (reference(folder)(torch.tensor([ids])).logits[0].double() / temperature).log_softmax(-1)


def server_sent_events(response: httpx.Response) -> list[str]:
    """The data of every event, by the rules of the HTML standard; nothing but `data` fields is allowed."""
    assert response.headers["content-type"].split(";")[0] == "text/event-stream"
    text = response.content.decode("utf-8")
    assert text.endswith("\n\n")
    events = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        lines = block.split("\n")
        assert all(line.startswith("data: ") and "\r" not in line for line in lines)
        events.append("\n".join(line.removeprefix("data: ") for line in lines))
    return events


def stream(response: httpx.Response) -> list[Any]:
    """The chunks of a stream, which ends as OpenAI's do."""
    *chunks, last = server_sent_events(response)
    assert last == "[DONE]"
    return [json.loads(chunk) for chunk in chunks]
