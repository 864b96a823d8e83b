"""POST /v1/completions, as vLLM 0.32 has it: token ids in, token ids and log-probabilities out."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import Field
from starlette.responses import Response

from compactionrl.samplers.protocol import Sampled
from compactionrl.serving.bodies import parse
from compactionrl.serving.errors import ApiError
from compactionrl.serving.model import ServedModel, stop_reason, usage
from compactionrl.serving.parameters import MOST_LOGPROBS, Parameters, refuse_unsupported
from compactionrl.serving.replies import event_reply, json_reply
from compactionrl.serving.scoring import Score

WRONG_PROMPT = "prompt must be a string, a list of token ids, or a list of such prompts"


class CompletionRequest(Parameters):
    prompt: Any = None
    max_tokens: int | None = Field(16, ge=0, lt=2**31)
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    prompt_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    add_special_tokens: bool = True


async def complete(model: ServedModel, body: dict[str, Any], session: str | None) -> Response:
    refuse_unsupported(body)
    request = parse(CompletionRequest, body)
    model.check_name(request.model)
    if request.max_tokens == 0 and not request.echo:
        raise ApiError(400, "max_tokens must be at least 1, or echo true", "max_tokens")
    prompts = read_prompts(model, request)
    responses = await model.sample(prompts, request, request.max_tokens, request_session(request, session))
    reply: dict[str, Any] = {
        "id": f"cmpl-{uuid.uuid4().hex}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": model.name,
        "choices": list(choices(model, request, prompts, responses)),
    }
    used = usage(prompts, responses)
    if not request.stream:
        return json_reply(reply | {"usage": used})
    chunks = [reply | {"choices": [choice]} for choice in reply["choices"]]
    return event_reply([*chunks, *([reply | {"choices": [], "usage": used}] if request.wants_usage else [])])


def request_session(request: Parameters, header: str | None) -> str | None:
    """Whose row the request may use."""
    return request.session_id or header or request.user or None


def read_prompts(model: ServedModel, request: CompletionRequest) -> list[list[int]]:
    """The token ids of every prompt. Raises ApiError."""
    prompt = request.prompt
    if isinstance(prompt, str) or is_ids(prompt):
        prompt = [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise ApiError(400, WRONG_PROMPT, "prompt")
    return [encode(model, each, request.add_special_tokens) for each in prompt]


def encode(model: ServedModel, prompt: Any, add_special_tokens: bool) -> list[int]:
    """As every tokenizer of Hugging Face does: strings that spell special tokens are those tokens."""
    if isinstance(prompt, str):
        text = prompt.encode("utf-8", "replace").decode()  # halves of surrogate pairs are no text
        return model.chat.tokenizer.base.encode(text, add_special_tokens=add_special_tokens)
    if is_ids(prompt) and all(token >= 0 for token in prompt):
        return prompt
    raise ApiError(400, WRONG_PROMPT, "prompt")


def is_ids(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and all(type(token) is int for token in prompt)


def choices(
    model: ServedModel, request: CompletionRequest, prompts: Sequence[list[int]], responses: Sequence[Sampled]
) -> Iterator[dict[str, Any]]:
    """The choices of the reply: all of the first prompt, then those of the next."""
    wanted = [request.prompt_logprobs, request.logprobs if request.echo else None]
    n, top = request.choices, max((number for number in wanted if number is not None), default=None)
    for i, prompt in enumerate(prompts):
        scores = [] if top is None else model.score(prompt, top=top)
        for j, sampled in enumerate(responses[i * n : (i + 1) * n], i * n):
            yield choice(model, request, j, prompt, scores, sampled)


def choice(
    model: ServedModel, request: CompletionRequest, index: int, prompt: list[int], scores: list[Score], sampled: Sampled
) -> dict[str, Any]:
    shown = [*(prompt if request.echo else []), *model.spoken(sampled, request)]
    found: dict[str, Any] = {
        "index": index,
        "text": model.decode(shown, skip_special_tokens=request.skip_special_tokens),
        "logprobs": None,
        "finish_reason": sampled.finish,
        "stop_reason": stop_reason(sampled, request),
        "prompt_logprobs": None,
    }
    if request.logprobs is not None:
        own = sampled_scores(model, request, prompt, sampled, request.logprobs)
        found["logprobs"] = listed(
            model, request, prompt[:1] if request.echo else [], [*scores, *own] if request.echo else own
        )
    if request.prompt_logprobs is not None:
        found["prompt_logprobs"] = [None, *(described(model, score, request.prompt_logprobs) for score in scores)]
    if request.return_token_ids:
        found |= {"token_ids": sampled.token_ids, "prompt_token_ids": prompt}
    return found


def sampled_scores(
    model: ServedModel, parameters: Parameters, prompt: Sequence[int], sampled: Sampled, top: int
) -> list[Score]:
    """Of sampled tokens, with the sampler's log-probabilities. Alternatives, if wanted, take a forward of their own."""
    others: list[list[tuple[int, float]]] = [[] for _ in sampled.token_ids]
    if top and sampled.token_ids:
        ids = [*prompt, *sampled.token_ids]
        found = model.score(ids, len(prompt), temperature=parameters.temperature, top=top)
        others = [score.top for score in found]
    own = zip(sampled.token_ids, sampled.logprobs, others, strict=True)
    return [Score(token, logprob, 0, top) for token, logprob, top in own]


def listed(model: ServedModel, request: CompletionRequest, first: list[int], scores: Sequence[Score]) -> dict[str, Any]:
    """OpenAI's lists. `first`: the token, if any, that nothing stands before and that has no log-probability."""
    top = request.logprobs or 0
    tokens = [model.spell(token, request) for token in (*first, *(score.token_id for score in scores))]
    alternatives: list[Any] = [None for _ in first]
    for score in scores:
        pairs = [(score.token_id, score.logprob), *score.top[:top]]
        alternatives.append({model.spell(token, request): logprob for token, logprob in reversed(pairs)})
    offsets = [0]
    for token in tokens:
        offsets.append(offsets[-1] + len(token))
    return {
        "text_offset": offsets[:-1],
        "token_logprobs": [*(None for _ in first), *(score.logprob for score in scores)],
        "tokens": tokens,
        "top_logprobs": alternatives,
    }


def described(model: ServedModel, score: Score, top: int) -> dict[str, Any]:
    """vLLM's prompt log-probabilities of one position: of its token and the most likely ones, by id."""
    entries = {token: (logprob, rank) for rank, (token, logprob) in enumerate(score.top[:top], 1)}
    entries[score.token_id] = (score.logprob, score.rank)
    return {
        str(token): {"logprob": logprob, "rank": rank, "decoded_token": model.decode([token])}
        for token, (logprob, rank) in entries.items()
    }
