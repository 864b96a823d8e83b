"""What an assistant said, where it is text: calls as they were written, and OpenAI-style messages of it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from compactionrl.environments.protocol import Message, Response, ToolCall
from compactionrl.rollout.chat import MAX_NAME, PROBLEMS
from compactionrl.samplers.protocol import Reply, SpokenCall


def parse_reply(reply: Reply) -> Response:
    """The structure of a response."""
    return Response(
        reply.text.strip(), reply.thinking.strip(), [*map(parse_call, reply.calls)], reply.finish == "length"
    )


def parse_call(call: SpokenCall) -> ToolCall:
    wrong, arguments = None, {}
    try:
        arguments = json.loads(call.arguments, parse_constant=refuse)
    except (ValueError, RecursionError):
        wrong = PROBLEMS["invalid_json"]
    if not isinstance(arguments, dict):
        wrong, arguments = "its arguments are no JSON object", {}
    if not is_short(call.name):
        wrong = f"its name is missing, no plain text, or longer than {MAX_NAME} characters"
    name = call.name if is_short(call.name) else ""
    return ToolCall(call.id, name, arguments, None if wrong is None else f"Malformed call: {wrong}")


def refuse(constant: str) -> None:
    """NaN and the infinities, which Python reads: strict servers do not take them back."""
    raise ValueError(f"{constant} is no JSON")


def distinct(calls: Iterable[SpokenCall]) -> Iterator[SpokenCall]:
    """The calls of one response with ids that are short and tell them apart: their answers name them."""
    taken: set[str] = set()
    for number, call in enumerate(calls):
        name = call.id if is_short(call.id) and call.id not in taken else f"call_{number}"
        while name in taken:
            name += "_"
        taken.add(name)
        yield call._replace(id=name)


def is_short(name: str) -> bool:
    return 0 < len(name) <= MAX_NAME and name.isascii() and name.isprintable()


def said(response: Response) -> Message:
    """A response as a message; in place of a malformed call's arguments stands what is wrong with it."""
    calls = [
        SpokenCall(call.id, call.name, call.error or json.dumps(call.arguments, ensure_ascii=False))
        for call in response.calls
    ]
    return message_of(Reply(response.text, response.thinking, calls))


def message_of(reply: Reply) -> Message:
    message: dict[str, Any] = {"role": "assistant", "content": reply.text}
    if reply.thinking:
        message["reasoning_content"] = reply.thinking
    if reply.calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in reply.calls
        ]
    return message  # type: ignore[return-value]
