"""What samples tokens: tokens in, tokens out. And what completes chats, text in and text out, for evaluation alone.

A sampler may also have, and is asked for, these methods: `async start(budget)`, before the first request, refuses what
cannot work (a wrong model, a context limit below `budget` tokens); `async close()`, after the last one;
`weights_changed(version)`, plain or async, whenever the policy that it samples from has new weights.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable


class SamplerError(RuntimeError):
    """A request that got no answer. `retryable`: whether the same rollout may do better if it is tried again."""

    retryable = True


class SamplerRefused(SamplerError):
    """What no retry can mend: a wrong model name, a context limit below C, a server without token ids. Says what to do."""

    retryable = False


class Reported(NamedTuple):
    """Tokens of one request, as a server counts them that takes and returns text. `hidden`: thinking that it keeps to itself."""

    prompt: int
    completion: int
    hidden: int = 0

    @property
    def shown(self) -> int:
        """Of the completion: what later prompts hold."""
        return self.completion - self.hidden

    @property
    def context(self) -> int:
        """|h| behind the response."""
        return self.prompt + self.shown


@dataclass
class Sampled:
    """One sampled response.

    `logprobs[i]` is the natural logarithm of the temperature-scaled softmax at `token_ids[i]`. A stop token that ended
    the response is its last token. `versions[i]` is the version of the policy that sampled token i. Only where ids are pieces
    of a text (`rollout.text_chat`) may something be `reported`; otherwise the ids are the tokens.
    """

    token_ids: list[int]
    logprobs: list[float]
    finish: Literal["stop", "length", "abort"]
    versions: list[int]
    reported: Reported | None = None

    @property
    def tokens(self) -> int:
        """How many there are, by the best count there is."""
        return self.reported.shown if self.reported else len(self.token_ids)


class Sampler(Protocol):
    """One that computes in this process, and so keeps the event loop from environments that wait, has an attribute
    `busy_seconds`: for how long it has done so, in all. That time is taken off what an environment needed.
    """

    async def sample(
        self,
        token_ids: Sequence[int],
        *,
        max_tokens: int,
        stop_token_ids: Sequence[int],
        temperature: float,
        top_p: float,
        seed: int,
        affinity: str,
    ) -> Sampled:
        """Continue `token_ids` by at most `max_tokens` tokens.

        `seed` fixes this request's random stream. `affinity` names the rollout: its requests share a key-value cache.
        """
        ...

    async def release(self, affinity: str) -> None:
        """The rollout has ended: what is cached for it may go."""
        ...


class SpokenCall(NamedTuple):
    """A tool call as an endpoint wrote it: `arguments` should be a JSON object, but may be any text."""

    id: str
    name: str
    arguments: str


@dataclass
class Reply:
    """What a chat endpoint answered. `finish`: "length" if something cut it."""

    text: str
    thinking: str = ""
    calls: list[SpokenCall] = field(default_factory=list)
    finish: Literal["stop", "length"] = "stop"
    reported: Reported | None = None


@runtime_checkable
class Completer(Protocol):
    """Text in, text out. For evaluation and summaries only: nothing that it writes can be trained."""

    async def complete(
        self,
        messages: Sequence[Any],
        *,
        max_tokens: int,
        temperature: float,
        top_p: float,
        seed: int,
        affinity: str,
        tools: Sequence[Any] | None = None,
    ) -> Reply:
        """The assistant's next turn behind OpenAI-style chat messages, of at most `max_tokens` tokens; see `Sampler.sample`."""
        ...


Summariser: TypeAlias = Sampler | Completer
"""Who writes summaries: it continues the policy's windows, or reads them as text."""


async def optional(sampler: object, method: str, *arguments: Any) -> None:
    """Call one of the methods that a sampler may have, plain or async; nothing happens if it has none."""
    result = getattr(sampler, method, lambda *_: None)(*arguments)
    if inspect.isawaitable(result):
        await result
