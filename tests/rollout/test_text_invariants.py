"""Invariants 1 to 4 of a rollout on an endpoint of text: any policy, any environment, any budget, whatever it says it counted.

Text has no tokens, so C is held by the count of pieces where the endpoint reports nothing, and by its reports where it does.
And every request is one that the strictest of endpoints takes.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, Literal

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rollout_stubs import TOOLS, Request, play, words
from strict_endpoint import mistakes
from test_invariants import (
    MAX_CALLS,
    Played,
    RandomEnvironment,
    no_call_stays_unanswered,
    random_config,
    requests_of,
    steps,
    steps_are_atomic,
    text_opens_no_turn,
    the_budget_is_a_hard_bound,
    windows_only_grow,
)

from compactionrl.rollout.chat_sampler import ChatSampler
from compactionrl.rollout.text_chat import MARKS, Mark, TextFormat
from compactionrl.samplers.protocol import Reply, Reported, Sampled, SpokenCall

HOSTILE = [
    "<|im_end|>",
    "<|im_start|>user\n",
    "</think>",
    "<tool_call>",
    "\x00",
    "\x05",
    "\ufdd0",
    "é",
    "漢" * 9,
    "[END]",
]
Counts = Literal["none", "some", "all"]


class ReadableFormat(TextFormat):
    """With what the invariants of token formats look for."""

    tokenizer: Any = SimpleNamespace(
        special_tokens={name: 0 for name in HOSTILE if name != "\x00"}, special_ids=frozenset(MARKS)
    )

    def decode(self, ids: Sequence[int]) -> str:
        text = super().decode(ids).replace("\ufdd0", "\ufffd")
        return f"<tool_response>{text}</tool_response>" if Mark.ANSWERS in ids else text


class RandomEndpoint:
    """Replies with anything: thinking, calls of all kinds, texts longer than their limit; and may count, rightly or not."""

    def __init__(self, rng: random.Random, counts: Counts) -> None:
        self.rng, self.counts = rng, counts

    def text(self) -> str:
        rng = self.rng
        if rng.random() < 0.2:
            return "".join(rng.choice(HOSTILE) for _ in range(rng.randrange(5)))
        return words(rng.choice([0, 0, 1, 3, 12, 60]), rng.randrange(100)) + rng.choice(["", "", "\ud800", " "])

    def call(self) -> SpokenCall:
        arguments = self.rng.choice(["{}", '{"command": "ls"}', '{"command": ', "[1]", "", "1" * 5000, self.text()])
        name = self.rng.choice(["run", "run", "run", "", "no such tool", "x" * 70, "\x00"])
        return SpokenCall(self.rng.choice(["call_1", "call_0", "", "y" * 70, "é"]), name, arguments)

    async def complete(self, messages: Sequence[Any], *, max_tokens: int, **_: Any) -> Reply:
        assert mistakes({"messages": [*messages]}) == ""
        rng = self.rng
        calls = [self.call() for _ in range(rng.choice([0, 0, 0, 0, 1, 2, MAX_CALLS, MAX_CALLS + 2]))]
        thinking = self.text() if rng.random() < 0.3 else ""
        reply = Reply(self.text(), thinking, calls, rng.choice(["stop", "stop", "stop", "length"]))
        if self.counts == "all" or (self.counts == "some" and rng.random() < 0.5):
            factor = rng.choice([0.3, 0.7, 1.0, 2.0])
            prompt = max(1, int(sum(len(str(message)) for message in messages) / 3 * factor))
            written = rng.randrange(1, max_tokens + 1) if rng.random() < 0.9 else 3 * max_tokens
            reply.reported = Reported(prompt, written, rng.choice([0, 0, written // 2]))
        return reply


class Recorder(ChatSampler):
    """Remembers what was asked of an endpoint."""

    def __init__(self, endpoint: RandomEndpoint) -> None:
        super().__init__(endpoint)
        self.requests: list[Request] = []

    async def sample(
        self, token_ids: Sequence[int], *, max_tokens: int, seed: int, affinity: str, **options: Any
    ) -> Sampled:
        sampled = await super().sample(token_ids, max_tokens=max_tokens, seed=seed, affinity=affinity, **options)
        self.requests.append(Request(list(token_ids), max_tokens, seed, sampled.token_ids, affinity))
        return sampled


def random_text_rollout(seed: int, counts: Counts) -> Played | None:
    """None for a task that does not fit."""
    rng, chat = random.Random(seed), ReadableFormat()
    tools = TOOLS if rng.random() < 0.5 else None
    config, reserve = random_config(rng, chat, tools)
    sampler, environment = Recorder(RandomEndpoint(rng, counts)), RandomEnvironment(rng, config.budget, tools, chat)
    rollout = play(environment, sampler, config, chat=chat, turns=rng.choice([5, 30]))
    if rollout.end == "error":
        assert (rollout.error or "").startswith("task does not fit")
        return None
    played = Played(rollout, sampler, environment, chat, config, reserve, [])  # type: ignore[arg-type]
    played.steps = list(steps(played))
    return played


def every_sampled_piece_is_excluded_or_rejected_by_name(played: Played) -> None:
    counts = played.rollout.token_counts()
    total = sum(len(request.sampled) for request in played.sampler.requests)
    assert counts["sampled"] == total == sum(n for name, n in counts.items() if name != "sampled")
    assert counts["trained"] == 0
    assert played.rollout.approximate


def the_budget_is_kept_by_the_best_count(played: Played) -> None:
    """2, where the endpoint counts: |h| as it said last, what came behind it, and the request's limit, fit into C."""
    asked = iter(played.sampler.requests)
    left = played.config.max_compactions
    for window in played.windows:
        for prompt, _, kind in requests_of(window):
            request = next(asked)
            if kind == "response":
                heard = [turn for turn in window.turns if turn.reported and turn.end <= len(prompt)]
                used = heard[-1].reported.context + len(prompt) - heard[-1].end if heard else len(prompt)  # type: ignore[union-attr]
                assert used + request.max_tokens + (played.reserve if left else 0) <= played.config.budget
        left -= 1


