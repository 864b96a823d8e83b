"""How to sample: the fields that both routes have in common."""

from __future__ import annotations

import secrets
from typing import Annotated, Any

from pydantic import Field

from compactionrl.config import COLDEST, NARROWEST
from compactionrl.serving.bodies import Body
from compactionrl.serving.errors import ApiError

MOST_CHOICES = 128
"""Responses that one request may ask for."""
MOST_LOGPROBS = 20
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "frequency_penalty": (0,),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "logit_bias": ({},),
    "logprob_token_ids": (),
    "min_p": (0,),
    "min_tokens": (0,),
    "presence_penalty": (0,),
    "prompt_embeds": (),
    "reasoning_effort": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "stop": ("", []),
    "structured_outputs": (),
    "suffix": ("",),
    "thinking_token_budget": (),
    "top_k": (0, -1),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}
"""Fields that would change the responses, and that this server knows no more of than the values that do not."""

TokenId = Annotated[int, Field(ge=0)]
Limit = Annotated[int, Field(ge=1, lt=2**31)]
"""Of the tokens of a response."""


class StreamOptions(Body):
    include_usage: bool | None = None


class Parameters(Body):
    model: str | None = None
    n: int | None = Field(None, ge=1, le=MOST_CHOICES)
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, ge=NARROWEST, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    session_id: str | None = None
    user: str | None = None

    def sampling(self) -> dict[str, Any]:
        """Keyword arguments of `Sampler.sample`, of the first choice."""
        temperature = 1.0 if self.temperature is None else self.temperature
        if 0 < temperature < COLDEST:
            raise ApiError(400, f"temperature must be 0 (greedy) or at least {COLDEST:g}", "temperature")
        return {
            "temperature": temperature,
            "top_p": 1.0 if self.top_p is None else self.top_p,
            "seed": secrets.randbits(63) if self.seed is None else self.seed,
        }

    @property
    def choices(self) -> int:
        """Responses to each prompt."""
        return self.n or 1

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with what was used."""
        return bool(self.stream_options and self.stream_options.include_usage)


def refuse_unsupported(body: dict[str, Any]) -> None:
    """Raise ApiError for a field that this server cannot do justice to: it is never silently ignored."""
    for name, neutral in NEUTRAL.items():
        value = body.get(name)
        if value is not None and value not in neutral:
            raise ApiError(400, f"{name} is not supported by this server: leave it out", name)
