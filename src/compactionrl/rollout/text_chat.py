"""Chat turns as pieces of text, for endpoints that take and return text.

Rollouts run on such an endpoint as on a policy whose tokens are seen: windows of ids that only grow, the same budget, the same
compaction. An id is a small piece of text, which it spells in itself, or one of the marks that frame turns. So a window
says exactly which messages to send, today and when it is read from a file, and no text can spell a mark.

The number of ids is the count by which the context budget is kept until a server says what it counted: on purpose more than
tokenizers need. Against Qwen3's and Llama 3's, whichever needs more: 1.5 to 1.8 times as many on prose and code, 1.0 to 1.4 on
logs, JSON, tables and digits, 2 to 4 in other scripts; below 1 only on what nobody can read (base64 0.9, random letters 0.6).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum
from functools import lru_cache
from typing import Any

from compactionrl.environments.protocol import Message, Response
from compactionrl.rollout.chat import ChatFormat, Span
from compactionrl.rollout.spoken import distinct, message_of, parse_reply
from compactionrl.samplers.protocol import Reply, SpokenCall

PIECE = re.compile(rb" ?[A-Za-z][a-z]{0,2}|[0-9]|\s{1,3}|[\x80-\xff]{1,2}|[\s\S]")
"""A piece of UTF-8 text."""
SURROGATE = re.compile("[\ud800-\udfff]")
TURN_TOKENS = 4
"""What a server's template puts around a turn, beside what two marks stand for."""
TEMPLATE_TOKENS = 32
"""What templates begin with: a system prompt of their own, a date."""
TOOLS_TOKENS = 160
"""What templates say about tools, beside their descriptions."""


class Mark(IntEnum):
    """An id that is no text. What it marks comes behind it."""

    END = 0
    """Of a turn; the stop token."""
    SPACE = 1
    """Stands for a token of the server's own template."""
    TOOLS = 2
    SYSTEM = 3
    USER = 4
    ASSISTANT = 5
    TOOL = 6
    ANSWERS = 7
    """The id of the call that a tool's turn answers."""
    THINKING = 8
    CONTENT = 9
    """Behind thinking; text right at a turn's beginning is its content without a mark."""
    CALL = 10
    """The tool's name."""
    CALL_ID = 11
    ARGUMENTS = 12


Part = tuple[Mark | None, str]
MARKS: dict[int, Mark] = {mark.value: mark for mark in Mark}
ROLES = {"system": Mark.SYSTEM, "user": Mark.USER, "assistant": Mark.ASSISTANT, "tool": Mark.TOOL}
ROLE_OF: dict[Mark | None, str] = {mark: role for role, mark in ROLES.items()}
SHOWN: dict[Mark | None, str] = {
    Mark.THINKING: "<think>",
    Mark.CONTENT: "</think>",
    Mark.CALL: "<tool_call>",
    Mark.CALL_ID: " ",
    Mark.ARGUMENTS: " ",
    Mark.ANSWERS: " ",
}
"""Marks as people see them; the others are not seen."""


