"""Plain ChatML as a chat format for `renderers`: <|im_start|>role, a line break, text, <|im_end|>, a line break.

What stands before the first user turn (a default system prompt, the tools where the tokenizer's template takes them) is the
template's own text. Thinking (<think>) and tool calls follow Hermes and Qwen, and are read in the decoded text: in many
ChatML vocabularies their marks are no tokens of their own. SmolLM2's list of calls in one block is read as well. An
assistant's messages are written as they are read, whether or not the template writes thinking and calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from renderers.base import ParsedResponse, ParsedToolCall, RenderedTokens, ToolCallParseStatus
from renderers.configs import BaseRendererConfig

from compactionrl.rollout.plain_text import PlainTextTokenizer

TOOLS = """\
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""
"""What Qwen 2.5 and 3 say, after Hermes; for a template that does not mention tools."""

THINKING = re.compile(r"\s*<think>(.*?)(?:</think>|\Z)", re.DOTALL)
CALL = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)

USER = {"role": "user", "content": "a"}
Piece = tuple[str, int]
"""Text and the index of its message; -1: the format's own."""


class ChatMLConfig(BaseRendererConfig):
    name: str = "custom"


class ChatMLRenderer:
    config_class = ChatMLConfig
    is_prefix_stable = True

    def __init__(self, tokenizer: PlainTextTokenizer, config: ChatMLConfig | None = None) -> None:
        self.config = config or ChatMLConfig()
        self._tokenizer = tokenizer
        known = tokenizer.special_tokens
        if "<|im_start|>" not in known or "<|im_end|>" not in known:
            raise ValueError("ChatML needs the special tokens <|im_start|> and <|im_end|>")
        self._stops = [known[name] for name in ("<|im_end|>", "<|endoftext|>") if name in known]
        self._before_user(None, None)

    def get_stop_token_ids(self) -> list[int]:
        return self._stops

    def render(
        self, messages: list[Any], *, tools: list[Any] | None = None, add_generation_prompt: bool = False
    ) -> RenderedTokens:
        system = messages[0]["content"] if messages[0]["role"] == "system" else None
        first = int(system is not None)
        pieces = [(self._before_user(system, tools), 0 if first else -1), *_turns(messages[first:], first)]
        return self._encode([], [*pieces, (_turn("assistant"), -1)] if add_generation_prompt else pieces)

    def bridge_to_next_turn(
        self, previous_prompt_ids: list[int], previous_completion_ids: list[int], new_messages: list[Any], **_: Any
    ) -> RenderedTokens:
        """Thinking that was cut stays open: the turn ends all the same."""
        before = [*previous_prompt_ids, *previous_completion_ids]
        close = "\n" if before[-1] in self._stops else "<|im_end|>\n"
        return self._encode(before, [(close, -1), *_turns(new_messages), (_turn("assistant"), -1)])

    def parse_response(self, token_ids: list[int], **_: Any) -> ParsedResponse:
        end = next((i for i, token in enumerate(token_ids) if token in self._stops), len(token_ids))
        text = self._tokenizer.decode(token_ids[:end])
        thinking = THINKING.match(text)
        if thinking:
            text = text[thinking.end() :]
        calls = [call for block in CALL.finditer(text) for call in _calls(*block.groups())]
        return ParsedResponse(
            content=CALL.sub("", text).strip(),
            reasoning_content=thinking[1].strip() if thinking else None,
            tool_calls=calls,
            reasoning_complete=thinking is None or thinking[0].endswith("</think>"),
        )

    def _before_user(self, system: str | None, tools: list[Any] | None) -> str:
        """What stands before the first user turn. Raises ValueError for a template that is no ChatML."""
        if tools and not self._takes_tools():
            described = TOOLS.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
            return self._before_user(f"{system}\n\n{described}" if system else described, None)
        given = [] if system is None else [{"role": "system", "content": system}]
        text = self._template([*given, USER], tools)
        if not text.endswith(_turn(**USER)):
            raise ValueError(f"the tokenizer's chat template is no plain ChatML: it makes {text!r} of the user's 'a'")
        return text.removesuffix(_turn(**USER))

    def _takes_tools(self) -> bool:
        from jinja2 import TemplateError

        try:
            return self._template([USER], [{"type": "function", "function": {"name": "a"}}]) != self._template([USER])
        except TemplateError:
            return False

    def _template(self, messages: list[Any], tools: list[Any] | None = None) -> str:
        if self._tokenizer.chat_template is None:
            return "".join(_turn(**message) for message in messages)
        return self._tokenizer.apply_chat_template(messages, tools=tools)

    def _encode(self, before: list[int], pieces: Sequence[Piece]) -> RenderedTokens:
        ids, owners = list(before), [-1] * len(before)
        for text, index in pieces:
            encoded = self._tokenizer.encode(text)
            ids += encoded
            owners += [index] * len(encoded)
        return RenderedTokens(token_ids=ids, message_indices=owners)


def _turn(role: str, content: str | None = None) -> str:
    """A whole turn, or the opening of one."""
    return f"<|im_start|>{role}\n" + ("" if content is None else f"{content}<|im_end|>\n")


def _turns(messages: Sequence[Any], first: int = 0) -> list[Piece]:
    """The messages' text. Answers to the calls of one response share one user turn."""
    roles = [None, *(message["role"] for message in messages), None]
    pieces = []
    for index, (message, (before, role, after)) in enumerate(zip(messages, _triples(roles), strict=True)):
        text = _turn(role, _said(message) if role == "assistant" else message["content"])
        if role == "tool":
            text = _turn("user") if before != "tool" else ""
            text += f"<tool_response>\n{message['content']}\n</tool_response>"
            text += "\n" if after == "tool" else "<|im_end|>\n"
        pieces.append((text, first + index))
    return pieces


def _said(message: Any) -> str:
    """What an assistant said, thinking and calls included, as Qwen 3 writes it: `parse_response` reads the same again."""
    thinking, calls = message.get("reasoning_content"), [_written(call) for call in message.get("tool_calls") or ()]
    said = "\n".join([*([message["content"]] if message["content"] else []), *calls])
    return f"<think>\n{thinking}\n</think>\n\n{said}" if thinking else said


def _written(call: Any) -> str:
    function = call["function"]
    arguments = function["arguments"]
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    # In JSON it can only stand within a string, where a slash may be escaped: it must not end the call.
    arguments = arguments.replace("</tool_call>", "<\\/tool_call>")
    name = json.dumps(function["name"], ensure_ascii=False)
    return f'<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>'


def _triples(items: list[Any]) -> list[tuple[Any, Any, Any]]:
    return [(a, b, c) for (a, b), (_, c) in pairwise(pairwise(items))]


def _calls(text: str, close: str) -> list[ParsedToolCall]:
    """The calls of one block: one JSON object, or a list of them."""
    if not close:
        return [ParsedToolCall(text, status=ToolCallParseStatus.UNCLOSED_BLOCK)]
    try:
        parsed = json.loads(text)
    except json.JSONDecodeError:
        return [ParsedToolCall(text, status=ToolCallParseStatus.INVALID_JSON)]
    return [_call(text, item) for item in (parsed if isinstance(parsed, list) else [parsed])]


def _call(text: str, call: Any) -> ParsedToolCall:
    if not isinstance(call, dict):
        return ParsedToolCall(text, status=ToolCallParseStatus.MALFORMED_STRUCTURE)
    if not call.get("name"):
        return ParsedToolCall(text, status=ToolCallParseStatus.MISSING_NAME)
    return ParsedToolCall(text, call["name"], call.get("arguments", {}))
