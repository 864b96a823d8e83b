"""vLLM servers: token ids in, token ids and log-probabilities out, through the OpenAI-style completions route.

Written to vLLM 0.32; `return_token_ids` needs 0.10.2 or later. A server that is trained with runs in development mode, which
has the routes that pause it, and with the worker extension that takes the weights:

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --worker-extension-cls compactionrl.integrations.vllm_worker.PushedWeights
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from compactionrl.samplers.http import MalformedReply, ServerFailed
from compactionrl.samplers.protocol import SamplerRefused
from compactionrl.samplers.served import (
    PROBE_SECONDS,
    Part,
    Request,
    Served,
    ServedSampler,
    check_logprob,
    check_part,
    dig,
)

if TYPE_CHECKING:
    from compactionrl.samplers.push import Reading, Weights

NO_DEVELOPMENT = "start it with the environment variable VLLM_SERVER_DEV_MODE=1"
NO_EXTENSION = "start it with --worker-extension-cls compactionrl.integrations.vllm_worker.PushedWeights"


class VLLMSampler(ServedSampler):
    """Samples from vLLM servers; see `ServedSampler`."""

    options_for_scaled = "start it with --logprobs-mode processed_logprobs"

    def request(self, server: Served, request: Request) -> tuple[str, dict[str, Any]]:
        return "/v1/completions", {
            "model": server.model,
            "prompt": list(request.token_ids),
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "seed": request.seed,
            "stop_token_ids": list(request.stop_token_ids),
            "logprobs": 0,  # of the sampled token, and of no other
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "skip_special_tokens": False,
            # A model's generation_config.json, which the server goes by otherwise, may say something else.
            "ignore_eos": True,
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
        }

    def part(self, server: Served, reply: Any, request: Request) -> Part:
        choice = dig(reply, "choices", 0)
        if not isinstance(choice, dict):
            raise MalformedReply(f"{server.name}: a reply without choices")
        token_ids, logprobs = choice.get("token_ids"), dig(choice, "logprobs", "token_logprobs")
        if token_ids is None:
            raise SamplerRefused(
                f"{server.name}: it returns no token ids (return_token_ids): is it vLLM 0.10.2 or later?"
            )
        if logprobs is None:
            raise SamplerRefused(f"{server.name}: it returns no log-probabilities: is it a vLLM server?")
        prompt = choice.get("prompt_token_ids")
        if prompt is not None and prompt != list(request.token_ids):
            raise MalformedReply(f"{server.name}: a reply to another prompt")
        return check_part(server, request, token_ids, logprobs, choice.get("finish_reason"), vocab_size=self.vocab_size)

    async def gap(self, server: Served, temperature: float) -> float:
        path, body = self.request(server, Request([0], 1, temperature=temperature))
        reply = await self.pool.call(server, "POST", path, body | {"logprobs": 2}, seconds=PROBE_SECONDS)
        return difference(dig(reply, "choices", 0, "logprobs", "top_logprobs", 0), server)

    async def stamp(self, server: Served) -> str:
        return await self._rpc(server, "pushed_weights_version")

    async def pause(self, server: Served) -> None:
        await self._control(server, "/pause?mode=abort")

    async def resume(self, server: Served) -> None:
        await self._control(server, "/resume")

    async def load(self, server: Served, weights: Weights) -> None:
        loaded = await self._rpc(server, "load_pushed_weights", str(weights.folder), weights.stamp)
        if loaded != weights.stamp:
            raise MalformedReply(f"{server.name}: load_pushed_weights answered {loaded[:40]!r}")
        reset = await self._control(server, "/reset_prefix_cache?reset_external=true")
        if dig(reset, "success") is False:
            raise ServerFailed(f"{server.name}: it could not clear its prefix cache")

    async def probe(self, server: Served, weights: Weights) -> Reading:
        from compactionrl.samplers.push import Reading

        request = Request(weights.probe.token_ids, 1, temperature=self.temperature)
        path, body = self.request(server, request)
        reply = await self.pool.call(server, "POST", path, body | {"prompt_logprobs": 0}, seconds=PROBE_SECONDS)
        part = self.part(server, reply, request)
        listed = dig(reply, "choices", 0, "prompt_logprobs")
        found = [dig(listed, i, str(token), "logprob") for i, token in enumerate(request.token_ids) if i]
        where = f"{server.name}: its answer to a probe"
        return Reading([check_logprob(value, where) for value in found], part.token_ids[0], part.logprobs[0])

    async def _control(self, server: Served, path: str) -> Any:
        try:
            return await self.pool.call(server, "POST", path)
        except SamplerRefused as error:
            raise SamplerRefused(f"{error}; to push weights to it, {NO_DEVELOPMENT}") from None

    async def _rpc(self, server: Served, method: str, *arguments: str) -> str:
        """What the first worker answers; the others must say the same."""
        body = {"method": method, "args": list(arguments)}
        try:
            reply = await self.pool.call(server, "POST", "/collective_rpc", body)
        except SamplerRefused as error:
            raise SamplerRefused(f"{error}; to push weights to it, {NO_DEVELOPMENT}") from None
        except ServerFailed as error:
            if "no attribute" in str(error):
                raise SamplerRefused(f"{server.name}: it cannot take weights; {NO_EXTENSION}") from None
            raise
        results = dig(reply, "results")
        if not isinstance(results, list) or not results or len(set(map(str, results))) > 1:
            raise MalformedReply(f"{server.name}: its workers do not agree in {method}: {str(results)[:100]}")
        return str(results[0])


def difference(top: Any, server: Served) -> float:
    """Between the two largest of the log-probabilities by token that a server returned."""
    values = (
        sorted((v for v in top.values() if isinstance(v, int | float)), reverse=True) if isinstance(top, dict) else []
    )
    if len(values) < 2:
        raise MalformedReply(f"{server.name}: no log-probabilities of the most likely tokens")
    return values[0] - values[1]
