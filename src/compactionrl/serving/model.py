"""The model that is served, and what both routes do with it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from compactionrl.rollout.chat import ChatFormat
from compactionrl.samplers.protocol import Sampled
from compactionrl.serving.engine import Closed, Engine
from compactionrl.serving.errors import ApiError
from compactionrl.serving.parameters import MOST_CHOICES, Parameters
from compactionrl.serving.scoring import Score, score
from compactionrl.serving.sessions import Sessions


@dataclass
class ServedModel:
    """A policy and its chat format under a name. A request, prompt and response together, has at most `max_length` tokens."""

    name: str
    policy: Any
    chat: ChatFormat
    engine: Engine
    sessions: Sessions
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def max_length(self) -> int:
        return self.engine.max_tokens_per_row

    @property
    def body_limit(self) -> int:
        """Bytes of a request: more than any prompt that fits."""
        return (1 << 20) + 64 * self.max_length

    def check_name(self, name: str | None) -> None:
        if name is not None and name != self.name:
            raise ApiError(404, f"The model `{name[:100]}` does not exist; this server has `{self.name}`.", "model")

    def room(self, prompt: Sequence[int], max_tokens: int | None) -> int:
        """Tokens to sample behind `prompt` at most; all that fit by default. Raises ApiError if they do not fit."""
        size = self.policy.config.vocab_size
        if not prompt:
            raise ApiError(400, "the prompt is empty: at least one token is needed", "prompt")
        if max(prompt) >= size:
            raise ApiError(
                400, f"the prompt has token id {max(prompt)}, but the vocabulary ends at {size - 1}", "prompt"
            )
        context = f"This model's maximum context length is {self.max_length} tokens. However, "
        room = self.max_length - len(prompt)
        if room < (1 if max_tokens is None else 0):
            raise ApiError(
                400, f"{context}your prompt contains {len(prompt)} input tokens. Please shorten it.", "prompt"
            )
        if max_tokens is not None and max_tokens > room:
            raise ApiError(
                400,
                f"{context}you requested {max_tokens} output tokens and your prompt contains {len(prompt)} input tokens, for a "
                f"total of {len(prompt) + max_tokens} tokens. Please reduce the length of the input prompt or the number of "
                "requested output tokens.",
                "max_tokens",
            )
        return room if max_tokens is None else max_tokens

    async def sample(
        self, prompts: Sequence[Sequence[int]], parameters: Parameters, max_tokens: int | None, session: str | None
    ) -> list[Sampled]:
        """`parameters.choices` responses to each prompt, each with a seed of its own. Raises ApiError."""
        if len(prompts) * parameters.choices > MOST_CHOICES:
            raise ApiError(400, f"more than {MOST_CHOICES} responses in one request: send several", "n")
        rooms = [self.room(prompt, max_tokens) for prompt in prompts]
        sampling = parameters.sampling()
        tasks = [
            asyncio.ensure_future(
                self._sample(prompt, parameters, room, session, **{**sampling, "seed": sampling["seed"] + i})
            )
            for prompt, room in zip(prompts, rooms, strict=True)
            for i in range(parameters.choices)
        ]
        try:
            return await asyncio.gather(*tasks)
        except Closed:
            raise ApiError(503, "the server is shutting down", headers={"Retry-After": "5"}) from None
        finally:
            for task in tasks:
                task.cancel()

    async def _sample(
        self, prompt: Sequence[int], parameters: Parameters, max_tokens: int, session: str | None, **sampling: Any
    ) -> Sampled:
        if not max_tokens:
            return Sampled([], [], "length", [])
        async with self.sessions.row(session) as affinity:
            return await self.engine.sample(
                prompt, max_tokens=max_tokens, stop_token_ids=self.stops(parameters), affinity=affinity, **sampling
            )

    def stops(self, parameters: Parameters) -> list[int]:
        """The request's stop tokens, and the model's own, which end its turns."""
        own = [] if parameters.ignore_eos else self.chat.stop_token_ids
        return [*(parameters.stop_token_ids or []), *own]

    def score(
        self, token_ids: Sequence[int], first: int = 1, *, temperature: float | None = None, top: int = 0
    ) -> list[Score]:
        """See `scoring.score`. Like the sampler's own steps, it keeps the server from everything else meanwhile."""
        return score(self.policy, token_ids, first, temperature=1.0 if temperature is None else temperature, top=top)

    def spoken(self, sampled: Sampled, parameters: Parameters) -> list[int]:
        """The tokens whose text is returned: those of the response without the stop token at its end."""
        ends = sampled.finish == "stop" and not parameters.include_stop_str_in_output
        return sampled.token_ids[:-1] if ends else sampled.token_ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return self.chat.tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def spell(self, token_id: int, parameters: Parameters) -> str:
        """One token as text."""
        return f"token_id:{token_id}" if parameters.return_tokens_as_token_ids else self.decode([token_id])


def usage(prompts: Sequence[Sequence[int]], sampled: Sequence[Sampled]) -> dict[str, int]:
    """Prompts count once each, however many responses they get."""
    prompt, completion = sum(map(len, prompts)), sum(len(each.token_ids) for each in sampled)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def stop_reason(sampled: Sampled, parameters: Parameters) -> int | None:
    """The requested stop token that ended a response; None for the model's own end, and for any other."""
    ended = sampled.finish == "stop" and sampled.token_ids[-1] in (parameters.stop_token_ids or ())
    return sampled.token_ids[-1] if ended else None
