"""Messages as every OpenAI-style endpoint, and the chat template behind it, takes them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from compactionrl.rollout.spoken import parse_call
from compactionrl.samplers.protocol import SpokenCall

NAME = re.compile(r"[A-Za-z0-9_.:/-]+")
"""A tool's name that servers take."""


def conversation(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The same messages, with every call answered right behind it, as endpoints want it.

    A call that is malformed, or that nothing answers, is sent as text, and what answered it comes from the user. Neighbouring
    messages of the user are joined: many templates refuse turns that do not alternate.
    """
    sent: list[dict[str, Any]] = []
    called: set[str] = set()
    late: list[str] = []
    for number, message in enumerate(messages):
        role, content = message["role"], message["content"]
        if role == "tool" and message.get("tool_call_id") in called:
            sent.append({"role": role, "content": content, "tool_call_id": message["tool_call_id"]})
        elif role == "tool":
            late.append(content)
        else:
            add(sent, late)
            late = []
            if role == "assistant":
                answers = takewhile(lambda other: other["role"] == "tool", messages[number + 1 :])
                sent.append(assistant(message, {answer.get("tool_call_id") for answer in answers}))
                called = {call["id"] for call in sent[-1].get("tool_calls", ())}
            elif role == "user":
                add(sent, [content])
            else:
                sent.append({"role": role, "content": content})
    add(sent, late)
    return sent


def add(sent: list[dict[str, Any]], texts: Sequence[str]) -> None:
    """Let the user say `texts`."""
    for text in texts:
        if sent and sent[-1]["role"] == "user":
            text = f"{sent.pop()['content']}\n\n{text}"
        sent.append({"role": "user", "content": text})


def assistant(message: Mapping[str, Any], answered: set[Any]) -> dict[str, Any]:
    """An assistant's message with the calls that are some."""
    calls, texts = [], [message["content"]] if message["content"] else []
    for call in message.get("tool_calls", ()):
        function = call["function"]
        if call["id"] in answered and is_call(SpokenCall(call["id"], **function)):
            calls.append(call)
        else:
            texts.append(f"<tool_call>\n{function['name']} {function['arguments']}\n</tool_call>")
    said = {**message, "content": "\n".join(texts)}
    return said | {"tool_calls": calls} if calls else {k: v for k, v in said.items() if k != "tool_calls"}


def is_call(call: SpokenCall) -> bool:
    return bool(call.id) and parse_call(call).error is None and bool(NAME.fullmatch(call.name))
