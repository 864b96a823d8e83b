"""POST /v1/chat/completions, as OpenAI has it, with vLLM's `reasoning_content` and token ids."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from pydantic import Field
from starlette.responses import Response

from compactionrl.environments.protocol import ToolCall
from compactionrl.rollout.chat import Span
from compactionrl.samplers.protocol import Sampled
from compactionrl.serving.bodies import Body, parse
from compactionrl.serving.completions import request_session, sampled_scores
from compactionrl.serving.errors import ApiError
from compactionrl.serving.model import ServedModel, stop_reason, usage
from compactionrl.serving.parameters import MOST_LOGPROBS, Limit, Parameters, refuse_unsupported
from compactionrl.serving.replies import event_reply, json_reply


class Part(Body):
    type: Literal["text"]
    text: str


class CalledFunction(Body):
    name: str
    arguments: str | dict[str, Any] = ""


class Call(Body):
    type: Literal["function"] = "function"
    id: str | None = None
    function: CalledFunction


class ChatMessage(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Call] | None = None
    tool_call_id: str | None = None
    name: str | None = None


class Function(Body):
    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function


class Conversation(Body):
    """What a prompt is made of."""

    messages: list[ChatMessage] = Field(min_length=1)
    tools: list[Tool] | None = None
    tool_choice: Literal["auto", "none"] | None = None


class ChatRequest(Parameters, Conversation):
    max_tokens: Limit | None = None
    max_completion_tokens: Limit | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    parallel_tool_calls: bool | None = None
    echo: Literal[False] | None = None


async def chat(model: ServedModel, body: dict[str, Any], session: str | None) -> Response:
    refuse_unsupported(body)
    request = parse(ChatRequest, body)
    model.check_name(request.model)
    if request.top_logprobs and not request.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs true", "top_logprobs")
    tools = described_tools(body, request)
    spans = render(model, request, tools)
    prompt = [token for span in spans for token in span.ids]
    limit = request.max_completion_tokens or request.max_tokens
    responses = await model.sample([prompt], request, limit, request_session(request, session))
    if any(sampled.finish == "abort" for sampled in responses):
        # Half of a reply is no reply: who asks for text would take it for the whole.
        raise ApiError(503, "the request was aborted: ask again", headers={"Retry-After": "1"})
    reply: dict[str, Any] = {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model.name,
        "choices": [choice(model, request, i, spans, prompt, sampled, tools) for i, sampled in enumerate(responses)],
    }
    if request.return_token_ids:
        reply["prompt_token_ids"] = prompt
    used = usage([prompt], responses)
    if not request.stream:
        return json_reply(reply | {"usage": used})
    return event_reply(events(reply, used if request.wants_usage else None))


def described_tools(body: dict[str, Any], request: Conversation) -> list[Any] | None:
    """The tools as they were described, with every key."""
    return body["tools"] if request.tools and request.tool_choice != "none" else None


def render(model: ServedModel, request: Conversation, tools: list[Any] | None) -> list[Span]:
    """The prompt. Raises ApiError for messages that the chat format cannot express."""
    messages = [message(each) for each in request.messages]
    try:
        return model.chat.prompt(messages, tools)  # type: ignore[arg-type]
    except Exception as error:  # formats of many families and users, and their templates, raise what they like
        raise ApiError(400, f"the chat format cannot render these messages: {error}", "messages") from None


def message(given: ChatMessage) -> dict[str, Any]:
    """A message for the chat format."""
    content = given.content
    if isinstance(content, list):
        content = "".join(part.text for part in content)
    if content is None and given.role != "assistant":
        raise ApiError(400, f"a message with role {given.role} needs content", "messages")
    found: dict[str, Any] = {
        "role": "system" if given.role == "developer" else given.role,
        "content": content or "",
        "reasoning_content": given.reasoning_content or given.reasoning,
        "tool_call_id": given.tool_call_id,
        "name": given.name,
        "tool_calls": [called(call) for call in given.tool_calls or []],
    }
    return {key: value for key, value in found.items() if key in ("role", "content") or value}


def called(call: Call) -> dict[str, Any]:
    arguments = call.function.arguments
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            arguments = ""
    if not isinstance(arguments, dict):
        raise ApiError(
            400, "messages: the arguments of a tool call must be a JSON object, written as a string", "messages"
        )
    return {"type": "function", "id": call.id, "function": {"name": call.function.name, "arguments": arguments}}


def choice(
    model: ServedModel,
    request: ChatRequest,
    index: int,
    spans: Sequence[Span],
    prompt: Sequence[int],
    sampled: Sampled,
    tools: list[Any] | None,
) -> dict[str, Any]:
    cut = sampled.finish == "length"
    response = model.chat.parse(spans[-1].ids, sampled.token_ids, cut, tools)
    spoken: dict[str, Any] = {"role": "assistant", "content": response.text}
    if response.thinking:
        spoken["reasoning_content"] = response.thinking
    calls = (
        response.calls if tools and request.parallel_tool_calls is not False else response.calls[:1] if tools else []
    )
    if any(call.error for call in response.calls) or len(response.calls) > len(calls) == 0:
        # What is no call, or was not asked for, is text: all of it, as the model wrote it.
        calls, spoken = [], {"role": "assistant", "content": model.decode(model.spoken(sampled, request))}
    if calls:
        spoken |= {"content": response.text or None, "tool_calls": [written(call) for call in calls]}
    found: dict[str, Any] = {
        "index": index,
        "message": spoken,
        "logprobs": logprobs(model, request, prompt, sampled) if request.logprobs else None,
        "finish_reason": "tool_calls" if calls and not cut else sampled.finish,
        "stop_reason": stop_reason(sampled, request),
    }
    return found | ({"token_ids": sampled.token_ids} if request.return_token_ids else {})


def written(call: ToolCall) -> dict[str, Any]:
    """A call with an id that no other turn has, unless the model gave it one."""
    name = f"call_{uuid.uuid4().hex}" if call.id.startswith("call_") else call.id
    function = {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}
    return {"id": name, "type": "function", "function": function}


def logprobs(model: ServedModel, request: ChatRequest, prompt: Sequence[int], sampled: Sampled) -> dict[str, Any]:
    top = request.top_logprobs or 0

    def entry(token: int, logprob: float) -> dict[str, Any]:
        text = model.spell(token, request)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode(errors="replace"))}

    return {
        "content": [
            entry(score.token_id, score.logprob) | {"top_logprobs": [entry(*pair) for pair in score.top]}
            for score in sampled_scores(model, request, prompt, sampled, top)
        ]
    }


def events(reply: dict[str, Any], used: dict[str, int] | None) -> Iterator[dict[str, Any]]:
    """The chunks of a stream that say the same as `reply`."""
    head = reply | {"object": "chat.completion.chunk", "choices": []}
    for each in reply["choices"]:
        spoken = each["message"]
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        deltas += [{key: spoken[key]} for key in ("reasoning_content", "content") if spoken.get(key)]
        deltas += [{"tool_calls": [call | {"index": i}]} for i, call in enumerate(spoken.get("tool_calls", []))]
        for delta in deltas:
            yield head | {
                "choices": [{"index": each["index"], "delta": delta, "logprobs": None, "finish_reason": None}]
            }
        last = {key: value for key, value in each.items() if key != "message"}
        yield head | {"choices": [last | {"delta": {}}]}
    if used is not None:
        yield head | {"usage": used}
