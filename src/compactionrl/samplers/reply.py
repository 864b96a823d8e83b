"""What a chat completion says, in the ways in which endpoints write it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

from compactionrl.samplers.http import MalformedReply, Server
from compactionrl.samplers.protocol import Reply, Reported, SamplerRefused, SpokenCall
from compactionrl.samplers.served import dig

CUT = ("length", "max_tokens", "content_filter", "sensitive")
"""Finish reasons of a response that did not end by itself."""
BROKEN = ("abort", "error", "insufficient_system_resource", "network_error")
"""Those of one that is to be asked for again."""
FULL = ("model_context_window_exceeded",)
"""Those of one for which the server has no room."""
LONGEST_TOKEN = 24
"""Characters that a token has on average at most, whatever the text. Who reports fewer tokens counts something else."""
MOST_TOKENS = 1 << 40


def read_reply(server: Server, data: Any, prompt_characters: int) -> Reply:
    """Raises MalformedReply; SamplerRefused where the server had no room.

    `prompt_characters`: of the prompt, for whether what is reported can be.
    """
    choice = dig(data, "choices", 0)
    message = dig(choice, "message")
    finish = dig(choice, "finish_reason")
    if not isinstance(message, dict):
        raise MalformedReply(f"{server.name}: a reply without a message: {json.dumps(data)[:200]}")
    if finish in BROKEN:
        raise MalformedReply(f"{server.name}: a reply that broke off ({finish})")
    if finish in FULL:
        raise context_too_short(server, f": {finish}")
    content = message.get("content")
    if content is None:
        content = message.get("refusal") or ""
    parts = list(text_parts(server, content))
    text = "".join(part for kind, part in parts if kind == "text")
    thinking = "".join(part for kind, part in parts if kind == "thinking")
    for key in ("reasoning_content", "reasoning"):
        given = message.get(key)
        if isinstance(given, str) and not thinking:
            thinking = given
    if not thinking:
        thinking, text = split_thinking(text)
    cut: Literal["stop", "length"] = "length" if finish in CUT else "stop"
    reply = Reply(text, thinking, list(calls(server, message)), cut)
    reply.reported = reported(dig(data, "usage"), reply, prompt_characters)
    return reply


def context_too_short(server: Server, words: str) -> SamplerRefused:
    return SamplerRefused(
        f"{server.name}: the context limit of the server is below context.budget, whose count is approximate: lower "
        f"context.budget, or serve the model with a longer context; it says{words}"
    )


def text_parts(server: Server, content: Any) -> Iterator[tuple[Literal["text", "thinking"], str]]:
    """Text is a string, or a list of parts, some of which may be thinking."""
    if isinstance(content, str):
        yield "text", content
        return
    if not isinstance(content, list):
        raise MalformedReply(f"{server.name}: a reply whose content is no text: {str(content)[:100]}")
    for part in content:
        text = dig(part, "text")
        if isinstance(part, str) or isinstance(text, str):
            yield "text", text if isinstance(text, str) else part
        elif (thought := dig(part, "thinking")) is not None:
            yield from (("thinking", each) for _, each in text_parts(server, thought))


def split_thinking(text: str) -> tuple[str, str]:
    """The thinking and the text of servers that leave both in the content; the template may have opened the thinking."""
    before, closed, after = text.partition("</think>")
    begun = before.lstrip().startswith("<think>")
    if not closed and not begun:
        return "", text
    return before.lstrip().removeprefix("<think>").strip(), after.lstrip()


def calls(server: Server, message: dict[str, Any]) -> Iterator[SpokenCall]:
    listed = message.get("tool_calls")
    if listed is None:
        listed = [{"function": message["function_call"]}] if message.get("function_call") else []
    if not isinstance(listed, list):
        raise MalformedReply(f"{server.name}: a reply whose tool_calls are no list")
    for call in listed:
        name, arguments = dig(call, "function", "name"), dig(call, "function", "arguments")
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments) if arguments is not None else ""
        identity = dig(call, "id")
        yield SpokenCall(
            identity if isinstance(identity, str) else "",
            name if isinstance(name, str) else "",
            arguments if arguments.strip() else "{}",
        )


def reported(usage: Any, reply: Reply, prompt_characters: int) -> Reported | None:
    """What the server counted; None if it says nothing, or nothing that can be."""
    prompt, completion = count(dig(usage, "prompt_tokens")), count(dig(usage, "completion_tokens"))
    written = len(reply.text) + len(reply.thinking) + sum(len(call.name + call.arguments) for call in reply.calls)
    if prompt * LONGEST_TOKEN < max(prompt_characters, 1) or completion * LONGEST_TOKEN < max(written, 1):
        return None
    hidden = 0 if reply.thinking else count(dig(usage, "completion_tokens_details", "reasoning_tokens"))
    return Reported(prompt, completion, min(hidden, completion))


def count(value: Any) -> int:
    """A number of tokens; 0 if it is none."""
    return value if type(value) is int and 0 < value < MOST_TOKENS else 0
