"""POST /tokenize and /detokenize, as vLLM has them."""

from __future__ import annotations

from typing import Any

from pydantic import Field
from starlette.responses import Response

from compactionrl.serving.bodies import Body, parse
from compactionrl.serving.chat_completions import Conversation, described_tools, render
from compactionrl.serving.completions import encode
from compactionrl.serving.errors import ApiError
from compactionrl.serving.model import ServedModel
from compactionrl.serving.parameters import TokenId, refuse_unsupported
from compactionrl.serving.replies import json_reply


class TextToTokens(Body):
    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool | None = None


class ChatToTokens(Conversation):
    model: str | None = None
    return_token_strs: bool | None = None


class TokensToText(Body):
    model: str | None = None
    tokens: list[TokenId] = Field(max_length=1 << 20)


async def tokenize(model: ServedModel, body: dict[str, Any], session: str | None) -> Response:
    """Of a text, or of a conversation with what opens the model's turn."""
    refuse_unsupported(body)
    request: TextToTokens | ChatToTokens
    if "messages" in body:
        request = parse(ChatToTokens, body)
        ids = [token for span in render(model, request, described_tools(body, request)) for token in span.ids]
    else:
        request = parse(TextToTokens, body)
        ids = encode(model, request.prompt, request.add_special_tokens)
    model.check_name(request.model)
    spelled = [model.decode([token]) for token in ids] if request.return_token_strs else None
    return json_reply({"count": len(ids), "max_model_len": model.max_length, "tokens": ids, "token_strs": spelled})


async def detokenize(model: ServedModel, body: dict[str, Any], session: str | None) -> Response:
    request = parse(TokensToText, body)
    model.check_name(request.model)
    if max(request.tokens, default=0) >= model.policy.config.vocab_size:
        raise ApiError(400, f"the vocabulary ends at {model.policy.config.vocab_size - 1}", "tokens")
    return json_reply({"prompt": model.decode(request.tokens)})
