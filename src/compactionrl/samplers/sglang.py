"""SGLang servers: token ids in, token ids and log-probabilities out, through the native /generate route.

Written to the documented protocol of SGLang 0.5 (`sampling_seed` needs 0.5.3 or later, weight versions 0.5).
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


class SGLangSampler(ServedSampler):
    """Samples from SGLang servers; see `ServedSampler`."""

    options_for_scaled = "start it without the environment variable SGLANG_RETURN_ORIGINAL_LOGPROB"

    def request(self, server: Served, request: Request) -> tuple[str, dict[str, Any]]:
        return "/generate", {
            "input_ids": list(request.token_ids),
            "return_logprob": True,
            "logprob_start_len": -1,  # of sampled tokens only
            "sampling_params": {
                "max_new_tokens": request.max_tokens,
                "temperature": request.temperature,
                "top_p": request.top_p,
                "sampling_seed": request.seed,
                "stop_token_ids": list(request.stop_token_ids),
                "no_stop_trim": True,
                "skip_special_tokens": False,
                # The server's preferred parameters may say something else.
                "ignore_eos": True,
                "top_k": -1,
                "min_p": 0.0,
                "repetition_penalty": 1.0,
                "presence_penalty": 0.0,
                "frequency_penalty": 0.0,
            },
        }

    def part(self, server: Served, reply: Any, request: Request) -> Part:
        about = dig(reply, "meta_info")
        if not isinstance(about, dict):
            raise MalformedReply(f"{server.name}: a reply without meta_info")
        finish, sampled = dig(about, "finish_reason", "type"), about.get("output_token_logprobs")
        if sampled is None and finish == "abort":
            sampled = []
        if sampled is None:
            raise SamplerRefused(f"{server.name}: it returns no output_token_logprobs: is it an SGLang server?")
        if about.get("prompt_tokens", len(request.token_ids)) != len(request.token_ids):
            raise MalformedReply(f"{server.name}: a reply to another prompt")
        token_ids, logprobs = ids_and_logprobs(sampled, server)
        stamp = about.get("weight_version")
        return check_part(
            server,
            request,
            token_ids,
            logprobs,
            finish,
            vocab_size=self.vocab_size,
            stamp=None if stamp is None else str(stamp),
        )

    async def gap(self, server: Served, temperature: float) -> float:
        path, body = self.request(server, Request([0], 1, temperature=temperature))
        reply = await self.pool.call(server, "POST", path, body | {"top_logprobs_num": 2}, seconds=PROBE_SECONDS)
        top = dig(reply, "meta_info", "output_top_logprobs", 0)
        values = [dig(top, i, 0) for i in (0, 1)]
        if not all(isinstance(value, int | float) for value in values):
            raise MalformedReply(f"{server.name}: no log-probabilities of the most likely tokens")
        return abs(values[0] - values[1])

    async def stamp(self, server: Served) -> str:
        return str(dig(await self.pool.call(server, "GET", "/get_model_info"), "weight_version"))

    async def pause(self, server: Served) -> None:
        await self.pool.call(server, "POST", "/pause_generation", {"mode": "abort"})

    async def resume(self, server: Served) -> None:
        await self.pool.call(server, "POST", "/continue_generation", {})

    async def load(self, server: Served, weights: Weights) -> None:
        body = {"model_path": str(weights.folder), "weight_version": weights.stamp, "flush_cache": True}
        done = await self.pool.call(server, "POST", "/update_weights_from_disk", body)
        if dig(done, "success") is not True:
            raise ServerFailed(f"{server.name}: it could not load the weights: {str(dig(done, 'message'))[:200]}")
        await self.pool.call(server, "POST", "/flush_cache", parse=False)

    async def probe(self, server: Served, weights: Weights) -> Reading:
        from compactionrl.samplers.push import Reading

        request = Request(weights.probe.token_ids, 1, temperature=self.temperature)
        path, body = self.request(server, request)
        reply = await self.pool.call(server, "POST", path, body | {"logprob_start_len": 0}, seconds=PROBE_SECONDS)
        part = self.part(server, reply, request)
        prompt = dig(reply, "meta_info", "input_token_logprobs")
        if not isinstance(prompt, list) or len(prompt) != len(request.token_ids):
            raise MalformedReply(f"{server.name}: its answer to a probe lacks the prompt's log-probabilities")
        where = f"{server.name}: its answer to a probe"
        found = [check_logprob(dig(item, 0), where) for item in prompt[1:]]
        return Reading(found, part.token_ids[0], part.logprobs[0])


def ids_and_logprobs(sampled: Any, server: Served) -> tuple[list[Any], list[Any]]:
    """Of SGLang's list of (log-probability, id, text)."""
    if not isinstance(sampled, list) or any(not isinstance(item, list) or len(item) < 2 for item in sampled):
        raise MalformedReply(f"{server.name}: output_token_logprobs are no list of log-probabilities and ids")
    return [item[1] for item in sampled], [item[0] for item in sampled]
