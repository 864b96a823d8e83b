"""Pauses, clients that go, new weights: what a trainer does to a server."""

import asyncio
import json
import shutil
import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from serving_harness import LENGTH, PROMPT, Running, all_logprobs, in_process, running

from compactionrl.build import DEMO
from compactionrl.config import ServerConfig
from compactionrl.models import load_policy, save_policy
from compactionrl.samplers.local import LocalSampler
from compactionrl.samplers.protocol import Sampled, SamplerRefused
from compactionrl.samplers.push import WeightPush
from compactionrl.samplers.vllm import VLLMSampler
from compactionrl.serving.engine import PASSES, Engine

LONG: dict[str, Any] = {"max_tokens": 400, "temperature": 2.0, "seed": 5, "ignore_eos": True}


@cache
def expected() -> Sampled:
    return in_process(max_tokens=400, temperature=2.0, seed=5, stop_token_ids=[])


@pytest.fixture
def demo() -> Iterator[Running]:
    with running(rows=4) as server:
        yield server


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as pool:
        yield pool


def begin(demo: Running, pool: ThreadPoolExecutor, **changes: Any) -> "Future[Any]":
    """A long request that is in the middle of its response."""
    steps = demo.model.engine.stats.steps
    asked = pool.submit(demo.complete, **(LONG | changes))
    demo.until(lambda: demo.model.engine.stats.steps > steps + 3)
    return asked


def pause(demo: Running, mode: str) -> None:
    assert demo.post(f"/pause?mode={mode}").json() == {"status": "paused"}
    assert demo.get("/is_paused").json() == {"is_paused": True}


def resume(demo: Running) -> None:
    assert demo.post("/resume").json() == {"status": "resumed"}
    assert demo.get("/is_paused").json() == {"is_paused": False}


def test_keep_freezes_a_response_and_goes_on_with_it(demo: Running, pool: ThreadPoolExecutor) -> None:
    asked = begin(demo, pool)
    pause(demo, "keep")
    steps = demo.model.engine.stats.steps
    waiting = pool.submit(demo.complete, seed=9)
    demo.until(lambda: len(demo.model.sessions.busy) == 2)
    assert demo.get("/health").status_code == 200
    assert not asked.done()
    assert not waiting.done()
    assert demo.model.engine.stats.steps == steps
    resume(demo)
    [choice] = asked.result()["choices"]
    assert choice["token_ids"] == expected().token_ids
    assert choice["finish_reason"] == "length"
    assert waiting.result()["choices"][0]["token_ids"] == in_process(seed=9).token_ids


def test_abort_answers_with_what_there_is(demo: Running, pool: ThreadPoolExecutor) -> None:
    asked = begin(demo, pool, session_id="s")
    demo.post("/pause")  # the default, as in vLLM
    [choice] = asked.result()["choices"]
    tokens, whole = choice["token_ids"], expected()
    assert choice["finish_reason"] == "abort"
    assert 0 < len(tokens) < 400
    assert tokens == whole.token_ids[: len(tokens)]
    assert choice["logprobs"]["token_logprobs"] == whole.logprobs[: len(tokens)]
    later = pool.submit(demo.complete, [*PROMPT, *tokens], seed=1, max_tokens=3, ignore_eos=True, session_id="s")
    demo.until(lambda: len(demo.model.sessions.busy) == 1)
    assert not later.done()
    reused = demo.model.engine.stats.reused_tokens
    resume(demo)
    again = in_process([*PROMPT, *tokens], seed=1, max_tokens=3, stop_token_ids=[])
    assert later.result()["choices"][0]["token_ids"] == again.token_ids
    assert demo.model.engine.stats.reused_tokens - reused == len(PROMPT) + len(tokens) - 1  # its row was kept


def test_half_a_chat_reply_is_an_error(demo: Running, pool: ThreadPoolExecutor) -> None:
    body = {"messages": [{"role": "user", "content": "next"}], **LONG}
    asked = pool.submit(demo.post, "/v1/chat/completions", body)
    demo.until(lambda: demo.model.engine.stats.steps > 3)
    pause(demo, "abort")
    assert asked.result().status_code == 503
    assert "retry-after" in asked.result().headers


