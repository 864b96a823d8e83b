"""Which chat format a tokenizer's template is: the one that renders conversations as the template does, id for id."""

from __future__ import annotations

from typing import Any, get_args

from compactionrl.config import ConfigError
from compactionrl.rollout.plain_text import PlainTextTokenizer

TOOL = {
    "type": "function",
    "function": {
        "name": "run",
        "description": "Run a command.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
    },
}
SYSTEM, USER, LATER = (
    {"role": role, "content": text} for role, text in (("system", "s"), ("user", "a"), ("user", "c"))
)
SAID: dict[str, Any] = {"role": "assistant", "content": "b"}
THOUGHT = {**SAID, "reasoning_content": "r"}


def _calling(said: dict[str, Any], *commands: str) -> list[Any]:
    calls = [
        {"id": f"c{i}", "type": "function", "function": {"name": "run", "arguments": {"command": command}}}
        for i, command in enumerate(commands)
    ]
    answers = [{"role": "tool", "content": f"t{i}", "tool_call_id": f"c{i}", "name": "run"} for i in range(len(calls))]
    return [{**said, "tool_calls": calls}, *answers]


LEFT_OUT = {"auto", "custom", "default", "gpt-oss"}
"""No formats of their own; gpt-oss downloads its vocabulary when it is made."""
PLAIN = [[USER], [SYSTEM, USER], [USER, SAID, LATER], [USER, THOUGHT, LATER]]
WITH_TOOLS = [
    [SYSTEM, USER],
    [USER, *_calling(SAID, "é"), LATER],
    [USER, *_calling(SAID, "x", "y")],
    [USER, *_calling(THOUGHT, "x")],
]


def recognise(tokenizer: PlainTextTokenizer) -> str:
    """The name of the one format that fits. Raises ConfigError if none does, or several."""
    from renderers import RendererConfig

    from compactionrl.rollout.chat import create_renderer

    if tokenizer.chat_template is None:
        raise ConfigError("model.renderer 'auto' needs a tokenizer with a chat template; name the format")
    expected = _expected(tokenizer)

    def fits(name: str) -> bool:
        try:
            renderer = create_renderer(tokenizer, name, {})
        except ConfigError:
            return False
        return all(_render(renderer, messages, tools) == ids for messages, tools, ids in expected)

    known = {config.model_fields["name"].default for config in get_args(get_args(RendererConfig)[0])}
    # A family of its own goes before the plain format that it builds on.
    fitting = [name for name in sorted(known - LEFT_OUT) if fits(name)] or [name for name in ["chatml"] if fits(name)]
    if len(fitting) != 1:
        found = f"{', '.join(fitting)} all do" if fitting else "none does"
        raise ConfigError(
            f"model.renderer 'auto': of the known formats exactly one must render conversations as this tokenizer's chat "
            f"template does, but {found}; name the format"
        )
    return fitting[0]


def _expected(tokenizer: PlainTextTokenizer) -> list[tuple[list[Any], list[Any] | None, list[int]]]:
    """Conversations and what the template makes of them. It need not take tools, system prompts or thinking."""
    probes = [(messages, None) for messages in PLAIN]
    if _template(tokenizer, [USER], [TOOL]) not in (None, _template(tokenizer, [USER], None)):
        probes += [(messages, [TOOL]) for messages in WITH_TOOLS]  # type: ignore[misc]
    if _template(tokenizer, [USER, THOUGHT], None) == _template(tokenizer, [USER, SAID], None):
        # A template that leaves thinking out of every turn does not say how it is written.
        probes = [
            (messages, tools) for messages, tools in probes if not any("reasoning_content" in m for m in messages)
        ]
    rendered = [(messages, tools, _template(tokenizer, messages, tools)) for messages, tools in probes]
    return [(messages, tools, ids) for messages, tools, ids in rendered if ids is not None]


def _template(tokenizer: PlainTextTokenizer, messages: list[Any], tools: list[Any] | None) -> list[int] | None:
    from jinja2 import TemplateError

    try:
        return tokenizer.encode(tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True))
    except TemplateError:
        return None


def _render(renderer: Any, messages: list[Any], tools: list[Any] | None) -> list[int] | None:
    try:
        return renderer.render(messages, tools=tools, add_generation_prompt=True).token_ids
    except (ValueError, TypeError):
        return None
