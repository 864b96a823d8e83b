"""Strategy: what a compaction writes, and what of it the next window opens with. Here the paper's; `handoff` has another."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

from compactionrl.config import ContextConfig
from compactionrl.environments.protocol import Message


class Scribe(Protocol):
    """Writes a compaction's texts and keeps them in the ledger. Each is named, and returned without its thinking."""

    async def summarise(self, messages: list[Message], note: str) -> str:
        """The summary, at the end of the closing window, behind the latest observation or what stands for it (`note`)."""
        ...

    async def aside(self, name: str, template: str, texts: Mapping[str, str]) -> str:
        """A text from a fresh context; `texts` and the latest observation are put into the `template` that asks for it."""
        ...

    async def go_on(self, name: str, template: str, texts: Mapping[str, str]) -> str:
        """A text from the closing window, behind what was written there last."""
        ...


@dataclass(frozen=True)
class Strategy:
    """The paper's: one summary (E8), from which the next window goes on (E9)."""

    context: ContextConfig

    names: ClassVar[tuple[str, ...]] = ("summary",)
    """Of the texts that it writes, `context.texts` of them."""
    excluded: ClassVar[str | None] = None
    """Why its texts are not trained; None: they are."""
    asks: ClassVar[str] = "a framed summary request"
    """What errors call its requests."""

    @property
    def keeps_task(self) -> bool:
        """Whether every window opens with the task."""
        return self.context.keep_task

    @property
    def requests(self) -> list[Message]:
        """What asks for the summary, and what asks again after one that was no good."""
        return requests(self.context)

    @property
    def further(self) -> list[str]:
        """Templates of what else is asked in the closing window, behind the summary."""
        return []

    @property
    def asides(self) -> list[str]:
        """Templates of what is asked in fresh contexts."""
        return []

    @property
    def template(self) -> str:
        """u_resume."""
        return self.context.resume_template

    async def write(self, scribe: Scribe, messages: list[Message], note: str) -> dict[str, str]:
        """The texts by name. `messages`, `note`: see `Scribe.summarise`."""
        return {"summary": await scribe.summarise(messages, note)}


def requests(context: ContextConfig) -> list[Message]:
    """q_sum (E8) and the request after a summary that was no good."""
    return [filled(context.summary_request), filled(context.retry_request)]


def filled(template: str, texts: Mapping[str, str] | None = None) -> Message:
    """The user's message that says `texts` in their places. A brace within a text is no place."""
    known = texts or {}
    return {"role": "user", "content": re.sub(r"\{(\w+)\}", lambda place: known.get(place[1], place[0]), template)}
