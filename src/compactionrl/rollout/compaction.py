"""Compactor: when a summary is accepted (E8) and what the next window opens with (E9)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from compactionrl.environments.protocol import Message, Response
from compactionrl.rollout.budget import ContextBudget, TaskDoesNotFit
from compactionrl.rollout.chat import ChatFormat, Span, length
from compactionrl.rollout.ledger import Window


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
    chat: ChatFormat
    system: list[Message]
    task: Message
    tools: list[Any] | None = None

    def check_task(self) -> list[Span]:
        """The first window's context (s, u). Raises TaskDoesNotFit."""
        prompt = self.chat.prompt([*self.system, self.task], self.tools)
        self.budget.check_task(prompt, self._resumed(""))
        return prompt

    def resume(
        self, summary: str, steps: Sequence[Step], compactions_left: int, must_keep_last: bool = False
    ) -> tuple[Window, list[Message]]:
        """h' of E9: s, u_resume(summary), and the last k steps, k lowered until C - |h'| >= T_comp. And what it says.

        `must_keep_last`: the last step's observation did not fit into the window just closed, so k is at least 1 and that
        observation is clipped until it fits. Raises CannotResume if even that leaves no room to act.
        """
        opening = self._opening(self._fitting(summary))
        window, tail = self._fit_tail(self.chat.prompt(opening, self.tools), steps, compactions_left, must_keep_last)
        return window, [*opening, *(message for step in tail for message in (step.said, *step.messages))]

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

    def _opening(self, summary: str) -> list[Message]:
        context = self.budget.context
        resume: Message = {"role": "user", "content": context.resume_template.replace("{summary}", summary)}
        return [*self.system, *([self.task] if context.keep_task else []), resume]

    def _resumed(self, summary: str) -> list[Span]:
        return self.chat.prompt(self._opening(summary), self.tools)

    def _fitting(self, summary: str) -> str:
        """The summary; its end is cut off where its text takes more tokens than a summary may (broken special strings do)."""
        keep = self.budget.context.summary_tokens
        limit = length(self._resumed("")) + keep
        text, ids = summary, self.chat.encode(summary)
        while length(self._resumed(text)) > limit:
            text, keep = self.chat.decode(ids[:keep]), keep - 1
        return text

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


def judge(response: Response) -> str | None:
    """Why a summary is no good; None if it is. Only what follows the thinking counts as the summary."""
    if response.cut:
        return "cut"
    if response.text.strip():
        return None
    if response.calls:
        return "only a tool call"
    return "only thinking" if response.thinking.strip() else "empty"


__all__ = ["CannotResume", "Compactor", "Step", "TaskDoesNotFit", "judge"]