def test_wait_lets_what_is_open_finish_and_nothing_begin(demo: Running, pool: ThreadPoolExecutor) -> None:
    asked = begin(demo, pool)
    pausing = pool.submit(pause, demo, "wait")
    demo.until(lambda: demo.model.engine.paused)
    later = pool.submit(demo.complete, seed=9)
    pausing.result()
    assert asked.result()["choices"][0]["token_ids"] == expected().token_ids
    assert not later.done()
    resume(demo)
    assert later.result()["choices"][0]["token_ids"] == in_process(seed=9).token_ids


def test_pauses_in_a_row(demo: Running, pool: ThreadPoolExecutor) -> None:
    """Waiting thaws what was frozen; a resume ends the waiting; an unknown mode does nothing."""
    asked = begin(demo, pool)
    pause(demo, "keep")
    assert demo.post("/pause?mode=sleep").status_code == 400
    pausing = pool.submit(demo.post, "/pause?mode=wait")
    resume_at = demo.model.engine.stats.steps + 5
    demo.until(lambda: demo.model.engine.stats.steps > resume_at)
    resume(demo)
    assert pausing.result().status_code == 200
    assert demo.get("/is_paused").json() == {"is_paused": False}
    assert asked.result()["choices"][0]["token_ids"] == expected().token_ids
    pause(demo, "wait")  # nothing is open
    resume(demo)


def test_a_reset_forgets_what_was_computed(demo: Running) -> None:
    first = demo.complete(seed=1, session_id="s")["choices"][0]
    reused = demo.model.engine.stats.reused_tokens
    assert demo.post("/reset_prefix_cache?reset_external=true").json() == {"success": True}
    assert demo.complete(seed=1, session_id="s")["choices"][0] == first
    assert demo.model.engine.stats.reused_tokens == reused


@pytest.mark.parametrize("passes", range(PASSES + 4))
def test_an_aborted_response_grows_no_more(passes: int) -> None:
    """Wherever the engine is when the abort comes, and even if it goes on at once."""

    async def main() -> None:
        engine = Engine(load_policy(DEMO), max_rows=2, max_tokens_per_row=LENGTH)
        request = engine.sample(
            PROMPT, max_tokens=400, stop_token_ids=[], temperature=2.0, top_p=1.0, seed=5, affinity="a"
        )
        task = asyncio.create_task(request)
        for _ in range(4 * PASSES + passes):
            await asyncio.sleep(0)
        steps = engine.stats.steps
        engine.abort()
        sampled = await task
        assert len(sampled.token_ids) == steps > 0
        for _ in range(2 * PASSES):
            await asyncio.sleep(0)
        assert len(sampled.token_ids) == engine.stats.steps == steps

    asyncio.run(main())


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_a_client_that_goes_frees_its_row(demo: Running, route: str) -> None:
    body = {"messages": [{"role": "user", "content": "next"}], "prompt": PROMPT, **LONG, "n": 4}
    content = json.dumps(body).encode()
    head = f"POST {route} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    address = demo.url.removeprefix("http://").split(":")
    with socket.create_connection((address[0], int(address[1]))) as connection:
        connection.sendall(head.encode() + content)
        demo.until(lambda: demo.model.engine.stats.steps > 3)
        pause(demo, "keep")  # so that it cannot finish by itself
        assert len(demo.model.sessions.busy) == 4
    demo.until(lambda: not demo.model.sessions.busy)
    resume(demo)
    assert demo.model.engine.stats.sampled_tokens < 4 * 400
    demo.until(lambda: not demo.model.engine.open)
    assert demo.complete(seed=3)["choices"][0]["token_ids"] == in_process(seed=3).token_ids


def test_a_client_that_goes_while_it_sends(demo: Running) -> None:
    address = demo.url.removeprefix("http://").split(":")
    with socket.create_connection((address[0], int(address[1]))) as connection:
        head = [
            "POST /v1/completions HTTP/1.1",
            "Host: localhost",
            "Content-Type: application/json",
            "Content-Length: 100",
        ]
        connection.sendall("\r\n".join([*head, "", '{"prom']).encode())
    assert demo.complete(seed=3)["choices"][0]["token_ids"] == in_process(seed=3).token_ids


