"""Handoff: Terminus-2's compaction in three requests, the untrained baseline beside the paper's strategy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from compactionrl.config import ContextConfig
from compactionrl.environments.protocol import Message
from compactionrl.rollout.strategy import Scribe, Strategy, filled

UNEXECUTED = "[Not executed.]"
"""Answers a call in the summary, behind which the window goes on."""


@dataclass(frozen=True)
class Handoff(Strategy):
    """As if to another agent, who asks back once. `task`: what it says; the first request repeats it."""

    task: str = ""

    names: ClassVar[tuple[str, ...]] = ("summary", "questions", "answers")
    excluded: ClassVar[str | None] = "hand-off is not trained"
    asks: ClassVar[str] = "a hand-off's framed requests"

    @property
    def keeps_task(self) -> bool:
        return True

    @property
    def requests(self) -> list[Message]:
        return [filled(self.context.handoff_request, {"task": self.task}), filled(self.context.retry_request)]

    @property
    def further(self) -> list[str]:
        return [self.context.answers_request]

    @property
    def asides(self) -> list[str]:
        return [self.context.questions_request]

    @property
    def template(self) -> str:
        return self.context.handoff_template

    async def write(self, scribe: Scribe, messages: list[Message], note: str) -> dict[str, str]:
        """Only the summary is judged and asked for again: questions and answers are used as they come."""
        summary = await scribe.summarise(messages, note)
        questions = await scribe.aside("questions", self.context.questions_request, {"summary": summary})
        answers = await scribe.go_on("answers", self.context.answers_request, {"questions": questions})
        return {"summary": summary, "questions": questions, "answers": answers}


def strategy_of(context: ContextConfig, task: str = "") -> Strategy:
    """The configured one, for a task that says `task`."""
    return Handoff(context, task) if context.strategy == "handoff" else Strategy(context)
