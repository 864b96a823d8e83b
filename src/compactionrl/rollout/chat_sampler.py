"""Rollouts on endpoints that take and return text: for evaluation alone, what they write is never trained."""

from __future__ import annotations

from collections.abc import Sequence

from compactionrl.rollout.conversation import conversation
from compactionrl.rollout.text_chat import TextFormat
from compactionrl.samplers.protocol import Completer, Reported, Sampled, optional


class ChatSampler:
    """A `Sampler` of `TextFormat` windows over whatever completes chats; there are no log-probabilities."""

    def __init__(self, endpoint: Completer) -> None:
        self.endpoint = endpoint
        self.chat = TextFormat()

    async def start(self, budget: int) -> None:
        await optional(self.endpoint, "start", budget)

    async def close(self) -> None:
        await optional(self.endpoint, "close")

    async def release(self, affinity: str) -> None:
        """Endpoints forget by themselves what they cached for it."""
        return

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
        """See `Sampler.sample`. What the endpoint does not count is counted here, and cut."""
        messages, tools = self.chat.messages(token_ids)
        reply = await self.endpoint.complete(
            conversation(messages),
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            affinity=affinity,
            tools=tools,
        )
        ids, finish, counted = self.chat.sampled(reply), reply.finish, reply.reported
        if (counted.shown if counted else len(ids)) > max_tokens:
            if len(ids) > max_tokens:
                ids, finish = ids[:max_tokens], "length"
            counted = counted and Reported(counted.prompt, len(ids))
        nothing = [0] * len(ids)
        return Sampled(ids, [0.0] * len(ids), finish, nothing, counted)
