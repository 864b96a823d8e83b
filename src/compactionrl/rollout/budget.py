"""ContextBudget: how many tokens may be sampled where (E7, and the reserve that keeps C a hard bound)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from compactionrl.config import ConfigError, ContextConfig
from compactionrl.environments.protocol import Message
from compactionrl.rollout.chat import MAX_NAME, ChatFormat, Span, length
from compactionrl.rollout.handoff import UNEXECUTED, strategy_of
from compactionrl.rollout.strategy import Strategy, filled, requests

__all__ = ["ContextBudget", "TaskDoesNotFit", "requests"]


class TaskDoesNotFit(Exception):
    """The task cannot be done within the budget, whatever the policy does. Raised before anything is sampled."""


@dataclass(frozen=True)
class ContextBudget:
    """C, T_comp, the limits of responses and summaries, and `reserve`: what a compaction needs at the end of a window.

    reserve = what the format adds after a cut response + the placeholder turn + the longest framed summary request +
    summary_tokens + `behind`: what else the strategy writes there. While a compaction is left, it stays free at every request.
    """

    context: ContextConfig
    reserve: int
    behind: int = 0

    @classmethod
    def measure(
        cls, context: ContextConfig, chat: ChatFormat, tools: list[Any] | None = None, task: str = ""
    ) -> ContextBudget:
        """Measure the reserve with the chat format (once), for a task that says `task`.

        Raises ConfigError if T_comp leaves no room for it, TaskDoesNotFit if that is the task's doing.
        """
        if not context.max_compactions:
            return cls(context, 0)
        strategy = strategy_of(context, task)
        budget = _measure(strategy, chat, json.dumps(tools))
        least, framed = budget.reserve + context.min_response, budget.reserve - context.written
        if context.threshold < least:
            wrong = (
                f"context.threshold ({context.threshold}) must be at least {least}: {strategy.asks} ({framed} tokens) + "
                f"{context.written_sum} + context.min_response ({context.min_response}); raise the threshold, lower "
                "summary_tokens or shorten the request"
            )
            raise TaskDoesNotFit(f"task does not fit: {wrong}, or the task") if task else ConfigError(wrong)
        return budget

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
        """Whether a whole summary, and what is written behind it, fit behind `used` tokens (its request included)."""
        return used + self.context.summary_tokens + self.behind <= self.context.budget

    def check_task(self, prompt: Sequence[Span], resume: Sequence[Span], *asides: Sequence[Span]) -> None:
        """Raise TaskDoesNotFit if `prompt` (s + u) or `resume` (s + framed empty texts, + u if kept) is too long.

        Or one of the `asides`: fresh contexts, as long as without a text, that hold one and ask for another.
        """
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
            ("its shortest resumed context", length(resume) + context.written),
            *(("a fresh context of its hand-off", length(aside) + 2 * context.summary_tokens) for aside in asides),
        ):
            if used > most:
                raise TaskDoesNotFit(
                    f"task does not fit: {name} has {used} tokens, more than context.budget - threshold - min_response = "
                    f"{most}; raise the budget, lower threshold or summary_tokens, or shorten the task"
                )


@lru_cache(maxsize=64)
def _measure(strategy: Strategy, chat: ChatFormat, tools_json: str) -> ContextBudget:
    context, tools = strategy.context, json.loads(tools_json)
    probe: list[Message] = [{"role": "user", "content": "a"}]
    opening = [i for span in chat.prompt(probe, tools) for i in span.ids]

    def framed(choices: Iterator[list[Message]]) -> int:
        """The longest of `choices`, behind the longest end of a response."""
        return max(
            length(chat.extend(opening, response, messages, tools))
            for messages in choices
            for response in chat.endings()
        )

    calls = (0, context.max_calls) if tools else (0,)
    placeholder = filled(context.placeholder)
    summary = framed(
        [*(_answers(context.placeholder, n) or [placeholder]), request] for request in strategy.requests for n in calls
    )
    further = sum(
        framed([*_answers(UNEXECUTED, n), filled(template, dict.fromkeys(strategy.names, ""))] for n in calls)
        for template in strategy.further
    )
    return ContextBudget(
        context, summary + further + context.written, further + context.written - context.summary_tokens
    )


def _answers(text: str, calls: int) -> list[Message]:
    """What answers native calls that had no output of their own."""
    # Some formats repeat the call's name and id, which the policy chooses: one token per character is the most they take.
    longest = ("7_" * MAX_NAME)[:MAX_NAME]
    message = {"role": "tool", "content": text, "tool_call_id": longest, "name": longest}
    return [message] * calls  # type: ignore[list-item]
