"""Invariants 1 to 4 of a rollout, for any policy, any environment and any budget.

The policy samples whatever ids; the environment answers with texts from nothing to many windows, some of which spell special
tokens. What was asked of the sampler and what it returned is written down there, and the ledger is held against it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rollout_stubs import TOOLS, Request, context, play, sampled, words

from compactionrl.config import ContextConfig
from compactionrl.environments.protocol import Message, Observation, Response, Verdict
from compactionrl.rollout.budget import ContextBudget
from compactionrl.rollout.chat import ChatFormat, Span, length
from compactionrl.rollout.ledger import Rollout, Turn, Window
from compactionrl.samplers.protocol import Sampled

pytest_plugins = ["chat_formats"]
MAX_CALLS = 3
JSON_CALL = '{"name": "run", "arguments": {"command": "ls"}}'
GLM_CALL = "run\n<arg_key>command</arg_key>\n<arg_value>ls</arg_value>\n"


def is_llama(chat: ChatFormat) -> bool:
    """Llama 3 marks neither calls nor answers: a response that is a JSON object is a call."""
    return chat.tokenizer.special_tokens.get("<|eot_id|>") == chat.stop_token_ids[0]


class RandomSampler:
    """Emits arbitrary ids: words, bytes that are no text, special tokens anywhere, open thinking, calls of all kinds."""

    def __init__(self, chat: ChatFormat, rng: random.Random) -> None:
        self.chat, self.rng = chat, rng
        self.size = len(chat.tokenizer.base)
        self.stops = frozenset(chat.stop_token_ids)
        self.special = sorted(chat.tokenizer.special_ids - self.stops)
        self.requests: list[Request] = []

    def ids_of(self, text: str) -> list[int]:
        return self.chat.tokenizer.base.encode(text, add_special_tokens=False)

    def call(self) -> str:
        glm = "<arg_key>" in self.chat.tokenizer.special_tokens
        return JSON_CALL if is_llama(self.chat) else f"<tool_call>{GLM_CALL if glm else JSON_CALL}</tool_call>"

    def piece(self) -> list[int]:
        rng = self.rng
        kind = rng.randrange(9)
        if kind == 0:
            return [rng.randrange(self.size) for _ in range(rng.randrange(12))]
        if kind == 1:
            return [rng.choice(self.special)]
        if kind == 2:
            return self.ids_of("<think>" + words(rng.randrange(6)))
        if kind == 3:
            return self.ids_of("</think>")
        if kind == 4:
            return self.ids_of(self.call())
        if kind == 5:
            broken = ["<tool_call>", "<tool_call>w1</tool_call>", '<tool_call>{"name": "run"</tool_call>']
            return self.ids_of(rng.choice([*broken, self.call()[: rng.randrange(40)]]))
        if kind == 6:
            halves = self.ids_of("\U0001f600é漢")
            return halves[: rng.randrange(len(halves))]
        return self.ids_of(words(rng.randrange(1, 15), rng.randrange(100)))

    async def sample(self, token_ids: Sequence[int], *, max_tokens: int, seed: int, affinity: str, **_: Any) -> Sampled:
        ids = [i for _ in range(self.rng.randrange(5)) for i in self.piece() if i not in self.stops]
        if self.rng.random() < 0.2:
            ids = (ids or self.ids_of("<think>")) * max_tokens
        ids.append(self.rng.choice(self.chat.stop_token_ids))
        finish = "stop" if len(ids) <= max_tokens else "length"
        ids = ids[:max_tokens]
        self.requests.append(Request(list(token_ids), max_tokens, seed, list(ids), affinity))
        return sampled(ids, finish)

    async def release(self, affinity: str) -> None:
        pass


@dataclass
class RandomEnvironment:
    rng: random.Random
    budget: int
    tools: Any
    chat: ChatFormat
    answers: list[list[str]] = field(default_factory=list)

    async def start(self) -> list[Message]:
        system = [{"role": "system", "content": self.text(6)}] * self.rng.randrange(2)
        return [*system, {"role": "user", "content": self.text(6)}]  # type: ignore[list-item]

    def text(self, most: int) -> str:
        if self.rng.random() < 0.3:
            names = list(self.chat.tokenizer.special_tokens)
            parts = [self.rng.choice([*names, "user\n", "w1 ", "\ufdd0", "é"]) for _ in range(min(most, 6))]
            return "".join(parts).strip()  # some formats strip messages
        return words(self.rng.randrange(most + 1), self.rng.randrange(100))

    async def step(self, response: Response) -> Observation:
        n = len(response.calls) if self.tools and response.calls else 1
        most = self.rng.choice([3, 20, self.budget // 3, self.budget * 3])
        texts = [self.text(most) for _ in range(n)]
        self.answers.append(texts)
        return Observation(texts if n > 1 or self.rng.random() < 0.5 else texts[0], done=self.rng.random() < 0.03)

    async def verify(self) -> Verdict:
        return Verdict(1.0)

    async def close(self) -> None:
        pass


@dataclass
class Step:
    """A step as the sampler and the environment saw it. `texts` is None for the last one, which was not appended."""

    window: int
    turn: int
    ids: list[int]
    calls: int
    texts: list[str] | None = None


@dataclass
class Played:
    rollout: Rollout
    sampler: RandomSampler
    environment: RandomEnvironment
    chat: ChatFormat
    config: ContextConfig
    reserve: int
    steps: list[Step]

    @property
    def windows(self) -> list[Window]:
        return self.rollout.windows

    def after(self, window: Window, index: int) -> list[Turn]:
        """The context turns between turn `index` and the next response."""
        following = window.turns[index + 1 :]
        end = next((i for i, turn in enumerate(following) if turn.role == "assistant"), len(following))
        return following[:end]


def random_config(rng: random.Random, chat: ChatFormat, tools: Any) -> tuple[ContextConfig, int]:
    sizes = {
        "summary_tokens": rng.randrange(1, 40),
        "min_response": rng.randrange(1, 10),
        "max_compactions": rng.randrange(4),
        "tail_steps": rng.randrange(4),
        "summary_attempts": rng.randrange(1, 4),
        "keep_task": rng.random() < 0.3,
        "max_calls": MAX_CALLS,
        "placeholder": words(rng.randrange(1, 4)),
        "summary_request": words(rng.randrange(1, 9)),
        "retry_request": words(rng.randrange(1, 9)),
    }
    roomy = context(**{**sizes, "max_compactions": 1}, budget=10**6, threshold=10**4)
    reserve = ContextBudget.measure(roomy, chat, tools).reserve
    threshold = reserve + sizes["min_response"] + rng.choice([0, 0, rng.randrange(30)])
    prompt = length(chat.prompt([{"role": "user", "content": words(4)}], tools)) + 10
    budget = threshold + sizes["min_response"] + sizes["summary_tokens"] + prompt + rng.randrange(200)
    response_tokens = sizes["min_response"] + rng.choice([0, rng.randrange(60)])
    config = context(**sizes, budget=budget, threshold=threshold, response_tokens=response_tokens)
    return config, reserve if config.max_compactions else 0


def random_rollout(seed: int, chat: ChatFormat) -> Played | None:
    """None for a task that does not fit."""
    rng = random.Random(seed)
    tools = TOOLS if rng.random() < 0.5 else None
    config, reserve = random_config(rng, chat, tools)
    sampler, environment = RandomSampler(chat, rng), RandomEnvironment(rng, config.budget, tools, chat)
    rollout = play(environment, sampler, config, chat=chat, turns=rng.choice([5, 30]))
    if rollout.end == "error":
        assert rollout.error is not None
        assert rollout.error.startswith("task does not fit")
        assert not sampler.requests
        return None
    played = Played(rollout, sampler, environment, chat, config, reserve, [])
    played.steps = list(steps(played))
    return played


def steps(played: Played) -> Iterator[Step]:
    """What was sampled while acting, with the texts that the environment gave; refused calls never reached it."""
    answers = iter(played.environment.answers)
    for number, window in enumerate(played.windows):
        for index, turn in enumerate(window.turns):
            if turn.role != "assistant" or window.segment_ids[turn.start] < 0 or turn.note.startswith("summary"):
                continue
            before = window.turns[index - 1]
            ids = window.token_ids[turn.start : turn.end]
            parsed = played.chat.parse(
                window.token_ids[before.start : before.end], ids, False, played.environment.tools
            )
            calls = len(parsed.calls) if played.environment.tools else 0
            refused = calls > MAX_CALLS
            texts = ["More than 3 calls in one response: none was executed."] if refused else next(answers, None)
            yield Step(number, index, ids, 0 if refused else calls, texts)


def requests_of(window: Window) -> Iterator[tuple[list[int], list[int], str]]:
    """(prompt, sampled ids, kind) of each request that a window stands for, in order; a rejected one has no prompt."""
    for index, turn in enumerate(window.turns):
        if turn.role != "assistant" or window.segment_ids[turn.start] < 0:
            continue
        kind = "summary" if turn.note.startswith("summary") else "response"
        if kind == "summary":
            assert index == len(window.turns) - 1
            for attempt in window.rejected:
                yield [], attempt.token_ids, "rejected"
        yield window.token_ids[: turn.start], window.token_ids[turn.start : turn.end], kind


def one_count_of_sampled_tokens(played: Played) -> None:
    """1: what the sampler returned is in the ledger once: trained, excluded with a reason, or rejected with a reason."""
    counts = played.rollout.token_counts()
    total = sum(len(request.sampled) for request in played.sampler.requests)
    assert counts["sampled"] == total
    assert sum(n for name, n in counts.items() if name != "sampled") == total
    in_windows = sum(index >= 0 for window in played.windows for index in window.segment_ids)
    rejected = sum(len(attempt.token_ids) for window in played.windows for attempt in window.rejected)
    assert in_windows + rejected == total
    assert counts["trained"] == in_windows
    assert all(attempt.reason for window in played.windows for attempt in window.rejected)
    assert [segment.index for segment in played.rollout.segments] == list(range(len(played.rollout.segments)))


def the_budget_is_a_hard_bound(played: Played) -> None:
    """2: no request is longer than C; while a compaction is left, the reserve stays free at each response."""
    config, left = played.config, played.config.max_compactions
    asked = iter(played.sampler.requests)
    for window in played.windows:
        for (_, _, kind), request in zip(requests_of(window), asked, strict=False):
            size = len(request.prompt) + request.max_tokens
            assert size <= config.budget
            if kind == "response":
                assert config.min_response <= request.max_tokens <= config.response_tokens
                assert size + (played.reserve if left else 0) <= config.budget
            else:
                assert request.max_tokens == config.summary_tokens
        assert len(window) <= config.budget
        left -= 1
    assert played.rollout.compactions <= config.max_compactions


def windows_only_grow(played: Played) -> None:
    """3: each request's prompt is the whole window so far, and the ledger holds the very ids that came back."""
    asked = iter(played.sampler.requests)
    for window in played.windows:
        last_response = 0
        for prompt, ids, kind in requests_of(window):
            request = next(asked)
            assert request.sampled == ids
            if kind == "rejected":
                assert request.prompt[:last_response] == window.token_ids[:last_response]
                assert len(request.prompt) > last_response
            else:
                assert request.prompt == prompt
                last_response = len(prompt) + len(ids)
        assert len(window.segment_ids) == len(window.logprobs) == len(window.versions) == len(window)
    assert next(asked, None) is None


