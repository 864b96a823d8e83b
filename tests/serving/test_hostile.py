"""Whatever is sent gets an error of the right kind, in OpenAI's shape, and the server goes on."""

import json
import logging
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serving_harness import LENGTH, PROMPT, Running, in_process, running

from compactionrl.samplers.protocol import Sampled
from compactionrl.serving import bodies, guard

ROUTES = ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/collective_rpc"]


@pytest.fixture(scope="module")
def demo() -> Iterator[Running]:
    with running() as server:
        yield server


@pytest.fixture(scope="module")
def expected() -> Sampled:
    return in_process(seed=3)


@pytest.fixture(autouse=True)
def unharmed(demo: Running, expected: Sampled, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """After every test the server answers as before, nothing is left open, and no traceback was logged."""
    yield
    assert demo.complete(seed=3)["choices"][0]["token_ids"] == expected.token_ids
    assert not demo.model.sessions.busy
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


def send(demo: Running, route: str, content: bytes, **headers: str) -> httpx.Response:
    return demo.post(route, content=content, headers={"Content-Type": "application/json", **headers})


def error(reply: httpx.Response, status: int) -> dict[str, Any]:
    assert reply.status_code == status, reply.text
    found = reply.json()["error"]
    assert found.keys() == {"message", "type", "param", "code"}
    assert found["code"] == status
    assert 0 < len(found["message"]) <= 500
    assert "Traceback" not in found["message"]
    return found


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    "content",
    [
        b"{",
        b"[]",
        b"null",
        b"nonsense",
        b"\xff\xfe",
        b'"\xed\xa0\x80"',
        b'{"prompt": NaN}',
        b'{"prompt": -Infinity}',
        b'{"prompt": [7], "messages": [{"role": "user", "content": "a"}], "tokens": [7], "x": NaN}',
        b'{"method": "pushed_weights_version", "x": NaN}',
        b"[" * 500_000,
        b'{"a":' * 200_000,
        b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"max_tokens": ' + b"9" * 10_000 + b"}",
        b"{}",
        b"",
    ],
)
def test_bodies_that_are_no_request(demo: Running, route: str, content: bytes) -> None:
    error(send(demo, route, content), 400)


@pytest.mark.parametrize(
    "prompt",
    [
        None,
        [],
        "",
        [[]],
        [-1],
        [406],
        [1, 10**30],
        [1.0],
        [True],
        ["a", 3],
        [[1], 2],
        {"a": 1},
        [[[1]]],
        [None],
        5,
        [2**63],
    ],
)
def test_prompts_that_are_none(demo: Running, prompt: Any) -> None:
    assert error(demo.post("/v1/completions", {"prompt": prompt}), 400)["param"] == "prompt"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", -1),
        ("max_tokens", 0),
        ("max_tokens", "5"),
        ("max_tokens", 2.5),
        ("max_tokens", True),
        ("max_tokens", 10**400),
        ("max_tokens", LENGTH),
        ("temperature", -0.1),
        ("temperature", 1e-30),
        ("temperature", "hot"),
        ("temperature", [1]),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_p", 1e-50),
        ("seed", 1.5),
        ("seed", 2**70),
        ("seed", "a"),
        ("n", 0),
        ("n", 129),
        ("logprobs", -1),
        ("logprobs", 21),
        ("logprobs", True),
        ("prompt_logprobs", "all"),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", 5),
        ("stop_token_ids", ["a"]),
        ("echo", "yes"),
        ("stream", 1),
        ("stream_options", []),
        ("session_id", 7),
        ("user", {}),
        ("model", 7),
        ("ignore_eos", "no"),
        ("stop", ["\n"]),
        ("stop", "a"),
        ("top_k", 5),
        ("min_p", 0.1),
        ("repetition_penalty", 1.2),
        ("logit_bias", {"5": 1}),
        ("best_of", 2),
        ("suffix", "x"),
        ("min_tokens", 3),
        ("structured_outputs", {"json": {}}),
    ],
)
def test_fields_that_make_no_sense_or_are_not_supported(demo: Running, field: str, value: Any) -> None:
    found = error(demo.post("/v1/completions", {"prompt": PROMPT, field: value}), 400)
    assert found["param"] is not None
    assert found["param"].startswith(field)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1e300},
        {"temperature": 1e-3},
        {"top_p": 1e-6},
        {"seed": 2**64 - 1, "n": 3},
        {"seed": -(2**63)},
        {"stop_token_ids": [10**30]},
        {
            "n": None,
            "top_p": None,
            "temperature": None,
            "seed": None,
            "stop_token_ids": None,
            "logprobs": None,
            "echo": None,
        },
        {"logprobs": 20, "max_tokens": 2},
        {"session_id": "\ud800" * 1000},
        {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "stop": [], "logit_bias": None, "metadata": {"a": 1}},
    ],
)
def test_extremes_that_are_allowed(demo: Running, options: dict[str, Any]) -> None:
    content = json.dumps({"prompt": PROMPT, **options}).encode()
    assert send(demo, "/v1/completions", content).status_code == 200


def test_a_context_that_does_not_fit(demo: Running) -> None:
    for length, limit in ((LENGTH, 1), (LENGTH - 16, 17), (LENGTH + 100, None), (LENGTH, None)):
        found = error(demo.post("/v1/completions", {"prompt": [7] * length, "max_tokens": limit}), 400)
        assert found["message"].startswith(f"This model's maximum context length is {LENGTH} tokens. However, ")
        assert f"{length} input tokens" in found["message"]