class TextFormat(ChatFormat):
    """The chat format of endpoints that take and return text."""

    approximate = True

    def __init__(self) -> None:
        self.stop_token_ids = [Mark.END.value]

    def prompt(self, messages: Sequence[Message], tools: list[Any] | None = None) -> list[Span]:
        described = [Mark.TOOLS.value, *self.encode(json.dumps(tools)), *spaces(TOOLS_TOKENS)] if tools else []
        return self._spans(messages, [*spaces(TEMPLATE_TOKENS), *described])

    def extend(
        self,
        opening: Sequence[int],
        response: Sequence[int],
        messages: Sequence[Message],
        tools: list[Any] | None = None,
    ) -> list[Span]:
        return self._spans(messages, [] if Mark.END in response[-1:] else [Mark.END.value])

    def parse(
        self, opening: Sequence[int], response: Sequence[int], cut: bool, tools: list[Any] | None = None
    ) -> Response:
        return parse_reply(reply_of(parts(response), cut))

    def endings(self) -> list[list[int]]:
        return [[Mark.END.value], self.encode("a")]

    def encode(self, text: str) -> list[int]:
        """Its pieces. Halves of surrogate pairs, which are no text, become U+FFFD."""
        return [int.from_bytes(b"\1" + piece) for piece in PIECE.findall(SURROGATE.sub("\ufffd", text).encode())]

    def decode(self, ids: Sequence[int]) -> str:
        """The text that the pieces are; of marks, what helps people."""
        return "".join(SHOWN.get(mark, "") + text for mark, text in parts(ids))

    def sampled(self, reply: Reply) -> list[int]:
        """What the endpoint wrote, as the ids of a response, with a stop token unless something cut it."""
        ids = [Mark.THINKING.value, *self.encode(reply.thinking), Mark.CONTENT.value] if reply.thinking else []
        ids += self.encode(reply.text)
        for call in distinct(reply.calls):
            ids += [Mark.CALL.value, *self.encode(call.name), Mark.CALL_ID.value, *self.encode(call.id)]
            ids += [Mark.ARGUMENTS.value, *self.encode(call.arguments)]
        return [*ids, Mark.END.value] if reply.finish == "stop" else ids or [Mark.CONTENT.value]

    def messages(self, ids: Sequence[int]) -> tuple[list[Message], list[Any] | None]:
        """What a window says, up to where the endpoint is to go on: OpenAI-style messages, and the tools."""
        messages: list[Message] = []
        tools: list[Any] | None = None
        role, turn = "", list[Part]()
        for mark, text in parts(ids):
            if mark == Mark.TOOLS:
                tools = json.loads(text)
            elif mark in ROLE_OF:
                role, turn = ROLE_OF[mark], [(None, text)]
            elif mark == Mark.END:
                messages.append(message_of(reply_of(turn)) if role == "assistant" else given(role, turn))
            else:
                turn.append((mark, text))
        return messages, tools

    def _spans(self, messages: Sequence[Message], before: list[int]) -> list[Span]:
        """A span per message; `before` belongs to the first one, the opening of the policy's turn to the last."""
        spans = [Span(message["role"], self._turn(message)) for message in messages]
        spans[0].ids[:0] = before
        spans[-1].ids.extend([*spaces(TURN_TOKENS), Mark.ASSISTANT.value])
        return spans

    def _turn(self, message: Message) -> list[int]:
        role = message["role"]
        if role not in ROLES:
            raise ValueError(f"a message has role {role!r}: choose one of {', '.join(ROLES)}")
        ids = [*spaces(TURN_TOKENS), ROLES[role].value, *self.encode(message["content"])]
        if role == "tool":
            ids += [Mark.ANSWERS.value, *self.encode(str(message.get("tool_call_id", "")))]
        return [*ids, Mark.END.value]


def spaces(n: int) -> list[int]:
    return [Mark.SPACE.value] * n


@lru_cache(maxsize=1 << 16)
def spell(token: int) -> bytes:
    """The piece of text that an id is."""
    return token.to_bytes((token.bit_length() + 7) // 8)[1:]


def parts(ids: Iterable[int]) -> Iterator[Part]:
    """Each mark with the text behind it; text before the first mark has none."""
    mark: Mark | None = None
    text = bytearray()
    for token in ids:
        if token in MARKS:
            if mark is not None or text:
                yield mark, text.decode(errors="replace")
            mark, text = MARKS[token], bytearray()
        else:
            text += spell(token)
    if mark is not None or text:
        yield mark, text.decode(errors="replace")


def reply_of(turn: Iterable[Part], cut: bool = False) -> Reply:
    """The reply that a turn's parts say. A call that was cut has no whole arguments, and so is malformed."""
    reply = Reply("", finish="length" if cut else "stop")
    for mark, text in turn:
        if mark == Mark.THINKING:
            reply.thinking += text
        elif mark == Mark.CALL:
            reply.calls.append(SpokenCall("", text, ""))
        elif mark == Mark.CALL_ID:
            reply.calls[-1] = reply.calls[-1]._replace(id=text)
        elif mark == Mark.ARGUMENTS:
            reply.calls[-1] = reply.calls[-1]._replace(arguments=text)
        elif mark in (Mark.CONTENT, None):
            reply.text += text
    return reply


def given(role: str, turn: Iterable[Part]) -> Message:
    """A message of the environment's."""
    found = dict(turn)
    answers = {"tool_call_id": found[Mark.ANSWERS]} if Mark.ANSWERS in found else {}
    return {"role": role, "content": found[None], **answers}  # type: ignore[typeddict-item]
