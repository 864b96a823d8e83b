"""Terminus-2's hand-off as the untrained baseline: three requests a compaction, each within C, all counted by hand.

With the "qwen3" format and a word per token: system 5 + task 5 + opening 2 = 12, a step 2 + (1 + 44 + 2) with 40 words observed.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rollout_stubs import (
    TOOLS,
    Cut,
    Entry,
    Request,
    ScriptedEnvironment,
    ScriptedSampler,
    call,
    chat_format,
    context,
    ids_of,
    play,
    reply,
    text_of,
    token,
    words,
)
from test_invariants import (
    Played,
    RandomEnvironment,
    RandomSampler,
    no_call_stays_unanswered,
    steps,
    steps_are_atomic,
    text_opens_no_turn,
)
from test_text_invariants import (
    Counts,
    RandomEndpoint,
    ReadableFormat,
    Recorder,
    every_sampled_piece_is_excluded_or_rejected_by_name,
    windows_say_what_was_said,
)

from compactionrl.config import ConfigError, ContextConfig, load_config
from compactionrl.environments.protocol import Message
from compactionrl.evaluation.behaviour import behaviour
from compactionrl.evaluation.rollout_file import from_json, to_json
from compactionrl.evaluation.usage import usage
from compactionrl.rollout.budget import ContextBudget
from compactionrl.rollout.chat import ChatFormat, length
from compactionrl.rollout.chat_sampler import ChatSampler
from compactionrl.rollout.handoff import UNEXECUTED
from compactionrl.rollout.ledger import Rollout, Window
from compactionrl.rollout.strategy import filled
from compactionrl.rollout.text_chat import TextFormat
from compactionrl.samplers.protocol import Reply, Sampled
from compactionrl.show import show

pytest_plugins = ["chat_formats"]
OPENING = "<|im_start|>assistant\n"
HEAD = "<|im_start|>system\nsystem<|im_end|>\n<|im_start|>user\ntask<|im_end|>\n"
ASKED = {
    "handoff_request": "w90 {task}",
    "questions_request": "w91 {summary} w92 {observation}",
    "answers_request": "w93 {questions}",
    "handoff_template": "w94 {summary} w95 {questions} w96 {answers}",
}
# "later" 5, "w90 task" or "again please" 6, opening 2, what a response cut within its thinking lacks 3
FIRST = 16
# "w93 " 6, opening 2, 3 again
FURTHER = 11
RESERVE = FIRST + FURTHER + 3 * 10


def handoff(**changes: Any) -> ContextConfig:
    """C = 210, T_comp = 70: the third step of 49 brings 12 to 159 > 140."""
    sizes = {"budget": 210, "threshold": 70, "summary_tokens": 10}
    return context(**{"strategy": "handoff", **ASKED, **sizes, **changes})


def handed(
    texts: Sequence[Entry] = ("w9 w8", "w50 w51", "w60 w61 w62"), config: ContextConfig | None = None, **options: Any
) -> tuple[Rollout, ScriptedSampler]:
    """Three steps fill the first window, then come the texts of a hand-off, and one more step."""
    sampler = ScriptedSampler(["w1", "w2", "w3", *texts, "w4"])
    observations = [words(40, 40), words(40, 41), words(40, 42), "w1"]
    rollout = play(ScriptedEnvironment(observations, steps=4, **options), sampler, config or handoff())
    assert rollout.end == "submitted"
    return rollout, sampler


# ---------------------------------------------------------------- what is asked, and where


def test_three_requests_make_a_hand_off() -> None:
    """The summary in the full window, questions in a fresh one, answers behind the summary; the next opens with all three."""
    rollout, sampler = handed()
    closing, asking, resumed = (text_of(rollout, i) for i in range(3))
    step = "<|im_start|>user\n{}<|im_end|>\n"
    assert closing == (
        f"{HEAD}{OPENING}w1<|im_end|>\n{step.format(words(40, 40))}{OPENING}w2<|im_end|>\n{step.format(words(40, 41))}"
        f"{OPENING}w3<|im_end|>\n{step.format(words(40, 42))}"
        f"<|im_start|>user\nw90 task<|im_end|>\n{OPENING}w9 w8<|im_end|>\n"
        f"<|im_start|>user\nw93 w50 w51<|im_end|>\n{OPENING}w60 w61 w62<|im_end|>"
    )
    assert asking == (f"{HEAD}<|im_start|>user\nw91 w9 w8 w92 {words(40, 42)}<|im_end|>\n{OPENING}w50 w51<|im_end|>")
    assert resumed == (
        f"{HEAD}<|im_start|>user\nw94 w9 w8 w95 w50 w51 w96 w60 w61 w62<|im_end|>\n"
        f"{OPENING}w2<|im_end|>\n{step.format(words(40, 41))}{OPENING}w3<|im_end|>\n{step.format(words(40, 42))}"
        f"{OPENING}w4<|im_end|>"
    )
    # 112 up to the third response, 45 observed, "w90 task" 6, opening 2; 5 + 5 + 48 + 2; 165 + 3 sampled + 1 + 7 + 2.
    assert [len(request.prompt) for request in sampler.requests[3:6]] == [165, 60, 178]
    assert [request.max_tokens for request in sampler.requests[3:6]] == [10, 10, 10]


def test_the_ledger_keeps_every_token_and_counts_one_compaction() -> None:
    rollout, sampler = handed()
    assert rollout.compactions == 1
    assert [window.aside for window in rollout.windows] == [False, True, False]
    why = "hand-off is not trained"
    assert [(segment.kind, segment.index, segment.excluded) for segment in rollout.segments] == [
        ("execution", 0, None),
        ("summary", 1, why),
        ("summary", 2, why),
        ("execution", 3, None),
    ]
    assert [[segment.index for segment in window.segments] for window in rollout.windows] == [[0, 1], [2], [3]]
    assert rollout.token_counts() == {"sampled": 8 + 3 + 3 + 4, "trained": 8, f"excluded: {why}": 10}
    assert [turn.note for turn in rollout.windows[0].turns[-4:]] == [
        *("summary request", "summary", "answers request", "summary answers")
    ]
    assert [turn.note for turn in rollout.windows[1].turns] == [
        *("task", "task", "questions request", "summary questions")
    ]
    sampled = [i for request in sampler.requests for i in request.sampled]
    assert sorted(sampled) == sorted(
        i
        for window in rollout.windows
        for i, segment in zip(window.token_ids, window.segment_ids, strict=True)
        if segment >= 0
    )


def test_the_summary_strategy_asks_once_and_is_trained() -> None:
    rollout, sampler = handed(["w9 w8"], handoff(strategy="summary"))
    assert len(sampler.requests) == 5
    assert text_of(rollout, 0).endswith(f"<|im_start|>user\nsummarise<|im_end|>\n{OPENING}w9 w8<|im_end|>")
    assert rollout.token_counts() == {"sampled": 11, "trained": 11}


@pytest.mark.parametrize("k", [0, 1, 2])
def test_the_tail_follows_the_same_rule(k: int) -> None:
    rollout, _ = handed(config=handoff(tail_steps=k))
    assert [turn.note for turn in rollout.windows[2].turns].count("tail") == 2 * k


def test_compactions_left_are_those_of_whole_hand_offs() -> None:
    sampler = ScriptedSampler(["w1"])
    rollout = play(ScriptedEnvironment([words(50)]), sampler, handoff(max_compactions=2, tail_steps=0))
    assert (rollout.end, rollout.compactions, len(rollout.windows)) == ("budget", 2, 5)


def test_a_brace_in_a_text_is_no_place_for_another() -> None:
    assert filled("{a} {b} {c}", {"a": "{b}", "b": "{a}"})["content"] == "{b} {a} {c}"
    rollout, _ = handed([[*ids_of("{answers}"), token("<|im_end|>")], "w50", "w60"])
    assert "w94 {answers} w95 w50 w96 w60<|im_end|>" in text_of(rollout, 2)


def test_only_the_summary_is_judged_and_asked_for_again() -> None:
    rollout, sampler = handed(["", Cut("w9"), "w8", Cut("w50 w50"), ""], handoff(summary_attempts=3))
    closing, asking, _ = rollout.windows
    assert [attempt.reason for attempt in closing.rejected] == ["empty", "cut"]
    assert (closing.turns[-3].note, closing.turns[-1].note) == ("summary", "summary answers (empty)")
    assert asking.turns[-1].note == "summary questions (cut)"
    assert asking.rejected == []
    assert f"w94 w8 w95 {' '.join(['w50'] * 10)} w96 <|im_end|>" in text_of(rollout, 2)
    assert len(sampler.requests) == 3 + 5 + 1
    counts = rollout.token_counts()
    assert counts == {
        "sampled": 8 + 1 + 10 + 2 + 10 + 1,
        "trained": 8,
        "excluded: hand-off is not trained": 2 + 10 + 1,
        "rejected: empty": 1,
        "rejected: cut": 10,
    }


def test_thinking_is_kept_in_the_ledger_and_not_handed_on() -> None:
    rollout, _ = handed(["<think>w7</think>w9", "<think>w7</think>w50", "<think>w7</think>w60"])
    assert token("<think>") not in rollout.windows[2].token_ids
    assert "w94 w9 w95 w50 w96 w60<|im_end|>" in text_of(rollout, 2)
    assert rollout.token_counts()["excluded: hand-off is not trained"] == 3 * 5


# ---------------------------------------------------------------- sizes


def test_the_reserve_holds_the_summary_the_questions_and_the_answers() -> None:
    measure = ContextBudget.measure
    assert measure(handoff(), chat_format()).reserve == RESERVE
    assert measure(handoff(summary_tokens=11), chat_format()).reserve == RESERVE + 3
    assert measure(handoff(answers_request="w93 w94 {questions}"), chat_format()).reserve == RESERVE + 1
    assert measure(handoff(max_compactions=0), chat_format()).reserve == 0
    # "w90" and nine words of the task take 8 more than "again please".
    assert measure(handoff(threshold=90), chat_format(), task=words(9)).reserve == RESERVE + 8


def test_the_reserve_holds_an_answer_to_each_call_in_the_summary() -> None:
    """Tool answers share one user turn: 4, and 5 each around "later" 1 or "[Not executed.]"."""
    unexecuted = len(chat_format().encode(UNEXECUTED))
    for calls in (1, 3):
        budget = ContextBudget.measure(handoff(max_calls=calls, budget=500, threshold=250), chat_format(), TOOLS)
        further = FURTHER + 4 + calls * (5 + unexecuted)
        assert budget.reserve == (FIRST - 5 + 4 + 6 * calls) + further + 30
        assert budget.behind == further + 20


def test_the_threshold_must_leave_room_for_all_of_it() -> None:
    ContextBudget.measure(handoff(threshold=RESERVE + 4), chat_format())
    with pytest.raises(ConfigError, match=rf"at least {RESERVE + 4}: a hand-off's framed.*3 x context\.summary_tokens"):
        ContextBudget.measure(handoff(threshold=RESERVE + 3), chat_format())


def test_the_worst_case_fills_the_window_to_the_last_token() -> None:
    """A response cut in its thinking, a summary too, the retry used, questions and answers cut."""
    config = handoff(response_tokens=50, summary_attempts=2, answers_request="{questions}", threshold=70 - 2)
    script = ["w1", Cut("<think>w1"), Cut("w1"), Cut("<think>w1"), Cut("w1 w2 w2"), Cut("w1"), "w1"]
    sampler = ScriptedSampler(script)
    rollout = play(ScriptedEnvironment([words(142 - 12 - 2 - 7), words(300), "w1"], steps=3), sampler, config)
    assert rollout.end == "submitted"
    response, _, retry, questions, answers = sampler.requests[1:6]
    assert (len(response.prompt), response.max_tokens) == (142, 210 - 142 - (RESERVE - 2))
    assert len(retry.prompt) == 142 + response.max_tokens + FIRST
    assert len(answers.prompt) + answers.max_tokens == 210
    assert len(questions.prompt) + questions.max_tokens == 210  # filled up with the observation, clipped
    assert "tokens cut" in chat_format().decode(questions.prompt)
    assert "tokens cut" in text_of(rollout, 2)
    assert "tokens cut" not in text_of(rollout, 0)


def test_texts_that_grow_when_they_are_encoded_again_lose_their_end() -> None:
    """Nine special tokens come back as 36 plain ones: none of the three may take more than its 10, wherever it is said."""
    marks = [token("<|im_start|>")] * 9 + [token("<|im_end|>")]
    rollout, sampler = handed([marks] * 3, handoff(tail_steps=0))
    closing = rollout.windows[0]
    questions, resume = sampler.requests[4].prompt, sampler.requests[6].prompt
    assert 59 < len(questions) <= 59 + 10  # 12, "w91  w92 " and 40 words 43 + 4
    asked = closing.turns[-2]
    assert 9 < asked.end - asked.start <= 9 + 10  # a line break, "w93 " 6, opening 2
    assert 22 < len(resume) <= 22 + 3 * 10  # 12, "w94  w95  w96 " 6 + 4
    assert [prompt.count(token("<|im_start|>")) for prompt in (questions, resume)] == [4, 4]


@pytest.mark.parametrize("n", range(175, 190))
def test_questions_see_as_much_of_the_observation_as_fits(n: int) -> None:
    """12 + "w91 w9 w92" 7 and the observation: whole up to 181 words, 210 - 10 - 19; longer ones lose their middle."""
    observation = words(n)
    sampler = ScriptedSampler(["w1", "w9", "w50", "w60", "w2"])
    rollout = play(ScriptedEnvironment([observation, "w1"], steps=2), sampler, handoff())
    assert rollout.end == "submitted"
    asked = sampler.requests[2]
    assert len(asked.prompt) + asked.max_tokens <= 210
    shown = chat_format().decode(asked.prompt)
    assert (observation in shown) == (n <= 181)
    if n <= 181:
        assert len(asked.prompt) == 19 + n
    else:
        assert len(asked.prompt) >= 199
        assert words(80) in shown
        assert observation[-80:] in shown


@pytest.mark.parametrize(
    ("task", "changes", "error"),
    [
        # first request 16 + n - 1 - 1, then 11 + 30 + min_response 4: 70 holds up to n = 10
        (10, {}, None),
        (11, {}, "context.threshold (70) must be at least 71: a hand-off's framed requests (37 tokens)"),
        # system 5, task n + 4, opening 2; "w94  w95  w96 " 6 + 4; three texts 30: 96 = 210 - 110 - 4 leaves n = 45
        (45, {"threshold": 110}, None),
        (46, {"threshold": 110}, "its shortest resumed context has 97 tokens"),
        # system 5, task 5, opening 2; n + "  w92 " 3 + 4, and two texts
        (1, {"questions_request": words(97) + " {summary} w92 {observation}"}, None),
        (1, {"questions_request": words(98) + " {summary} w92 {observation}"}, "fresh context of its hand-off has 137"),
        (500, {"max_compactions": 0, "budget": 520}, None),
    ],
)
def test_a_task_that_a_hand_off_cannot_carry_is_refused_before_anything_is_sampled(
    task: int, changes: dict[str, Any], error: str | None
) -> None:
    messages = [{"role": "system", "content": "system"}, {"role": "user", "content": words(task)}]
    sampler = ScriptedSampler(["w1"])
    rollout = play(ScriptedEnvironment(steps=1, messages=messages), sampler, handoff(**changes))
    if error is None:
        assert rollout.end == "submitted"
        return
    assert (rollout.end, rollout.retryable, sampler.requests) == ("error", False, [])
    assert str(rollout.error).startswith("task does not fit")
    assert error in str(rollout.error)


# ---------------------------------------------------------------- calls, other writers, texts


def test_calls_in_a_hand_off_are_answered_and_never_executed() -> None:
    config = handoff(budget=600, threshold=300, summary_tokens=45, max_calls=2, tail_steps=0)
    two = "w9" + call() + call()
    for summary, roles in ((two, ["tool", "tool"]), (two + call(), []), ("w9", [])):
        sampler = ScriptedSampler(["w1", summary, "w50" + call(), "w60" + call(), "w2"])
        environment = ScriptedEnvironment([words(330), "w1"], steps=2, tools=TOOLS)
        rollout = play(environment, sampler, config)
        assert (rollout.end, rollout.compactions, len(environment.responses)) == ("submitted", 1, 2)
        closing = rollout.windows[0]
        answered = [turn for turn in closing.turns if turn.note == "not executed"]
        assert [turn.role for turn in answered] == roles
        for turn in answered:
            assert UNEXECUTED in chat_format().decode(closing.token_ids[turn.start : turn.end])
        called = " (with a tool call, not executed)"
        assert closing.turns[-1].note == "summary answers" + called
        assert rollout.windows[1].turns[-1].note == "summary questions" + called
        assert "w94 w9 w95 w50 w96 w60<|im_end|>" in text_of(rollout, 2)


def test_another_summariser_writes_all_three() -> None:
    other = ScriptedSampler(["", "w9", "w50", "w60"])
    policy = ScriptedSampler(["w1", "w2", "w3", "w4"])
    rollout = play(ScriptedEnvironment([words(40)] * 3 + ["w1"], steps=4), policy, handoff(), summariser=other)
    assert (len(policy.requests), len(other.requests)) == (4, 4)
    assert rollout.token_counts() == {
        "sampled": 8 + 6 + 1,
        "trained": 8,
        "excluded: hand-off is not trained": 6,
        "rejected: empty": 1,
    }
    assert "w94 w9 w95 w50 w96 w60" in text_of(rollout, 2)


class Spoken:
    """Completes chats with the entries of a script, the last one for ever."""

    def __init__(self, script: Sequence[str]) -> None:
        self.script, self.asked = script, list[Sequence[dict[str, Any]]]()

    async def complete(self, messages: Sequence[Any], **_: Any) -> Reply:
        self.asked.append(messages)
        return Reply(self.script[min(len(self.asked), len(self.script)) - 1])


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


SYSTEM = {"role": "system", "content": "system"}


def test_a_summariser_that_completes_chats_reads_what_the_windows_say() -> None:
    other = Spoken(["w9", "w50", "w60"])
    policy = ScriptedSampler(["w1", "w2", "w3", "w4"])
    seen = [words(40, 40), words(40, 41), words(40, 42)]
    rollout = play(ScriptedEnvironment([*seen, "w1"], steps=4), policy, handoff(), summariser=other)
    assert rollout.end == "submitted"
    before = [SYSTEM, user("task"), assistant("w1"), user(seen[0]), assistant("w2"), user(seen[1]), assistant("w3")]
    before.append(user(f"{seen[2]}\n\nw90 task"))
    assert other.asked == [
        before,
        [SYSTEM, user(f"task\n\nw91 w9 w92 {seen[2]}")],
        [*before, assistant("w9"), user("w93 w50")],
    ]
    assert "w94 w9 w95 w50 w96 w60<|im_end|>" in text_of(rollout, 2)


def test_an_endpoint_of_text_hands_off_too() -> None:
    """A word and its space are two or three pieces there; what is sent is what the windows say."""
    endpoint = Spoken(["w1", "w9", "w50", "w60", "w2"])
    config = handoff(budget=1200, threshold=500, summary_tokens=40)
    observation = words(300)
    rollout = play(ScriptedEnvironment([observation, "w3"], steps=2), ChatSampler(endpoint), config, chat=TextFormat())
    assert (rollout.end, rollout.compactions, rollout.approximate) == ("submitted", 1, True)
    closing = [SYSTEM, user("task"), assistant("w1"), user(f"{observation}\n\nw90 task")]
    assert endpoint.asked[1] == closing
    assert endpoint.asked[2] == [SYSTEM, user(f"task\n\nw91 w9 w92 {observation}")]
    assert endpoint.asked[3] == [*closing, assistant("w9"), user("w93 w50")]
    resumed = endpoint.asked[4]
    assert resumed[:2] == [SYSTEM, user("task\n\nw94 w9 w95 w50 w96 w60")]
    assert rollout.token_counts()["trained"] == 0


# ---------------------------------------------------------------- what survives


class Forgetful:
    """Plays by what its prompt says. Its summaries leave out what was learned; asked for it, it looks."""

    def __init__(self) -> None:
        self.requests: list[str] = []

    async def sample(self, token_ids: Sequence[int], *, max_tokens: int, **_: Any) -> Sampled:
        prompt = chat_format().decode(token_ids)
        self.requests.append(prompt)
        last = prompt.split("<|im_start|>user\n")[-1].split("<|im_end|>")[0].split()
        known = prompt.split("w70 ")[1].split()[0].removesuffix("<|im_end|>") if "w70 " in prompt else "w0"
        if last[0] in ("w90", "summarise"):
            return reply("w9", max_tokens)
        if last[0] == "w91":
            return reply("w70?", max_tokens)
        return reply(f"w70 {known}" if last[0] == "w93" else known if last[0] == "w80" else "w1", max_tokens)

    async def release(self, affinity: str) -> None:
        pass


@pytest.mark.parametrize(("strategy", "answer"), [("summary", "w0"), ("handoff", "w77")])
def test_a_fact_that_the_summary_leaves_out_survives_in_the_answers(strategy: str, answer: str) -> None:
    config = handoff(strategy=strategy, tail_steps=0)
    environment = ScriptedEnvironment(["w70 w77", words(60), words(60), "w80", "w1"], steps=5)
    rollout = play(environment, Forgetful(), config)
    assert rollout.compactions == 1
    assert environment.responses[-1].text == answer


# ---------------------------------------------------------------- what reads rollouts


def test_files_figures_and_people_read_it() -> None:
    rollout, sampler = handed()
    again = from_json(json.loads(json.dumps(to_json(rollout))))
    assert to_json(again) == json.loads(json.dumps(to_json(rollout)))
    assert (again.compactions, again.token_counts()) == (1, rollout.token_counts())
    spent = usage(again)
    asked = sampler.requests[3:6]
    assert spent["summary"].requests == 3
    assert spent["summary"].prompt == sum(len(request.prompt) for request in asked)
    assert spent["summary"].sampled == 3 + 3 + 4
    assert behaviour([again])["compactions"] == 1.0
    lines = [line.plain for line in show(again, chat_format().decode, handoff())]
    assert "3 windows, 1 compactions" in lines[1]
    assert any("[summary questions] w50 w51" in line for line in lines)
    assert any("[summary answers] w60 w61 w62" in line for line in lines)


def test_training_refuses_it_by_name_and_evaluation_does_not() -> None:
    config = load_config(None, {"context.strategy": "handoff", "context.summary_tokens": 2560})
    with pytest.raises(ConfigError, match=r"context\.strategy 'handoff' is for evaluation only"):
        config.check_trainable()
    load_config().check_trainable()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"summary_tokens": 3400}, "no room for a summary of 3 x context.summary_tokens (3400)"),
        ({"summary_tokens": 2560, "budget": 18176}, "3 x context.summary_tokens (2560) + context.threshold (10240)"),
        ({"handoff_request": "go"}, "context.handoff_request must contain {task}"),
        ({"questions_request": "{summary}"}, "context.questions_request must contain {observation}"),
        ({"answers_request": "go"}, "context.answers_request must contain {questions}"),
        ({"handoff_template": "{summary} {answers}"}, "context.handoff_template must contain {questions}"),
        ({"strategy": "both"}, "context.strategy"),
    ],
)
def test_a_hand_off_that_cannot_work_is_refused_with_its_key(changes: dict[str, Any], expected: str) -> None:
    keys = {"strategy": "handoff", "summary_tokens": 2560, **changes}
    with pytest.raises(ConfigError) as refused:
        load_config(None, {f"context.{key}": value for key, value in keys.items()})
    assert expected in str(refused.value)


def test_the_prompts_hash_follows_the_prompts_of_the_strategy() -> None:
    def hashed(**changes: Any) -> str:
        return handoff(**changes).prompts_hash

    paper = {"strategy": "summary"}
    assert hashed(**paper) == context().prompts_hash  # whatever a hand-off would say
    changes = [{}, {"handoff_request": "{task}"}, {"questions_request": "{summary} {observation}"}, paper]
    changes += [{"answers_request": "{questions}"}, {"handoff_template": "{summary} {questions} {answers}"}]
    changes += [{"retry_request": "w1"}, {"placeholder": "w1"}]
    assert len({hashed(**change) for change in changes}) == len(changes)


# ---------------------------------------------------------------- invariants 1 to 4, for any policy and any environment


class Remembering(RandomEnvironment):
    """Which task it gave."""

    async def start(self) -> list[Message]:
        messages = await super().start()
        self.task = messages[-1]["content"]
        return messages


class PlayedHandoff(Played):
    @property
    def windows(self) -> list[Window]:
        """Those in which somebody acts."""
        return [
            window for window in self.rollout.windows if window.turns[-1].note.split(" (")[0] != "summary questions"
        ]

    @property
    def everything(self) -> Played:
        return Played(**vars(self))


def random_handoff(rng: random.Random, chat: ChatFormat, tools: Any) -> ContextConfig:
    sizes: dict[str, Any] = {
        "summary_tokens": rng.randrange(1, 40),
        "min_response": rng.randrange(1, 10),
        "max_compactions": rng.randrange(1, 4),
        "tail_steps": rng.randrange(4),
        "summary_attempts": rng.randrange(1, 4),
        "max_calls": 3,
        "placeholder": words(rng.randrange(1, 4)),
        "retry_request": words(rng.randrange(1, 9)),
        "handoff_request": words(rng.randrange(9)) + " {task}",
        "questions_request": words(rng.randrange(9)) + " {summary} {observation}" + words(rng.randrange(4)),
    }
    roomy = handoff(**sizes, budget=10**6, threshold=10**4)
    reserve = ContextBudget.measure(roomy, chat, tools).reserve
    threshold = reserve + sizes["min_response"] + rng.choice([0, 30, 120, 240])
    prompt = length(chat.prompt([{"role": "user", "content": words(12)}], tools)) + 10
    budget = threshold + sizes["min_response"] + 3 * sizes["summary_tokens"] + prompt + rng.randrange(300)
    response_tokens = sizes["min_response"] + rng.choice([0, rng.randrange(60)])
    return handoff(**sizes, budget=budget, threshold=threshold, response_tokens=response_tokens)


def random_played(seed: int, chat: ChatFormat, counts: Counts | None = None) -> PlayedHandoff | None:
    """None for a task that does not fit. `counts`: of an endpoint of text."""
    rng = random.Random(seed)
    tools = TOOLS if rng.random() < 0.5 else None
    config = random_handoff(rng, chat, tools)
    sampler: Any = RandomSampler(chat, rng) if counts is None else Recorder(RandomEndpoint(rng, counts))
    environment = Remembering(rng, config.budget, tools, chat)
    rollout = play(environment, sampler, config, chat=chat, turns=rng.choice([5, 30]))
    if rollout.end == "error":
        assert str(rollout.error).startswith("task does not fit"), rollout.error
        assert not sampler.requests
        return None
    reserve = ContextBudget.measure(config, chat, tools, environment.task).reserve
    played = PlayedHandoff(rollout, sampler, environment, chat, config, reserve, [])
    played.steps = list(steps(played))
    return played


def in_order(played: Played) -> Iterator[tuple[Window, int, str, Request]]:
    """(window, where in it, kind, request) of everything that was asked, in the order in which it was."""
    sampled = []
    for number, window in enumerate(played.rollout.windows):
        for index, turn in enumerate(window.turns):
            if turn.end > turn.start and window.segment_ids[turn.start] >= 0:
                # The answers come behind the questions, which are the next window.
                last = turn.note.startswith("summary answers")
                sampled.append((number + last, last, index, window))
    asked = iter(played.sampler.requests)
    for _, _, index, window in sorted(sampled, key=lambda item: item[:3]):
        kind = window.turns[index].note.split(" (")[0] or "response"
        for attempt in window.rejected if kind == "summary" else ():
            request = next(asked)
            assert request.sampled == attempt.token_ids
            yield window, index, "rejected", request
        yield window, index, kind, next(asked)
    assert next(asked, None) is None


def every_token_is_kept_once(played: Played) -> None:
    counts = played.rollout.token_counts()
    total = sum(len(request.sampled) for request in played.sampler.requests)
    assert counts["sampled"] == total == sum(n for name, n in counts.items() if name != "sampled")
    kinds = dict.fromkeys(("response", "rejected", "summary", "summary questions", "summary answers"), 0)
    for _, _, kind, request in in_order(played):
        kinds[kind] += len(request.sampled)
    excluded = kinds["summary"] + kinds["summary questions"] + kinds["summary answers"]
    assert counts.get("excluded: hand-off is not trained", 0) == excluded
    assert sum(n for name, n in counts.items() if name.startswith("rejected")) == kinds["rejected"]
    assert [segment.index for segment in played.rollout.segments] == list(range(len(played.rollout.segments)))


def a_hand_off_counts_once(played: Played) -> None:
    kinds = [kind for _, _, kind, _ in in_order(played)]
    assert kinds.count("summary") == kinds.count("summary questions") == played.rollout.compactions
    following = "".join(
        {"summary": "s", "summary questions": "q", "summary answers": "a"}.get(kind, ".") for kind in kinds
    )
    assert following.count("sq") == played.rollout.compactions
    assert following.count("sqa") == kinds.count("summary answers")
    assert played.rollout.compactions <= played.config.max_compactions


def windows_only_grow(played: Played) -> None:
    for window, index, kind, request in in_order(played):
        turn = window.turns[index]
        if kind == "rejected":
            last = max(t.end for t in window.turns[:index] if t.role == "assistant")
            assert request.prompt[:last] == window.token_ids[:last]
            assert len(request.prompt) > last
        else:
            assert request.prompt == window.token_ids[: turn.start]
            assert request.sampled == window.token_ids[turn.start : turn.end]
        assert len(window.segment_ids) == len(window.logprobs) == len(window.versions) == len(window)


def no_request_is_longer_than_c(played: Played) -> None:
    left = played.config.max_compactions
    for _, _, kind, request in in_order(played):
        size = len(request.prompt) + request.max_tokens
        assert size <= played.config.budget
        if kind == "response":
            assert played.config.min_response <= request.max_tokens <= played.config.response_tokens
            assert size + (played.reserve if left else 0) <= played.config.budget
        else:
            assert request.max_tokens == played.config.summary_tokens
        left -= kind == "summary"


def calls_in_the_texts_are_answered(played: Played) -> None:
    """Also in a summary, behind which the window goes on; where there are too many, none is."""
    chat, tools = played.chat, played.environment.tools
    for window in played.rollout.windows:
        for index, turn in enumerate(window.turns[:-1]):
            if turn.note.split(" (")[0] != "summary":
                continue
            before = window.turns[index - 1]
            ids = window.token_ids
            calls = chat.parse(ids[before.start : before.end], ids[turn.start : turn.end], False, tools).calls
            roles = [following.role for following in window.turns[index + 1 : -1]]
            assert roles == ["tool"] * (len(calls) if tools and len(calls) <= 3 else 0) + ["user"]


def texts_open_no_turn(played: PlayedHandoff) -> None:
    text_opens_no_turn(played.everything)


CHECKS = [
    every_token_is_kept_once,
    a_hand_off_counts_once,
    windows_only_grow,
    no_request_is_longer_than_c,
    steps_are_atomic,
    no_call_stays_unanswered,
    calls_in_the_texts_are_answered,
    texts_open_no_turn,
]


@given(seed=st.integers(0, 2**32))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_invariants(chat: ChatFormat, seed: int) -> None:
    played = random_played(seed, chat)
    if played is not None:
        for check in CHECKS:
            check(played)  # type: ignore[operator]


def the_best_count_keeps_c(played: Played) -> None:
    """|h| as it was counted last, what came behind it, and the request's limit, fit into C: answers included."""
    left = played.config.max_compactions
    for window, index, kind, request in in_order(played):
        heard = [turn for turn in window.turns[:index] if turn.reported]
        n = len(request.prompt)
        used = heard[-1].reported.context + n - heard[-1].end if heard else n  # type: ignore[union-attr]
        if kind in ("response", "summary questions", "summary answers"):
            reserve = played.reserve if left and kind == "response" else 0
            assert used + request.max_tokens + reserve <= played.config.budget
        left -= kind == "summary"