def windows_say_what_was_said(played: Played) -> None:
    """Nothing is lost on the way: a window's messages are what the environment gave and the endpoint said."""
    for window in played.windows:
        end = [] if window.token_ids[-1] == Mark.END else [Mark.END]
        messages, tools = played.chat.messages([*window.token_ids, *end])  # type: ignore[attr-defined]
        assert tools == played.environment.tools
        assert [message["role"] for message in messages] == [turn.role for turn in window.turns]


EXACT = [windows_only_grow, steps_are_atomic, no_call_stays_unanswered, text_opens_no_turn, windows_say_what_was_said]
EXACT += [every_sampled_piece_is_excluded_or_rejected_by_name]


@given(seed=st.integers(0, 2**32))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_without_reports_the_budget_is_a_hard_bound_by_the_count_of_pieces(seed: int) -> None:
    played = random_text_rollout(seed, "none")
    if played is not None:
        for check in [*EXACT, the_budget_is_a_hard_bound]:
            check(played)


@given(seed=st.integers(0, 2**32), counts=st.sampled_from(["some", "all"]))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_with_reports_right_or_wrong(seed: int, counts: Counts) -> None:
    played = random_text_rollout(seed, counts)
    if played is not None:
        for check in [*EXACT, the_budget_is_kept_by_the_best_count]:
            check(played)


def test_the_random_rollouts_reach_what_the_invariants_are_about() -> None:
    found: set[str] = set()
    for seed in range(150):
        played = random_text_rollout(seed, ("none", "some", "all")[seed % 3])  # type: ignore[arg-type]
        if played is None:
            found.add("does not fit")
            continue
        found |= {turn.note for window in played.windows for turn in window.turns} | {played.rollout.end}
        found |= {attempt.reason for window in played.windows for attempt in window.rejected}
        found |= {f"{step.calls} calls" for step in played.steps} | {f"{len(played.windows)} windows"}
        found |= {"counted"} if any(turn.reported for window in played.windows for turn in window.turns) else set()
    assert found >= {
        *("does not fit", "submitted", "turns", "budget", "counted"),
        *("tail", "clipped", "placeholder", "summary", "summary (cut)", "cut", "empty", "only thinking"),
        *("0 calls", "1 calls", "2 calls", "3 calls", "1 windows", "4 windows"),
    }
