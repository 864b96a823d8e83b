"""A scripted expert for the notes tasks, as a Sampler: it writes demonstrations, and summaries that forget at a known rate."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Protocol

from compactionrl.environments.notes import END, NOTES_PROMPTS, NotesTasks
from compactionrl.samplers.protocol import Sampled

TURN = re.compile(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>", re.DOTALL)
POINTER = re.compile(rf"\bnext n\d+|\b{END}\b")


class Codec(Protocol):
    """The part of a tokenizer that an expert needs."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...


class Demonstrator:
    """Acts on what the prompt shows and on nothing else: the turns of a ChatML prompt, decoded.

    It reads note after note, then answers with every fact in view; a fact that is not in view is left out. At each turn it
    answers before the end with probability `hurry`. Asked for a
    summary (the last user turn is one of `summary_requests`), it lists the facts in view, each dropped with probability
    `forget`: 0 is the perfect summariser, 1 writes down none. That the end was reached, or the name of the next note, it
    always keeps; where a chain's next name is lost, it answers. Same prompt and seeds, same reply. Log-probabilities are
    0.0 and the policy version is 0: nothing was sampled.
    """

    def __init__(
        self,
        tasks: NotesTasks,
        tokenizer: Codec,
        *,
        forget: float = 0.0,
        hurry: float = 0.0,
        seed: int = 0,
        summary_requests: Sequence[str] = (NOTES_PROMPTS["summary_request"], NOTES_PROMPTS["retry_request"]),
    ) -> None:
        for name, probability in (("forget", forget), ("hurry", hurry)):
            if not 0 <= probability <= 1:
                raise ValueError(f"{name} is a probability from 0 to 1, not {probability!r}.")
        self.tasks, self.tokenizer = tasks, tokenizer
        self.forget, self.hurry, self.seed = forget, hurry, seed
        self.summary_requests = frozenset(request.strip() for request in summary_requests)

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
        """The expert's reply, closed by the first stop token. ValueError if the prompt shows no user turn."""
        reply = self.reply(self.tokenizer.decode(token_ids), seed)
        ids = [*self.tokenizer.encode(reply, add_special_tokens=False), stop_token_ids[0]]
        kept = ids[:max_tokens]
        return Sampled(kept, [0.0] * len(kept), "stop" if kept == ids else "length", [0] * len(kept))

    async def release(self, affinity: str) -> None:
        """Nothing is kept between requests."""

    def reply(self, prompt: str, seed: int = 0) -> str:
        """What the expert says next; `seed` decides, with its own, what a summary forgets and when it hurries."""
        turns = [content.strip() for role, content in TURN.findall(prompt) if role == "user"]
        if not turns:
            raise ValueError("The prompt shows no ChatML user turn: the demonstrator reads Qwen3-style prompts only.")
        facts = list(self.tasks.read_facts("\n".join(turns)).values())
        pointer = self._pointer(turns)
        if turns[-1] in self.summary_requests:
            return " ".join(["found", *self._remembered(facts, seed), *pointer])
        hurries = random.Random(f"{self.seed}/{seed}/hurry").random() < self.hurry
        if hurries or pointer == [END] or (self.tasks.mode == "chain" and not pointer):
            return " ".join(["answer", *facts])
        return "next" if self.tasks.mode == "scan" else f"open {pointer[1]}"

    def _remembered(self, facts: list[str], seed: int) -> list[str]:
        chance = random.Random(f"{self.seed}/{seed}")
        return [fact for fact in facts if chance.random() >= self.forget]

    def _pointer(self, turns: list[str]) -> list[str]:
        """Where the reading stands, by the latest mention in view: ["next", name] in a chain, ["end"], or nothing."""
        mentions = POINTER.findall("\n".join(turns))
        return mentions[-1].split() if mentions else []