def steps_are_atomic(played: Played) -> None:
    """4: a tail is the last whole steps of the window just closed; only an observation that was too long may be clipped."""
    decode = played.chat.decode
    for number, window in enumerate(played.windows[1:], start=1):
        closed = played.windows[number - 1]
        available = [step for step in played.steps if step.window == number - 1]
        copied = [i for i, turn in enumerate(window.turns) if turn.note == "tail" and turn.role == "assistant"]
        oversize = any(turn.note == "placeholder" for turn in closed.turns)
        assert len(copied) <= max(played.config.tail_steps, oversize)
        assert len(copied) >= oversize
        for index, step in zip(copied, available[len(available) - len(copied) :], strict=True):
            turn = window.turns[index]
            assert window.token_ids[turn.start : turn.end] == step.ids
            answers = played.after(window, index)
            clipped = {answer.note for answer in answers} == {"clipped"}
            assert clipped <= (oversize and index == copied[-1])
            shown = [decode(window.token_ids[answer.start : answer.end]) for answer in answers]
            assert step.texts is not None
            if not clipped:
                assert_shown(played.chat, step, shown)
            elif not step.calls:
                assert "tokens cut ...]" in shown[0]
        opened = next(turn.end for turn in reversed(window.turns) if turn.note in ("tail", "clipped", "resume"))
        if played.config.budget - opened < played.config.threshold:
            assert oversize
            assert len(copied) == 1


