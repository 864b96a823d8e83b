"""What is behind a URL: which protocol it speaks, which model it serves, and whether it has the tokenizer that we have."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from compactionrl.config import ServerConfig
from compactionrl.rollout.chat import ChatFormat
from compactionrl.samplers.chat import unlisted
from compactionrl.samplers.http import Server, ServerPool
from compactionrl.samplers.protocol import SamplerError, SamplerRefused
from compactionrl.samplers.served import choose_model, dig

Api = Literal["vllm", "sglang", "chat"]
PROBE = "Zażółć gęślą jaźń: 3.14 + x_1\n\tfor i in range(10): 你好 🙂 ''don't''"
"""Tokenizers of different models do not agree on this."""


class Endpoint(NamedTuple):
    api: Api
    model: str
    """The name under which it serves the model."""


async def identify(config: ServerConfig) -> Endpoint:
    """Ask the first of the servers that answers; one that lists no models completes chats with the configured one.

    Raises SamplerError if none answers, or if it refuses the key or the model.
    """
    pool = ServerPool(config, Server)
    try:
        try:
            server, listed = await first_answer(pool)
        except SamplerRefused as error:
            return Endpoint("chat", unlisted(error, config))
        model = choose_model(server, listed, config, 0)
        if await speaks_sglang(pool, server):
            return Endpoint("sglang", model)
        return Endpoint("vllm" if await speaks_vllm(pool, server, model) else "chat", model)
    finally:
        await pool.close()


async def first_answer(pool: ServerPool[Server]) -> tuple[Server, Any]:
    """A server that answers /v1/models, and what it says."""
    for last, server in zip([*[False] * (len(pool.servers) - 1), True], pool.servers, strict=True):
        try:
            return server, await pool.call(server, "GET", "/v1/models")
        except SamplerError as error:
            if last or not error.retryable:
                raise
    raise AssertionError("unreachable: a pool has a server")


async def speaks_sglang(pool: ServerPool[Server], server: Server) -> bool:
    about = await answer(pool, server, "GET", "/get_model_info")
    return isinstance(about, dict) and not about.keys().isdisjoint(("model_path", "weight_version"))


async def speaks_vllm(pool: ServerPool[Server], server: Server, model: str) -> bool:
    """Whether it takes token ids and returns them."""
    body = {"model": model, "prompt": [0, 1], "max_tokens": 1, "temperature": 1.0, "seed": 0, "stop_token_ids": []}
    body |= {"logprobs": 0, "return_token_ids": True}
    return isinstance(dig(await answer(pool, server, "POST", "/v1/completions", body), "choices", 0, "token_ids"), list)


async def has_tokenizer(config: ServerConfig, chat: ChatFormat) -> bool | None:
    """Whether the first server that answers splits a text as `chat` does; None if it does not say."""
    pool = ServerPool(config, Server)
    try:
        server, listed = await first_answer(pool)
        model = choose_model(server, listed, config, 0)
        body = {"model": model, "prompt": PROBE, "add_special_tokens": False}
        found = dig(await answer(pool, server, "POST", "/tokenize", body), "tokens")
        return found == chat.encode(PROBE) if isinstance(found, list) else None
    finally:
        await pool.close()


async def answer(pool: ServerPool[Server], server: Server, method: str, path: str, body: Any = None) -> Any:
    """What it says; None if it does not know the question."""
    try:
        return await pool.call(server, method, path, body)
    except SamplerError:
        return None
