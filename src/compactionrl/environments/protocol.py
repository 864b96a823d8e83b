"""What the agent acts on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol, TypedDict


class Message(TypedDict):
    role: str
    content: str


@dataclass
class ToolCall:
    """A native tool call as the chat format parsed it. `error` is set when it could not be parsed."""

    id: str
    name: str
    arguments: dict[str, Any]
    error: str | None = None


@dataclass
class Response:
    """What the policy said in one turn. `cut`: it reached its token limit before it ended by itself."""

    text: str
    thinking: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    cut: bool = False


@dataclass
class Observation:
    """What the environment answers. `text`: one string, or one string per tool call of the response, in order.

    `done`: the agent has submitted; the rollout ends and `verify` decides the reward.
    """

    text: str | list[str]
    done: bool = False


@dataclass
class Verdict:
    """The terminal reward (paper (R)) and whatever is worth recording beside it (JSON-serialisable)."""

    reward: float
    details: dict[str, Any] = field(default_factory=dict)


class Environment(Protocol):
    """One task, once. Raise any exception from any method to report trouble that is not the policy's fault.

    An environment with native tools has an attribute `tools`: a list of OpenAI-style tool specifications.
    """

    async def start(self) -> list[Message]:
        """The system prompt and the task, as chat messages; the last one is the user's task."""
        ...

    async def step(self, response: Response) -> Observation: ...

    async def verify(self) -> Verdict: ...

    async def close(self) -> None: ...


class TaskSet(Protocol):
    """A family of tasks, split into "train" and "heldout" sets that share no task."""

    def size(self, split: str) -> int:
        """How many tasks the split has; indices run from 0 to size - 1."""
        ...

    def task_id(self, split: str, index: int) -> str: ...

    def environment(self, split: str, index: int) -> Environment: ...
