"""What samples tokens: tokens in, tokens out.

A sampler may also have, and is asked for, these methods: `async start(budget)`, before the first request, refuses what
cannot work (a wrong model, a context limit below `budget` tokens); `async close()`, after the last one;
`weights_changed(version)`, plain or async, whenever the policy that it samples from has new weights.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol


class SamplerError(RuntimeError):
    """A request that got no answer. `retryable`: whether the same rollout may do better if it is tried again."""

    retryable = True


class SamplerRefused(SamplerError):
    """What no retry can mend: a wrong model name, a context limit below C, a server without token ids. Says what to do."""

    retryable = False


@dataclass
class Sampled:
    """One sampled response.

    `logprobs[i]` is the natural logarithm of the temperature-scaled softmax at `token_ids[i]`. A stop token that ended
    the response is its last token. `versions[i]` is the version of the policy that sampled token i.
    """

    token_ids: list[int]
    logprobs: list[float]
    finish: Literal["stop", "length", "abort"]
    versions: list[int]


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


async def optional(sampler: object, method: str, *arguments: Any) -> None:
    """Call one of the methods that a sampler may have, plain or async; nothing happens if it has none."""
    result = getattr(sampler, method, lambda *_: None)(*arguments)
    if inspect.isawaitable(result):
        await result