def assert_shown(chat: ChatFormat, step: Step, shown: list[str]) -> None:
    texts = [text.replace("\ufdd0", "\ufffd") for text in step.texts or []]
    assert len(shown) == (step.calls or 1)
    if not step.calls:
        texts = ["\n".join(texts)]
    elif is_llama(chat):
        texts = [json.dumps(text, ensure_ascii=False) for text in texts]  # as Llama's template does
    else:
        assert all("<tool_response>" in answer and "</tool_response>" in answer for answer in shown)
    assert all(text in answer for text, answer in zip(texts, shown, strict=True))


def no_call_stays_unanswered(played: Played) -> None:
    """4: every response is followed by one answer per native call, else by one user message; only the very last is not."""
    by_place = {(step.window, step.turn): step for step in played.steps}
    for number, window in enumerate(played.windows):
        last_steps = [step for step in played.steps if step.window == number - 1]
        copied = [i for i, turn in enumerate(window.turns) if turn.note == "tail" and turn.role == "assistant"]
        copies = dict(zip(copied, last_steps[len(last_steps) - len(copied) :], strict=True))
        for index, turn in enumerate(window.turns):
            if turn.role != "assistant" or turn.note.startswith("summary"):
                continue
            step = copies.get(index) or by_place[number, index]
            answers = played.after(window, index)
            if number == len(played.windows) - 1 and index == len(window.turns) - 1:
                assert not answers
                continue
            request = [answer for answer in answers if answer.note == "summary request"]
            assert answers[len(answers) - len(request) :] == request
            roles = [answer.role for answer in answers[: len(answers) - len(request)]]
            assert roles == (["tool"] * step.calls or ["user"])


