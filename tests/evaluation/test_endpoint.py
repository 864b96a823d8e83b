"""What is found out about a URL before anything is measured there."""

import asyncio
from typing import Any

import eval_server  # noqa: F401  (makes the fake servers importable)
import pytest
from conftest import DEMO
from fake_servers import FakeSGLang, FakeVLLM, running, settings

from compactionrl.agents import Agent, open_summariser, summariser_names
from compactionrl.config import load_config
from compactionrl.endpoint import Endpoint, has_tokenizer, identify
from compactionrl.samplers.http import ServerUnreachable
from compactionrl.samplers.protocol import SamplerRefused


class TextOnly(FakeVLLM):
    """An OpenAI-style endpoint: it knows its models, and no token ids."""

    def answer(self, method: str, path: str, query: dict[str, list[str]], body: dict[str, Any]) -> tuple[int, Any]:
        if path == "/v1/completions":
            reply = {"choices": [{"text": "a", "finish_reason": "length", "logprobs": None}]}
            return (200, reply) if isinstance(body["prompt"], str) else (400, {"error": "prompt must be text"})
        return super().answer(method, path, query, body)


class Ignorant(TextOnly):
    """One that takes the token ids, but returns text."""

    def answer(self, method: str, path: str, query: dict[str, list[str]], body: dict[str, Any]) -> tuple[int, Any]:
        return super().answer(method, path, query, {**body, "prompt": "a"})


@pytest.mark.parametrize(
    ("kind", "api"), [(FakeVLLM, "vllm"), (FakeSGLang, "sglang"), (TextOnly, "chat"), (Ignorant, "chat")]
)
def test_the_protocol_is_that_of_the_answers(kind: type[FakeVLLM], api: Any) -> None:
    with running(server := kind(names=("glm-5",))):
        assert asyncio.run(identify(settings(server))) == Endpoint(api, "glm-5")


def test_a_server_that_is_down_is_passed_over_and_none_is_waited_for() -> None:
    with running(up := FakeVLLM()):
        down = FakeVLLM()
        down.stop()
        assert asyncio.run(identify(settings(down, up))).api == "vllm"
        with pytest.raises(ServerUnreachable, match=down.url):
            asyncio.run(identify(settings(down)))
        assert up.headers


def test_a_choice_of_models_is_for_the_user() -> None:
    with running(server := FakeVLLM(names=("a", "b"))):
        assert asyncio.run(identify(settings(server, model="b"))).model == "b"
        for name in ("", "c"):
            with pytest.raises(SamplerRefused, match=r"serves a, b.*server\.model"):
                asyncio.run(identify(settings(server, model=name)))


class Chat:
    def encode(self, text: str) -> list[int]:
        return list(text.encode())


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [(lambda text: list(text.encode()), True), (lambda text: [1, 2], False), (lambda text: None, None)],
)
def test_the_tokenizer_is_compared_on_a_text(tokens: Any, expected: bool | None) -> None:
    class Tokenizing(FakeVLLM):
        def answer(self, method: str, path: str, query: dict[str, list[str]], body: dict[str, Any]) -> tuple[int, Any]:
            if path == "/tokenize" and body["add_special_tokens"] is False:
                return 200, {"tokens": tokens(body["prompt"])}
            return super().answer(method, path, query, body)

    with running(server := Tokenizing()):
        assert asyncio.run(has_tokenizer(settings(server), Chat())) is expected  # type: ignore[arg-type]


def test_summarisers_have_short_names() -> None:
    named = summariser_names(["own", "/a/glm", "/b/glm", "http://me:secret@host:1/", "own"])
    assert named == {"own": "own", "glm": "/a/glm", "/b/glm": "/b/glm", "host:1": "http://me:secret@host:1/"}
    assert summariser_names(["http://host:1"], "glm-5") == {"glm-5": "http://host:1"}
    assert summariser_names(["/a/own"]) == {"/a/own": "/a/own"}


@pytest.mark.parametrize(("variable", "sent"), [("", None), ("OTHER_KEY", "Bearer other-secret")])
def test_a_summariser_gets_its_own_key_and_never_the_policys(
    monkeypatch: pytest.MonkeyPatch, variable: str, sent: str | None
) -> None:
    class Tokenizing(FakeVLLM):
        def answer(self, method: str, path: str, query: dict[str, list[str]], body: dict[str, Any]) -> tuple[int, Any]:
            if path == "/tokenize":
                return 200, {"tokens": list(body["prompt"].encode())}
            return super().answer(method, path, query, body)

    monkeypatch.setenv("POLICY_KEY", "policy-secret")
    monkeypatch.setenv("OTHER_KEY", "other-secret")
    with running(server := Tokenizing(names=("glm-5", "glm-6"))):
        keys = {"server.key_variable": "POLICY_KEY", "server.urls": ["http://127.0.0.1:1"], "server.model": "mine"}
        keys |= {"evaluation.summariser_key_variable": variable, "evaluation.summariser_model": "glm-6"}
        agent = Agent(Chat(), None, "")  # type: ignore[arg-type]
        sampler, described = asyncio.run(open_summariser(load_config(DEMO, keys), server.url, agent))
        asyncio.run(sampler.start(8))  # type: ignore[attr-defined]
    assert described == "glm-6, vllm, token ids"
    assert {headers.get("Authorization") for headers in server.headers} == {sent}
    assert {body["model"] for _, body in server.requests if "model" in body} == {"glm-6"}