def test_more_clients_than_rows(demo: Running, pool: ThreadPoolExecutor) -> None:
    found = pool.map(lambda i: demo.complete(seed=i, session_id=f"{i}"), range(12))
    assert [f["choices"][0]["token_ids"] for f in found] == [in_process(seed=i).token_ids for i in range(12)]
    assert list(demo.model.sessions.idle)[:-4] == []  # as many as there are rows


def test_the_server_ends_while_it_samples(pool: ThreadPoolExecutor) -> None:
    """What is open gets its part, what waits an error; nobody hangs."""
    with running() as demo:
        asked = begin(demo, pool)
        demo.server.stop()
        [choice] = asked.result()["choices"]
        assert choice["finish_reason"] == "abort"
        assert choice["token_ids"] == expected().token_ids[: len(choice["token_ids"])]
    with running() as demo:
        pause(demo, "keep")
        body = {"prompt": PROMPT}
        waiting = pool.submit(demo.post, "/v1/completions", body)
        demo.until(lambda: len(demo.model.sessions.busy) == 1)
        demo.server.stop()
        assert waiting.result().status_code == 503
        assert "shutting down" in waiting.result().json()["error"]["message"]


# Weights


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """A folder below which another policy of the same shape lies in `other`."""
    policy = load_policy(DEMO)
    torch.manual_seed(1)
    with torch.no_grad():
        for p in policy.parameters():
            p += 0.05 * torch.randn_like(p)
    save_policy(policy, tmp_path / "allowed" / "other")
    return tmp_path / "allowed"


def load(server: Running, folder: Any, version: str = "run-1", **call: Any) -> Any:
    return server.post("/collective_rpc", {"method": "load_pushed_weights", "args": [str(folder), version], **call})


def version(server: Running) -> str:
    [found] = server.post("/collective_rpc", {"method": "pushed_weights_version"}).json()["results"]
    return found


def test_new_weights_are_those_of_the_folder_and_of_no_other(weights: Path) -> None:
    other = weights / "other"
    with running(weights_from=weights) as server:
        before = server.complete(seed=2, session_id="s")["choices"][0]
        assert before["logprobs"]["token_logprobs"] == in_process(seed=2).logprobs
        assert version(server) == ""
        assert load(server, other).json() == {"results": ["run-1"]}
        assert version(server) == "run-1"
        after = server.complete(seed=2, session_id="s")["choices"][0]
        assert after["token_ids"] == in_process(seed=2, folder=other).token_ids
        assert after["logprobs"]["token_logprobs"] == in_process(seed=2, folder=other).logprobs
        [scored] = server.complete(echo=True, max_tokens=0)["choices"]
        full = all_logprobs(PROMPT, other)
        wanted = [full[i, token].item() for i, token in enumerate(PROMPT[1:])]
        assert scored["logprobs"]["token_logprobs"][1:] == pytest.approx(wanted, abs=2e-5)
        by_name = {"folder": str(other), "version": "run-2"}
        assert load(server, other, args=[], kwargs=by_name).json() == {"results": ["run-2"]}


def test_a_response_goes_on_with_the_new_weights(weights: Path, pool: ThreadPoolExecutor) -> None:
    """Frozen in the middle, thawed with other weights: the second half is theirs, with the first half as its context."""
    with running(weights_from=weights) as server:
        asked = begin(server, pool)
        pause(server, "keep")
        done = server.model.engine.stats.sampled_tokens
        load(server, weights / "other")
        resume(server)
        [choice] = asked.result()["choices"]
    tokens, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
    assert len(tokens) == 400
    assert logprobs[:done] == expected().logprobs[:done]
    full = all_logprobs([*PROMPT, *tokens], weights / "other", temperature=2.0)
    wanted = [full[len(PROMPT) - 1 + i, token].item() for i, token in enumerate(tokens)]
    assert logprobs[done:] == pytest.approx(wanted[done:], abs=1e-4)