TEXT_CHECKS = [a_hand_off_counts_once, windows_only_grow, steps_are_atomic, no_call_stays_unanswered]
TEXT_CHECKS += [calls_in_the_texts_are_answered, every_sampled_piece_is_excluded_or_rejected_by_name]


@given(seed=st.integers(0, 2**32), counts=st.sampled_from(["none", "some", "all"]))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_invariants_on_endpoints_of_text(seed: int, counts: Counts) -> None:
    played = random_played(seed, ReadableFormat(), counts)
    if played is not None:
        for check in [*TEXT_CHECKS, no_request_is_longer_than_c if counts == "none" else the_best_count_keeps_c]:
            check(played)
        texts_open_no_turn(played)
        windows_say_what_was_said(played.everything)


def test_the_random_rollouts_reach_what_the_invariants_are_about() -> None:
    found: set[str] = set()
    for seed in range(120):
        for played in (
            random_played(seed, chat_format()),
            random_played(seed, ReadableFormat(), ("none", "some", "all")[seed % 3]),
        ):
            if played is None:
                found.add("does not fit")
                continue
            kind = "text" if played.rollout.approximate else "tokens"
            for window in played.rollout.windows:
                found |= {f"{kind}: {turn.note}" for turn in window.turns} | {
                    attempt.reason for attempt in window.rejected
                }
                spoken = played.chat.decode(window.token_ids)
                found |= {"observation clipped"} if window.aside and "tokens cut" in spoken else set()
            found |= {played.rollout.end, f"{played.rollout.compactions} compactions"}
    texts = ("summary", "summary questions", "summary answers")
    assert found >= {
        *("does not fit", "submitted", "turns", "budget", "0 compactions", "3 compactions", "observation clipped"),
        *("cut", "empty", "only thinking", "only a tool call"),
        *(
            f"{kind}: {text}{how}"
            for kind in ("text", "tokens")
            for text in texts
            for how in ("", " (cut)", " (empty)")
        ),
        *("tokens: not executed", "text: not executed", "tokens: placeholder", "text: placeholder", "tokens: clipped"),
    }
