"""What is found out about a URL before anything is measured there."""

import asyncio
from typing import Any

import eval_server  # noqa: F401  (makes the fake servers importable)
import pytest
from conftest import DEMO
from fake_chat import FakeChat
from fake_servers import FakeSGLang, FakeVLLM, running, settings

from compactionrl.agents import Agent, open_summariser, summariser_names
from compactionrl.config import ConfigError, load_config
from compactionrl.endpoint import Endpoint, has_tokenizer, identify
from compactionrl.samplers.http import ServerUnreachable
from compactionrl.samplers.protocol import SamplerRefused, optional


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


class Chat:
    def encode(self, text: str) -> list[int]:
        return list(text.encode())


AGENT = Agent(Chat(), None, "")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("model", "variable", "server", "told"),
    [
        (
            "",
            "",
            {"key": "k1"},
            r"failed with 401; set evaluation\.summariser_key_variable to the environment variable",
        ),
        ("", "OTHER_KEY", {"key": "k1"}, r"failed with 401; set evaluation\.summariser_key_variable"),
        ("", "NO_KEY", {}, r"evaluation\.summariser_key_variable: the environment variable NO_KEY is not set"),
        ("", "", {"names": ("a", "b")}, r"serves a, b: choose one with evaluation\.summariser_model"),
        ("c", "", {"names": ("a", "b")}, r"serves a, b, not c: correct evaluation\.summariser_model"),
    ],
)
def test_a_summarisers_server_is_spoken_of_by_the_keys_of_a_summariser(
    model: str, variable: str, server: dict[str, Any], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTHER_KEY", "k2")
    keys = {"evaluation.summariser_model": model, "evaluation.summariser_key_variable": variable}
    with running(asked := FakeVLLM(**server)), pytest.raises((SamplerRefused, ConfigError), match=told) as refused:
        asyncio.run(open_summariser(load_config(DEMO, keys), asked.url, AGENT))
    assert "server." not in str(refused.value)
    assert "k2" not in str(refused.value)


def test_the_key_is_a_summarisers_where_only_its_replies_need_one() -> None:
    """An endpoint that lists its models for everybody refuses the first request."""

    class Open(FakeChat):
        def answer(self, *request: Any) -> tuple[int, Any]:
            return (401, {"error": "no key"}) if request[1] == self.route else super().answer(*request)

    with running(asked := Open()):
        found, _ = asyncio.run(open_summariser(load_config(DEMO), asked.url, AGENT))
        with pytest.raises(SamplerRefused, match=r"401; set evaluation\.summariser_key_variable"):
            asyncio.run(optional(found, "start", 100))


def test_a_summariser_may_be_an_endpoint_that_lists_no_models() -> None:
    """As a policy may; its name is then the user's to give."""
    with running(asked := FakeChat(lists=False)):
        config = load_config(DEMO, {"evaluation.summariser_model": asked.names[0]})
        found, about = asyncio.run(open_summariser(config, asked.url, AGENT))
        asyncio.run(optional(found, "start", 100))
        assert about == f"{asked.names[0]}, from text"
        with pytest.raises(SamplerRefused, match=r"404; check .*evaluation\.summariser_model"):
            asyncio.run(open_summariser(load_config(DEMO), asked.url, AGENT))


def test_a_choice_of_models_is_for_the_user() -> None:
    with running(server := FakeVLLM(names=("a", "b"))):
        assert asyncio.run(identify(settings(server, model="b"))).model == "b"
        for name in ("", "c"):
            with pytest.raises(SamplerRefused, match=r"serves a, b.*server\.model"):
                asyncio.run(identify(settings(server, model=name)))


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
        sampler, described = asyncio.run(open_summariser(load_config(DEMO, keys), server.url, AGENT))
        asyncio.run(sampler.start(8))  # type: ignore[attr-defined]
    assert described == "glm-6, vllm, token ids"
    assert {headers.get("Authorization") for headers in server.headers} == {sent}
    assert {body["model"] for _, body in server.requests if "model" in body} == {"glm-6"}
