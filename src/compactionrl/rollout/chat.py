"""Chat turns <-> token ids, exactly, over the `renderers` package.

A window only ever grows: `prompt` renders its beginning, `extend` gives the ids that follow a sampled response. What was
sampled is never rendered again, so the ids in the ledger are the ids the sampler saw and returned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from compactionrl.config import ConfigError
from compactionrl.environments.protocol import Message, Response, ToolCall
from compactionrl.rollout.plain_text import PlainTextTokenizer

CUT_MARK = " [... {n} tokens cut ...] "
OWN = {
    "chatml": "compactionrl.rollout.chatml:ChatMLRenderer",
    "default": "compactionrl.rollout.template:TemplateRenderer",
}
"""Formats of ours, beside those that `renderers` knows."""
MAX_NAME = 64
"""Characters of a tool's name, or of a call's id, at most; longer ones are malformed."""
PROBLEMS = {
    "invalid_json": "it is no valid JSON",
    "unclosed_block": "it is not closed",
    "missing_name": "it names no tool",
    "malformed_structure": "it is not built as a call",
}
"""What is wrong with a call of each status that `renderers` gives."""


@dataclass(frozen=True)
class Span:
    """Ids of one turn, as a chat format renders it."""

    role: str
    ids: list[int]


def length(spans: Sequence[Span]) -> int:
    return sum(len(span.ids) for span in spans)


class ChatFormat:
    """One model family's chat format.

    `tokenizer`: a fast Hugging Face tokenizer. `renderer`: a name known to `renderers`, "chatml", "default" (any chat
    template; warns of what it cannot guarantee), the import path `module:Class` of such a renderer, or "auto": the format
    that renders as the tokenizer's chat template does. Raises ConfigError for a format that cannot extend a window token
    for token.
    """

    approximate = False
    """Whether its ids are pieces of a text, and their number an estimate (`rollout.text_chat`)."""

    def __init__(self, tokenizer: Any, renderer: str = "qwen3", options: dict[str, Any] | None = None) -> None:
        self.tokenizer = PlainTextTokenizer(tokenizer)
        self._renderer = create_renderer(self.tokenizer, renderer, options or {})
        self.stop_token_ids: list[int] = self._renderer.get_stop_token_ids()
        self._stops = frozenset(self.stop_token_ids)
        known = self.tokenizer.special_tokens
        self._thinking_marks = frozenset(known[mark] for mark in ("<think>", "</think>") if mark in known)
        self._check()

    def prompt(self, messages: Sequence[Message], tools: list[Any] | None = None) -> list[Span]:
        """The beginning of a window: all messages, then what opens the policy's turn."""
        described = self._plain(tools)
        rendered = self._renderer.render(self._clean(messages), tools=described, add_generation_prompt=True)
        return _spans(rendered.token_ids, rendered.message_indices, [m["role"] for m in messages])

    def extend(
        self,
        opening: Sequence[int],
        response: Sequence[int],
        messages: Sequence[Message],
        tools: list[Any] | None = None,
    ) -> list[Span]:
        """What follows a sampled response: its closing tokens if it was cut, the messages, the policy's next opening.

        `opening`: context ids right before the response (its turn's opening suffices). Raises RuntimeError where the
        format cannot extend without changing what was sampled.
        """
        bridge, cleaned = self._renderer.bridge_to_next_turn, self._clean(messages)
        before = [*opening, *response]
        rendered = bridge(list(opening), list(response), cleaned, tools=tools)
        if rendered is None and response and response[-1] in self._stops:
            # A format refuses a turn that ended inside its thinking. The turn is over all the same: what follows its stop
            # token is what follows that token behind thinking that was closed.
            closed = [*self._thinking_end(opening, response[:-1], tools), response[-1]]
            before = [*opening, *closed]
            rendered = bridge(list(opening), closed, cleaned, tools=tools)
        if rendered is None or rendered.token_ids[: len(before)] != before:
            raise RuntimeError(
                "the chat format cannot extend this window token for token; choose another model.renderer"
            )
        n = len(before)
        return _spans(rendered.token_ids[n:], rendered.message_indices[n:], [m["role"] for m in messages])

    def parse(
        self, opening: Sequence[int], response: Sequence[int], cut: bool, tools: list[Any] | None = None
    ) -> Response:
        """The structure of a sampled response; strings that look like turns or calls inside its thinking stay text."""
        try:
            parsed = self._renderer.parse_response(list(response), tools=tools, prompt_ids=list(opening))
        except (ValueError, RecursionError) as error:
            # Arguments that no JSON parser takes (thousands of digits or brackets) are the policy's doing, no breakdown.
            return Response("", "", [ToolCall("call_0", "", {}, f"Malformed call: {error}")], cut)
        calls = [_tool_call(index, call) for index, call in enumerate(parsed.tool_calls)]
        text, thinking = parsed.content, parsed.reasoning_content or ""
        if self._thinking_marks and self._thinking_marks.isdisjoint([*opening, *response]):
            # GLM's parser takes a response for thinking until that is closed, even if it was never opened.
            text, thinking = thinking + text, ""
        return Response(text.strip(), thinking.strip(), calls, cut)

    def endings(self) -> list[list[int]]:
        """Ways a response can end, as far as `extend` tells them apart: closed, cut, cut inside its thinking."""
        plain, think = self.encode("a"), self.tokenizer.special_tokens.get("<think>")
        return [[self.stop_token_ids[0]], plain, *([[think, *plain]] if think is not None else [])]

    def encode(self, text: str) -> list[int]:
        """Plain text to ids; never a special token."""
        return self.tokenizer.encode(self.tokenizer.neutralise(text))

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids))

    def clip(self, text: str, ids: Sequence[int], keep: int) -> str:
        """`text`, its middle cut out so that about `keep` of its tokens `ids` are left, with a mark that says how many are gone.

        Nothing is cut that is no longer than the mark.
        """
        mark = CUT_MARK.format(n=len(ids) - keep)
        if len(ids) <= keep + len(self.encode(mark)):
            return text
        return self.decode(ids[: (keep + 1) // 2]) + mark + self.decode(ids[len(ids) - keep // 2 :])

    def _clean(self, messages: Sequence[Message]) -> list[Any]:
        """Messages whose text cannot spell a special token; a tool's answer names what the policy called, its text too."""
        return [{**self._plain(message), "role": message["role"]} for message in messages]

    def _plain(self, value: Any) -> Any:
        """JSON, such as the description of a tool, whose strings cannot spell a special token."""
        if isinstance(value, str):
            return self.tokenizer.neutralise(value)
        if isinstance(value, dict):
            return {self._plain(key): self._plain(item) for key, item in value.items()}
        return [self._plain(item) for item in value] if isinstance(value, list | tuple) else value

    def _thinking_end(self, opening: Sequence[int], thinking: Sequence[int], tools: list[Any] | None) -> list[int]:
        """The token with which the format closes thinking that was cut: the first one it adds."""
        probe = [{"role": "user", "content": ""}]
        cut = self._renderer.bridge_to_next_turn(list(opening), list(thinking), probe, tools=tools)
        n = len(opening) + len(thinking)
        return cut.token_ids[n : n + 1] if cut else []

    def _check(self) -> None:
        probe: list[Message] = [{"role": "user", "content": "a"}]
        opening = [i for span in self.prompt(probe) for i in span.ids]
        for response in ([self.stop_token_ids[0]], [opening[-1], opening[-1]]):
            try:
                self.extend(opening, response, probe)
            except RuntimeError as error:
                raise ConfigError(f"model.renderer: {error}") from None


def _tool_call(index: int, call: Any) -> ToolCall:
    """A call as the renderer parsed it. Names and ids come back in the tool's answer, so they have to be short."""
    name = call.name if isinstance(call.name, str) and len(call.name) <= MAX_NAME and call.name.isascii() else ""
    short = isinstance(call.id, str) and 0 < len(call.id) <= MAX_NAME and call.id.isascii()
    arguments = call.arguments if isinstance(call.arguments, dict) else None
    status = str(call.status)
    if (status == "invalid_json" and arguments is not None) or status == "unknown_tool":
        # An argument that stands in the text as it is, of a type that the tool does not declare; a name that no tool has.
        status = "ok"
    wrong = PROBLEMS.get(status)
    if wrong is None and not name:
        wrong = f"its name is missing, no plain text, or longer than {MAX_NAME} characters"
    if wrong is None and arguments is None:
        wrong = "its arguments are no JSON object"
    return ToolCall(
        id=call.id if short else f"call_{index}",
        name=name,
        arguments=arguments or {},
        error=None if wrong is None else f"Malformed call: {wrong}",
    )


def _spans(ids: list[int], indices: list[int], roles: list[str]) -> list[Span]:
    """A span per message, also for one that adds no token. Ids of no message belong to the one before, or to the first."""
    if len(ids) != len(indices):
        raise RuntimeError("the chat format does not say which message each token is of; choose another model.renderer")
    spans, owner, start = [Span(role, []) for role in roles], 0, 0
    for index, run in groupby(indices):
        if 0 <= index < owner:
            raise RuntimeError("the chat format does not keep the messages' order; choose another model.renderer")
        owner, end = max(owner, index), start + len(list(run))
        spans[owner].ids.extend(ids[start:end])
        start = end
    return spans


def create_renderer(tokenizer: PlainTextTokenizer, name: str, options: dict[str, Any]) -> Any:
    # `renderers` takes half a second to import: only who renders pays for it.
    from pydantic import ValidationError
    from renderers import CustomRendererConfig, config_from_name
    from renderers import create_renderer as create

    from compactionrl.rollout.recognise import recognise

    if options.get("thinking_retention", "all") != "all":
        raise ConfigError(
            "model.renderer_options.thinking_retention must be 'all': a window is append-only, so thinking that was "
            "sampled cannot be taken out of it again"
        )
    name = recognise(tokenizer) if name == "auto" else name
    path = OWN.get(name, name)
    try:
        kind: Any = CustomRendererConfig if ":" in path else type(config_from_name(path))
        options = {"thinking_retention": "all", **options, **({"import_path": path} if ":" in path else {})}
        config = kind(**options)
    except ValidationError as error:
        raise ConfigError(f"model.renderer_options: {error}") from None
    except (ValueError, ImportError, TypeError) as error:
        raise ConfigError(f"model.renderer: {error}") from None
    try:
        return create(tokenizer, config)
    except (ValueError, AssertionError) as error:
        raise ConfigError(
            f"model.renderer {name!r} does not go with this tokenizer: {error}; name another, or 'auto', which finds the format "
            "of the tokenizer's chat template"
        ) from None
