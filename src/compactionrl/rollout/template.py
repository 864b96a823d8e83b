"""Any chat template as a chat format for `renderers`, for families that nobody wrote a renderer for: model.renderer "default".

What follows a turn is read off the template: what it puts behind the assistant's turn of a conversation of one exchange. So
windows are as exact as with any other format, but they are the template's own only if it renders a turn the same
wherever it stands.
"""

from __future__ import annotations

import warnings
from typing import Any

from pydantic import ConfigDict
from renderers.base import ParsedResponse, RenderedTokens
from renderers.configs import BaseRendererConfig

from compactionrl.rollout.chatml import THINKING
from compactionrl.rollout.plain_text import PlainTextTokenizer

STATEMENT = (
    "model.renderer 'default' reads the format off the tokenizer's chat template. Windows stay append-only, with the very ids "
    "that were sampled, but three things are not guaranteed: that a long conversation looks as the template would render it "
    "at once, that a response's calls of native tools are recognised (they stay text), and that strings which are no "
    "special tokens but open a turn in this format are harmless in an observation. Name the model's format if there is one"
)
SAID = "what was sampled"
"""Stands for the response in the conversation that is rendered to see what follows one."""
USER = {"role": "user", "content": "a"}


class TemplateConfig(BaseRendererConfig):
    """Extra fields are given to the chat template."""

    model_config = ConfigDict(frozen=True, extra="allow")
    name: str = "custom"


class TemplateRenderer:
    config_class = TemplateConfig
    is_prefix_stable = False

    def __init__(self, tokenizer: PlainTextTokenizer, config: TemplateConfig | None = None) -> None:
        self.config = config or TemplateConfig()
        self._tokenizer = tokenizer
        if tokenizer.chat_template is None:
            raise ValueError("it has no chat template")
        behind = self._behind([USER, USER])  # as a request for a summary behind an observation
        positions = {behind.find(name): name for name in sorted(tokenizer.special_tokens, key=len) if name in behind}
        if not positions:
            raise ValueError(f"no special token ends a turn in its chat template; behind a response stands {behind!r}")
        self._close = positions[min(positions)]
        stops = [tokenizer.special_tokens[self._close], tokenizer.eos_token_id]
        self._stops = list(dict.fromkeys(stop for stop in stops if stop is not None))
        warnings.warn(STATEMENT, stacklevel=2)

    def get_stop_token_ids(self) -> list[int]:
        return self._stops

    def render(
        self, messages: list[Any], *, tools: list[Any] | None = None, add_generation_prompt: bool = False
    ) -> RenderedTokens:
        """Which message a token belongs to is not known: all of them count as the last one's."""
        text = self._text(messages, tools=tools, add_generation_prompt=add_generation_prompt)
        return self._encode([], text, len(messages) - 1)

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: list[Any],
        **_: Any,
    ) -> RenderedTokens:
        before = [*previous_prompt_ids, *previous_completion_ids]
        text = self._behind(new_messages)
        if before[-1] in self._stops:
            text = text.partition(self._close)[2]
        return self._encode(before, text, len(new_messages) - 1)

    def parse_response(self, token_ids: list[int], **_: Any) -> ParsedResponse:
        end = next((i for i, token in enumerate(token_ids) if token in self._stops), len(token_ids))
        text = self._tokenizer.decode(token_ids[:end])
        thinking = THINKING.match(text)
        return ParsedResponse(
            content=text[thinking.end() if thinking else 0 :].strip(),
            reasoning_content=thinking[1].strip() if thinking else None,
        )

    def _behind(self, messages: list[Any]) -> str:
        """What the template puts behind a response that `messages` follow."""
        said = {"role": "assistant", "content": SAID}
        _, found, behind = self._text([USER, said, *messages], add_generation_prompt=True).partition(SAID)
        if not found:
            raise ValueError("its chat template leaves out what the assistant said")
        return behind

    def _text(self, messages: list[Any], **options: Any) -> str:
        from jinja2 import TemplateError

        try:
            return self._tokenizer.apply_chat_template(messages, **(self.config.model_extra or {}), **options)
        except TemplateError as error:
            roles = ", ".join(message["role"] for message in messages)
            raise ValueError(f"its chat template refuses messages with the roles {roles}: {error}") from None

    def _encode(self, before: list[int], text: str, owner: int) -> RenderedTokens:
        ids = self._tokenizer.encode(text)
        return RenderedTokens(token_ids=[*before, *ids], message_indices=[-1] * len(before) + [owner] * len(ids))