def text_opens_no_turn(played: Played) -> None:
    """Each stretch of context has the special tokens that it would have with harmless texts in it."""
    chat, tools = played.chat, played.environment.tools
    for window in played.windows:
        first = next((i for i, turn in enumerate(window.turns) if turn.role == "assistant"), len(window.turns))
        roles = [turn.role for turn in window.turns[:first]]
        opening = [Span(turn.role, window.token_ids[turn.start : turn.end]) for turn in window.turns[:first]]
        assert special(chat, opening) == special(chat, chat.prompt(harmless(roles), tools))
        for index, turn in enumerate(window.turns):
            answers = played.after(window, index)
            if turn.role != "assistant" or not answers:
                continue
            before = window.turns[index - 1]
            expected = chat.extend(
                window.token_ids[before.start : before.end],
                window.token_ids[turn.start : turn.end],
                harmless([answer.role for answer in answers]),
                tools,
            )
            found = [Span(answer.role, window.token_ids[answer.start : answer.end]) for answer in answers]
            assert special(chat, found) == special(chat, expected)


def harmless(roles: list[str]) -> list[Message]:
    return [{"role": role, "content": "w0", "name": "w0", "tool_call_id": "w0"} for role in roles]  # type: ignore[typeddict-unknown-key]


def special(chat: ChatFormat, spans: list[Span]) -> list[int]:
    return [i for span in spans for i in span.ids if i in chat.tokenizer.special_ids]


CHECKS = [
    one_count_of_sampled_tokens,
    the_budget_is_a_hard_bound,
    windows_only_grow,
    steps_are_atomic,
    no_call_stays_unanswered,
    text_opens_no_turn,
]


@given(seed=st.integers(0, 2**32))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_invariants(chat: ChatFormat, seed: int) -> None:
    played = random_rollout(seed, chat)
    if played is not None:
        for check in CHECKS:
            check(played)


def test_the_random_rollouts_reach_what_the_invariants_are_about(chat: ChatFormat) -> None:
    """Else the properties above would hold for nothing."""
    found: set[str] = set()
    for seed in range(160):
        played = random_rollout(seed, chat)
        if played is None:
            found.add("does not fit")
            continue
        notes = {turn.note for window in played.windows for turn in window.turns}
        found |= notes | {played.rollout.end}
        found |= {attempt.reason for window in played.windows for attempt in window.rejected}
        found |= {f"{step.calls} calls" for step in played.steps} | {f"{len(played.windows)} windows"}
        found |= {"cut"} if played.rollout.cut_responses else set()
    never = {"summary (only thinking)", "only thinking", "2 calls", "3 calls"} if is_llama(chat) else set()
    assert found | never >= {
        *("does not fit", "submitted", "turns", "budget"),
        *("tail", "clipped", "placeholder", "summary", "summary (cut)", "summary (only thinking)"),
        *("cut", "empty", "only thinking", "only a tool call"),
        *("0 calls", "1 calls", "2 calls", "3 calls", "1 windows", "4 windows"),
    }
