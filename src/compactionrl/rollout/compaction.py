"""Compactor: when a summary is accepted (E8) and what the next window opens with (E9)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from compactionrl.environments.protocol import Message, Response
from compactionrl.rollout.budget import ContextBudget, TaskDoesNotFit
from compactionrl.rollout.chat import ChatFormat, Span, length
from compactionrl.rollout.ledger import Window
from compactionrl.rollout.strategy import Strategy, filled


@dataclass
class Step:
    """z_i = (a_i, o_i): a sampled response and the observation it caused. Atomic: compaction never parts the two.

    `said`: the response as a message.
    """

    response_ids: list[int]
    said: Message
    messages: list[Message]


class CannotResume(Exception):
    """Not even the smallest context for the next window leaves room to act."""


@dataclass
class Compactor:
    """Compaction of one rollout's windows. `system`: s, `task`: u, `tools`: the environment's native tools if any."""

    budget: ContextBudget
    strategy: Strategy
    chat: ChatFormat
    system: list[Message]
    task: Message
    tools: list[Any] | None = None

    def check_task(self) -> list[Span]:
        """The first window's context (s, u). Raises TaskDoesNotFit."""
        prompt = self.chat.prompt([*self.system, self.task], self.tools)
        none = dict.fromkeys(self.strategy.names, "")
        resume = self._prompt(filled(self.strategy.template, none))
        asides = [self._prompt(filled(aside, {**none, "observation": ""})) for aside in self.strategy.asides]
        self.budget.check_task(prompt, resume, *asides)
        return prompt

    def resume(
        self, texts: Mapping[str, str], steps: Sequence[Step], compactions_left: int, must_keep_last: bool = False
    ) -> tuple[Window, list[Message]]:
        """h' of E9: s, u_resume(texts), and the last k steps, k lowered until C - |h'| >= T_comp. And what it says.

        `must_keep_last`: the last step's observation did not fit into the window just closed, so k is at least 1 and that
        observation is clipped until it fits. Raises CannotResume if even that leaves no room to act.
        """
        template = self.strategy.template
        opening = self._opening(filled(template, self.fit(template, texts, self._prompt)))
        window, tail = self._fit_tail(self.chat.prompt(opening, self.tools), steps, compactions_left, must_keep_last)
        return window, [*opening, *(message for step in tail for message in (step.said, *step.messages))]

    def aside(self, template: str, texts: Mapping[str, str], observation: str) -> list[Message]:
        """A fresh context that says `texts`, and as much of the `observation` as leaves room for another of them."""
        fitted = self.fit(template, {**texts, "observation": ""}, self._prompt)
        ids = self.chat.encode(observation)
        context = self.budget.context

        def clipped(keep: int) -> Message:
            return filled(template, {**fitted, "observation": self.chat.clip(observation, ids, keep)})

        def too_long(keep: int) -> bool:
            return length(self._prompt(clipped(keep))) + context.summary_tokens > context.budget

        # The mark alone always fits: check_task leaves T_comp + min_response, and T_comp is longer than two framed requests.
        most = min(len(ids), context.budget)
        return self._opening(clipped(bisect_left(range(1, most + 1), True, key=too_long)))

    def fit(
        self, template: str, texts: Mapping[str, str], framed: Callable[[Message], Sequence[Span]]
    ) -> dict[str, str]:
        """`texts`; the end of one is cut off where it takes more tokens than it may (broken special strings do)."""
        fitted = dict.fromkeys(texts, "")

        def size() -> int:
            return length(framed(filled(template, fitted)))

        for name, text in texts.items():
            keep = self.budget.context.summary_tokens
            limit, ids = size() + keep, self.chat.encode(text)
            fitted[name] = text
            while size() > limit:
                fitted[name], keep = self.chat.decode(ids[:keep]), keep - 1
        return fitted

    def _fit_tail(
        self, base: Sequence[Span], steps: Sequence[Step], compactions_left: int, must_keep_last: bool
    ) -> tuple[Window, Sequence[Step]]:
        for k in range(min(max(self.budget.context.tail_steps, must_keep_last), len(steps)), 0, -1):
            window = self._window(base, steps[-k:])
            if not self.budget.triggers(len(window)):
                return window, steps[-k:]
        if must_keep_last:
            window, clipped = self._clipped(base, steps[-1], compactions_left)
            return window, [clipped]
        return self._window(base, []), []

    def _opening(self, message: Message) -> list[Message]:
        """What every window but the first says at its beginning."""
        return [*self.system, *([self.task] if self.strategy.keeps_task else []), message]

    def _prompt(self, message: Message) -> list[Span]:
        return self.chat.prompt(self._opening(message), self.tools)

    def _window(self, base: Sequence[Span], steps: Sequence[Step], note: str = "tail") -> Window:
        window = Window()
        for span in base:
            window.append_context(span.ids, span.role, "resume")
        for step in steps:
            opening = window.token_ids[window.turns[-1].start :]
            window.append_context(step.response_ids, "assistant", "tail")
            for span in self.chat.extend(opening, step.response_ids, step.messages, self.tools):
                window.append_context(span.ids, span.role, note)
        return window

    def _clipped(self, base: Sequence[Span], step: Step, compactions_left: int) -> tuple[Window, Step]:
        """The largest clip of the step's observation that fits, by bisection over the tokens kept per message."""
        encoded = [self.chat.encode(message["content"]) for message in step.messages]

        def clip(keep: int) -> tuple[Window, Step]:
            messages: list[Message] = [
                {**message, "content": self.chat.clip(message["content"], ids, keep)}
                for message, ids in zip(step.messages, encoded, strict=True)
            ]
            clipped = replace(step, messages=messages)
            return self._window(base, [clipped], "tail" if messages == step.messages else "clipped"), clipped

        best, high = clip(0), self.budget.context.budget
        if self.budget.triggers(len(best[0])):
            # A window without a new step never compacts, so the step may reach above the trigger as long as the policy
            # can still answer it.
            if not self.budget.can_act(len(best[0]), compactions_left):
                raise CannotResume("the last step does not fit into the next window, even with its observation cut out")
            return best
        low = 0
        while high - low > 1:
            middle = (low + high) // 2
            clipped = clip(middle)
            if self.budget.triggers(len(clipped[0])):
                high = middle
            else:
                low, best = middle, clipped
        return best


def label(name: str, response: Response) -> str:
    """The note of a text that was accepted, or used as it is."""
    reason = judge(response)
    if reason is None and response.calls:
        reason = "with a tool call, not executed"
    return name if reason is None else f"{name} ({reason})"


def judge(response: Response) -> str | None:
    """Why a summary is no good; None if it is. Only what follows the thinking counts as the summary."""
    if response.cut:
        return "cut"
    if response.text.strip():
        return None
    if response.calls:
        return "only a tool call"
    return "only thinking" if response.thinking.strip() else "empty"


__all__ = ["CannotResume", "Compactor", "Step", "TaskDoesNotFit", "judge", "label"]