@pytest.mark.parametrize(
    "where", ["elsewhere", "link", "..", "missing", "damaged", "shape", "adapters", "\0", "x" * 5000]
)
def test_weights_that_are_refused_change_nothing(weights: Path, tmp_path: Path, where: str) -> None:
    outside = tmp_path / "elsewhere"
    shutil.copytree(weights / "other", outside)
    (weights / "link").symlink_to(outside)
    damaged = shutil.copytree(weights / "other", weights / "damaged") / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-100])
    config = json.loads((outside / "config.json").read_text())
    shutil.copytree(weights / "other", weights / "shape")
    (weights / "shape" / "config.json").write_text(json.dumps(config | {"intermediate_size": 128}))
    shutil.copytree(weights / "other", weights / "adapters")
    (weights / "adapters" / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(outside)}))
    folder = {"elsewhere": outside, "..": weights / "other" / ".." / ".." / "elsewhere"}.get(where, weights / where)
    with running(weights_from=weights) as server:
        refused = load(server, folder)
        assert refused.status_code == 400
        message = refused.json()["error"]["message"]
        if where in ("elsewhere", "link", ".."):
            assert message == "this server takes weights from below its --allow-weights-from FOLDER only"
        assert version(server) == ""
        found = server.complete(seed=2)["choices"][0]
    assert found["logprobs"]["token_logprobs"] == in_process(seed=2).logprobs


def test_without_permission_no_weights_are_taken(weights: Path, demo: Running) -> None:
    refused = load(demo, weights / "other")
    assert refused.status_code == 400
    assert "--allow-weights-from" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    "call",
    [
        {},
        {"method": "shutdown"},
        {"method": "__init__", "args": []},
        {"method": "load_pushed_weights"},
        {"method": "load_pushed_weights", "args": ["a"]},
        {"method": "load_pushed_weights", "args": ["a", "b", "c"]},
        {"method": "load_pushed_weights", "args": ["a", "b"], "kwargs": {"folder": "c"}},
        {"method": "load_pushed_weights", "args": [1, 2]},
        {"method": "pushed_weights_version", "kwargs": {"self": "a"}},
        {"method": ["load_pushed_weights"]},
    ],
)
def test_other_procedures_are_refused(demo: Running, call: dict[str, Any]) -> None:
    assert demo.post("/collective_rpc", call).status_code == 400


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_training_pushes_its_weights_and_has_them_proved(tmp_path: Path, temperature: float) -> None:
    """Our vLLM sampler takes this server for vLLM, in the middle of a response too."""
    policy = load_policy(DEMO)
    push = WeightPush(policy, tmp_path, temperature=temperature)
    request: dict[str, Any] = {
        "token_ids": PROMPT, "max_tokens": 400, "stop_token_ids": [], "temperature": temperature, "top_p": 1.0,
        "affinity": "r", "seed": 3,
    }  # fmt: skip

    async def work(server: Running) -> list[Sampled]:
        sampler = VLLMSampler(ServerConfig(urls=[server.url]), vocab_size=406, temperature=temperature, push=push)
        try:
            await sampler.start(128)
            await sampler.weights_changed(0)
            first = asyncio.create_task(sampler.sample(**request))
            steps = server.model.engine.stats.steps
            while server.model.engine.stats.steps < steps + 20:
                await asyncio.sleep(0.001)
            with torch.no_grad():
                for p in policy.parameters():
                    p += 0.05 * torch.randn_like(p)
            await sampler.weights_changed(1)
            return [await first, await sampler.sample(**request)]
        finally:
            await sampler.close()

    torch.manual_seed(0)
    with running(weights_from=tmp_path) as server:
        first, second = asyncio.run(work(server))
    local = LocalSampler(policy, max_tokens_per_row=512)
    assert second.token_ids == asyncio.run(local.sample(**request)).token_ids
    assert set(second.versions) == {1}
    assert set(first.versions) == {0, 1}
    assert first.versions == sorted(first.versions)
    cut = first.versions.count(0)
    before = in_process(**{k: v for k, v in request.items() if k != "token_ids"})
    assert first.token_ids[:cut] == before.token_ids[:cut]


def test_training_on_a_server_that_takes_no_weights_is_refused_by_name(tmp_path: Path, demo: Running) -> None:
    async def work() -> None:
        push = WeightPush(load_policy(DEMO), tmp_path)
        sampler = VLLMSampler(ServerConfig(urls=[demo.url]), vocab_size=406, push=push)
        try:
            await sampler.start(128)
            await sampler.weights_changed(0)
        finally:
            await sampler.close()

    with pytest.raises(SamplerRefused, match="--allow-weights-from"):
        asyncio.run(work())
