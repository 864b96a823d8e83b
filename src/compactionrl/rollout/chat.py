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


@dataclass(frozen=True)
class Span:
    """Ids of one turn, as a chat format renders it."""

    role: str
    ids: list[int]


def length(spans: Sequence[Span]) -> int:
    return sum(len(span.ids) for span in spans)


class ChatFormat:
    """One model family's chat format.

    `tokenizer`: a fast Hugging Face tokenizer. `renderer`: a name known to `renderers`. Raises ConfigError for a format
    that cannot extend a window token for token.
    """

    def __init__(self, tokenizer: Any, renderer: str = "qwen3", options: dict[str, Any] | None = None) -> None:
        self.tokenizer = PlainTextTokenizer(tokenizer)
        self._renderer = _create_renderer(self.tokenizer, renderer, options or {})
        self.stop_token_ids: list[int] = self._renderer.get_stop_token_ids()
        self._stops = frozenset(self.stop_token_ids)
        self._check()

    def prompt(self, messages: Sequence[Message], tools: list[Any] | None = None) -> list[Span]:
        """The beginning of a window: all messages, then what opens the policy's turn."""
        rendered = self._renderer.render(self._clean(messages), tools=tools, add_generation_prompt=True)
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
        before = [*opening, *response]
        cleaned = self._clean(messages)
        rendered = self._renderer.bridge_to_next_turn(list(opening), list(response), cleaned, tools=tools)
        if rendered is None and response and response[-1] in self._stops:
            # Some formats refuse a turn that ended inside its thinking. The turn is closed all the same: what comes
            # after its stop token is what comes after any closed turn.
            closed = [*opening, response[-1]]
            rendered = self._renderer.bridge_to_next_turn(list(opening), [response[-1]], cleaned, tools=tools)
            before = closed
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
        parsed = self._renderer.parse_response(list(response), tools=tools, prompt_ids=list(opening))
        calls = [
            ToolCall(
                id=call.id or f"call_{index}",
                name=call.name or "",
                arguments=call.arguments if isinstance(call.arguments, dict) else {},
                error=None
                if call.status == "ok" and isinstance(call.arguments, dict)
                else f"malformed call: {call.status}",
            )
            for index, call in enumerate(parsed.tool_calls)
        ]
        return Response(parsed.content, parsed.reasoning_content or "", calls, cut)

    def encode(self, text: str) -> list[int]:
        """Plain text to ids; never a special token."""
        return self.tokenizer.encode(self.tokenizer.neutralise(text))

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids))

    def clip(self, text: str, keep: int) -> str:
        """`text` with its middle cut out so that about `keep` tokens of it are left, and a mark that says how many are gone."""
        ids = self.encode(text)
        if len(ids) <= keep:
            return text
        head, tail = (keep + 1) // 2, keep // 2
        end = self.decode(ids[len(ids) - tail :]) if tail else ""
        return self.decode(ids[:head]) + CUT_MARK.format(n=len(ids) - keep) + end

    def _clean(self, messages: Sequence[Message]) -> list[Any]:
        return [{**message, "content": self.tokenizer.neutralise(message["content"])} for message in messages]

    def _check(self) -> None:
        probe: list[Message] = [{"role": "user", "content": "a"}]
        opening = [i for span in self.prompt(probe) for i in span.ids]
        for response in ([self.stop_token_ids[0]], [opening[-1], opening[-1]]):
            try:
                self.extend(opening, response, probe)
            except RuntimeError as error:
                raise ConfigError(f"model.renderer: {error}") from None


def _spans(ids: list[int], indices: list[int], roles: list[str]) -> list[Span]:
    """Group ids by message; ids between messages belong to the message before, or to the first one."""
    owner, owners = 0, []
    for index in indices:
        owner = index if index >= 0 else owner
        owners.append(owner)
    return [
        Span(roles[index], [token for _, token in group])
        for index, group in groupby(zip(owners, ids, strict=True), key=lambda pair: pair[0])
    ]


def _create_renderer(tokenizer: PlainTextTokenizer, name: str, options: dict[str, Any]) -> Any:
    # `renderers` takes half a second to import: only who renders pays for it.
    from pydantic import ValidationError
    from renderers import config_from_name, create_renderer

    if options.get("thinking_retention", "all") != "all":
        raise ConfigError(
            "model.renderer_options.thinking_retention must be 'all': a window is append-only, so thinking that was "
            "sampled cannot be taken out of it again"
        )
    try:
        default = config_from_name(name)
    except ValueError as error:
        raise ConfigError(f"model.renderer: {error}") from None
    if default is None:
        raise ConfigError("model.renderer 'auto' would guess from a folder name: name the format")
    try:
        config = type(default)(**options, **({} if "thinking_retention" in options else {"thinking_retention": "all"}))
    except ValidationError as error:
        raise ConfigError(f"model.renderer_options: {error}") from None
    return create_renderer(tokenizer, config)