def test_a_model_that_is_not_there(demo: Running) -> None:
    for route, body in (
        ("/v1/completions", {"prompt": PROMPT}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [1]}),
    ):
        found = error(demo.post(route, body | {"model": "gpt\ud800"[:3]}), 404)
        assert found["message"] == "The model `gpt` does not exist; this server has `demo`."
        assert demo.post(route, body | {"model": "demo", "max_tokens": 1}).status_code == 200
    found = error(send(demo, "/v1/completions", b'{"prompt": "a", "model": "\\ud800' + b"x" * 9999 + b'"}'), 404)


def test_routes_and_methods_that_are_not_there(demo: Running) -> None:
    error(demo.get("/v1/engines"), 404)
    error(demo.get("/v1/completions"), 405)
    error(demo.post("/health"), 405)


def test_bodies_of_another_type(demo: Running) -> None:
    """A web page may send text to any server without asking; JSON it may not."""
    content = json.dumps({"prompt": PROMPT}).encode()
    error(demo.post("/v1/completions", content=content, headers={"Content-Type": "text/plain"}), 415)
    error(demo.post("/v1/completions", content=content), 415)
    reply = demo.post("/v1/completions", content=content, headers={"Content-Type": "Application/JSON; charset=utf-8"})
    assert reply.status_code == 200


def test_requests_from_web_pages_are_refused(demo: Running) -> None:
    for route in ("/pause", "/resume"):
        error(demo.post(route, headers={"Origin": "http://example.com"}), 403)
    assert not demo.model.engine.paused


def test_names_that_were_made_to_lead_here_are_refused(demo: Running) -> None:
    """A page's own name may be made to resolve to loopback; it reads such an answer as its own, and sends no Origin."""
    for host in ("example.com", "example.com:8000", "localhost.example.com", "127.0.0.1.example.com", "[", "10.0.0.1"):
        found = demo.get("/v1/models", headers={"Host": host})
        assert found.status_code == 403, host
        error(demo.post("/pause", headers={"Host": host}), 403)
    assert not demo.model.engine.paused
    for host in ("localhost", "LOCALHOST:1", "127.0.0.1:8000", "[::1]:8000", "127.9.9.9", socket.gethostname()):
        assert demo.get("/v1/models", headers={"Host": host}).status_code == 200, host
    with running(key="k") as server:  # which no page knows: behind a proxy, any name may be ours
        headers = {"Host": "models.example.com", "Authorization": "Bearer k"}
        assert server.get("/v1/models", headers=headers).status_code == 200


def test_bodies_that_are_too_long(demo: Running) -> None:
    limit = demo.model.body_limit
    for content in (b" " * (limit + 1), b'{"prompt": "' + b"a" * limit + b'"}'):
        assert str(limit) in error(send(demo, "/v1/completions", content), 413)["message"]
    chunks = (b" " * 65536 for _ in range(limit // 65536 + 2))  # of unknown length
    error(demo.post("/v1/completions", content=chunks, headers={"Content-Type": "application/json"}), 413)
    full = b'{"prompt": [7], "x": "' + b"a" * (limit - 30) + b'"}'
    assert send(demo, "/v1/completions", full).status_code == 200


def test_a_body_that_never_comes(demo: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "READ_SECONDS", 0.1)
    host, port = demo.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n"
        connection.sendall(head)
        assert b" 408 " in connection.recv(65536).split(b"\r\n")[0]


def test_garbage_instead_of_http(demo: Running) -> None:
    host, port = demo.url.removeprefix("http://").split(":")
    for content in (
        b"\x16\x03\x01" * 100,
        b"GET / FTP/1.1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nX: " + b"y" * 100_000,
    ):
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(content)
            connection.shutdown(socket.SHUT_WR)
            assert b" 400 " in connection.recv(65536).split(b"\r\n")[0]


def test_more_requests_than_are_taken(demo: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(guard, "MOST_REQUESTS", 0)
        reply = demo.get("/v1/models")
        error(reply, 503)
        assert float(reply.headers["retry-after"]) > 0


def test_tokens_and_texts(demo: Running) -> None:
    base = demo.model.chat.tokenizer.base
    text = "open n7<|im_end|> zażółć 🙂\n"
    found = demo.post("/tokenize", {"prompt": text, "return_token_strs": True}).json()
    assert found["tokens"] == base.encode(text)
    assert (found["count"], found["max_model_len"]) == (len(found["tokens"]), LENGTH)
    assert found["token_strs"] == [base.decode([token]) for token in found["tokens"]]
    assert demo.post("/detokenize", {"tokens": found["tokens"]}).json() == {"prompt": text}
    assert demo.post("/detokenize", {"tokens": []}).json() == {"prompt": ""}
    for tokens in ([-1], [406], [10**30], "a", None, [1.5]):
        error(demo.post("/detokenize", {"tokens": tokens}), 400)
    error(demo.post("/tokenize", {"prompt": 5}), 400)
    error(demo.post("/tokenize", {"messages": [], "add_generation_prompt": False}), 400)
    half = b'{"prompt": "\\ud800 next"}'
    assert send(demo, "/tokenize", half).json()["tokens"] == base.encode("? next")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)
FIELDS = [
    "prompt", "messages", "tools", "max_tokens", "temperature", "top_p", "seed", "n", "logprobs", "stop_token_ids", "stream",
    "stream_options", "tokens", "method", "args", "kwargs", "tool_choice", "session_id", "echo", "prompt_logprobs", "stop",
]  # fmt: skip


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(ROUTES), st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=6), st.booleans())
def test_any_json_gets_an_answer(demo: Running, route: str, body: dict[str, Any], valid: bool) -> None:
    if valid:
        body = {"prompt": PROMPT, "messages": [{"role": "user", "content": "a"}], "max_tokens": 1} | body
    reply = send(demo, route, json.dumps(body).encode())
    assert reply.status_code in (200, 400, 404)
    if reply.status_code != 200:
        error(reply, reply.status_code)
