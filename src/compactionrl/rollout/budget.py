"""ContextBudget: how many tokens may be sampled where (E7, and the reserve that keeps C a hard bound)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from compactionrl.config import ConfigError, ContextConfig
from compactionrl.environments.protocol import Message
from compactionrl.rollout.chat import MAX_NAME, ChatFormat, Span, length


class TaskDoesNotFit(Exception):
    """The task cannot be done within the budget, whatever the policy does. Raised before anything is sampled."""


@dataclass(frozen=True)
class ContextBudget:
    """C, T_comp, the limits of responses and summaries, and `reserve`: what a compaction needs at the end of a window.

    reserve = what the format adds after a cut response + the placeholder turn + the longest framed summary request +
    summary_tokens. While a compaction is left, it stays free at every request.
    """

    context: ContextConfig
    reserve: int

    @classmethod
    def measure(cls, context: ContextConfig, chat: ChatFormat, tools: list[Any] | None = None) -> ContextBudget:
        """Measure the reserve with the chat format (once). Raises ConfigError if T_comp leaves no room for it."""
        return _measure(context, chat, json.dumps(tools)) if context.max_compactions else cls(context, 0)

    def triggers(self, used: int) -> bool:
        """E7: C - |h| < T_comp."""
        return self.context.budget - used < self.context.threshold

    def can_act(self, used: int, compactions_left: int) -> bool:
        """Whether a response of min_response tokens, and the compaction behind it if one is left, fit behind `used` tokens."""
        return self.response_cap(used, compactions_left) >= self.context.min_response

    def response_cap(self, used: int, compactions_left: int) -> int:
        """Tokens that a response may have after `used` context tokens; what a compaction needs stays free if one is left."""
        free = self.context.budget - used - (self.reserve if compactions_left else 0)
        return min(self.context.response_tokens, free)

    def summary_fits(self, used: int) -> bool:
        """Whether a whole summary fits behind `used` tokens (its request included)."""
        return used + self.context.summary_tokens <= self.context.budget

    def check_task(self, prompt: Sequence[Span], resume: Sequence[Span]) -> None:
        """Raise TaskDoesNotFit if `prompt` (s + u) or `resume` (s + framed empty summary, + u if kept) is too long."""
        context = self.context
        if not context.max_compactions:
            if not self.can_act(length(prompt), 0):
                raise TaskDoesNotFit(
                    f"task does not fit: its prompt has {length(prompt)} tokens, which leaves less than "
                    f"context.min_response ({context.min_response}) of context.budget ({context.budget}): raise the budget"
                )
            return
        most = context.budget - context.threshold - context.min_response
        for name, used in (
            ("its prompt", length(prompt)),
            ("its shortest resumed context", length(resume) + context.summary_tokens),
        ):
            if used > most:
                raise TaskDoesNotFit(
                    f"task does not fit: {name} has {used} tokens, more than context.budget - threshold - min_response = "
                    f"{most}; raise the budget, lower threshold or summary_tokens, or shorten the task"
                )


@lru_cache(maxsize=64)
def _measure(context: ContextConfig, chat: ChatFormat, tools_json: str) -> ContextBudget:
    tools = json.loads(tools_json)
    probe: list[Message] = [{"role": "user", "content": "a"}]
    opening = [i for span in chat.prompt(probe, tools) for i in span.ids]
    framed = max(
        length(chat.extend(opening, response, [*_placeholders(context, calls), request], tools))
        for response in chat.endings()
        for calls in ((0, context.max_calls) if tools else (0,))
        for request in requests(context)
    )
    reserve = framed + context.summary_tokens
    if context.threshold < reserve + context.min_response:
        raise ConfigError(
            f"context.threshold ({context.threshold}) must be at least {reserve + context.min_response}: a framed summary "
            f"request ({framed} tokens) + context.summary_tokens ({context.summary_tokens}) + context.min_response "
            f"({context.min_response}); raise the threshold, lower summary_tokens or shorten the request"
        )
    return ContextBudget(context, reserve)


def requests(context: ContextConfig) -> list[Message]:
    """q_sum (E8) and the request after a summary that was no good."""
    return [{"role": "user", "content": text} for text in (context.summary_request, context.retry_request)]


def _placeholders(context: ContextConfig, calls: int) -> list[Message]:
    """What answers a response whose real observation did not fit: one message per native call, else one user message."""
    if not calls:
        return [{"role": "user", "content": context.placeholder}]
    # Some formats repeat the call's name and id, which the policy chooses: one token per character is the most they take.
    longest = ("7_" * MAX_NAME)[:MAX_NAME]
    message = {"role": "tool", "content": context.placeholder, "tool_call_id": longest, "name": longest}
    return [message] * calls  # type: ignore[list-item]
