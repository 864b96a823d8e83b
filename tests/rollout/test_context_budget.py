"""The budget: E7's boundary, the reserve, response caps, and tasks that can never fit. All counts by hand."""

from __future__ import annotations

import pytest
from rollout_stubs import TOOLS, Cut, ScriptedEnvironment, ScriptedSampler, chat_format, context, play, words

from compactionrl.config import ConfigError
from compactionrl.rollout.budget import ContextBudget, TaskDoesNotFit
from compactionrl.rollout.chat import Span

# system 5 + task 5 + the policy's opening 2
PROMPT = 12
# "later" 5 + "again please" 6 + opening 2 + what a response cut within its thinking lacks: </think>, <|im_end|>, "\n"
FRAMED = 16


def test_the_reserve_is_what_a_compaction_needs_at_most() -> None:
    assert ContextBudget.measure(context(summary_tokens=20), chat_format()).reserve == FRAMED + 20
    assert ContextBudget.measure(context(summary_tokens=21), chat_format()).reserve == FRAMED + 21
    assert ContextBudget.measure(context(summary_request=words(9)), chat_format()).reserve == FRAMED + 7 + 20
    assert ContextBudget.measure(context(placeholder=words(4)), chat_format()).reserve == FRAMED + 3 + 20


def test_the_reserve_holds_an_answer_to_each_native_call() -> None:
    """Tool answers share one user turn: "<|im_start|>user" 2, each "\\n<tool_response>\\nlater\\n</tool_response>" 6, end 2."""
    for calls in (1, 2, 5):
        budget = ContextBudget.measure(context(max_calls=calls, threshold=100), chat_format(), TOOLS)
        assert budget.reserve == 3 + (2 + 6 * calls + 2) + 6 + 2 + 20


def test_with_compaction_off_nothing_is_reserved() -> None:
    assert ContextBudget.measure(context(max_compactions=0), chat_format()).reserve == 0


def test_the_threshold_must_leave_room_for_the_reserve_and_a_response() -> None:
    ContextBudget.measure(context(threshold=FRAMED + 20 + 4), chat_format())
    with pytest.raises(ConfigError, match=f"must be at least {FRAMED + 20 + 4}"):
        ContextBudget.measure(context(threshold=FRAMED + 20 + 3), chat_format())


def test_e7_triggers_below_the_threshold_and_not_at_it() -> None:
    budget = ContextBudget(context(budget=200, threshold=60), 36)
    assert not budget.triggers(140)
    assert budget.triggers(141)


@pytest.mark.parametrize(("extra", "compactions"), [(0, 0), (1, 1)])
def test_e7_counts_the_observation_and_the_opening_of_the_next_turn(extra: int, compactions: int) -> None:
    """Prompt 12, response "w1" and its stop 2, observation n + 7: C - |h| = T_comp for n = 119 does not trigger."""
    environment = ScriptedEnvironment([words(200 - 60 - PROMPT - 2 - 7 + extra)], steps=2)
    rollout = play(environment, ScriptedSampler(["w1"]), context(tail_steps=0))
    assert rollout.end == "submitted"
    assert rollout.compactions == compactions


def test_a_response_leaves_the_reserve_free_while_a_compaction_is_left() -> None:
    budget = ContextBudget(context(budget=200, response_tokens=50), reserve=36)
    assert [budget.response_cap(used, 1) for used in (0, 114, 115, 140)] == [50, 50, 49, 24]
    assert [budget.response_cap(used, 0) for used in (0, 150, 151, 190)] == [50, 50, 49, 10]


def test_each_request_gets_the_cap_of_its_window() -> None:
    """|h| = 140 = C - T_comp is the fullest window that still acts: 200 - 140 - reserve 36 = 24 tokens."""
    sampler = ScriptedSampler(["w1"])
    play(ScriptedEnvironment([words(119)], steps=2), sampler, context(response_tokens=50))
    assert [(len(request.prompt), request.max_tokens) for request in sampler.requests] == [(12, 50), (140, 24)]


def test_a_cut_response_and_a_whole_summary_still_fit() -> None:
    """The worst case fills the window to the last token: cut in its thinking, the observation does not fit, retried."""
    config = context(response_tokens=50, summary_attempts=2)
    environment = ScriptedEnvironment([words(119), words(150), "w1"], steps=3)
    sampler = ScriptedSampler(["w1", Cut("<think>w1"), Cut("w1"), Cut("w1"), "w1"])
    rollout = play(environment, sampler, config)
    assert rollout.end == "submitted"
    cut, summary, retry = sampler.requests[1:4]
    assert len(cut.sampled) == cut.max_tokens == 24
    assert len(summary.prompt) + summary.max_tokens == 199
    assert len(retry.prompt) + retry.max_tokens == 200


def test_the_last_window_has_no_reserve_and_no_trigger() -> None:
    """Two windows, one compaction: in the last the rollout goes on below the threshold until nothing fits."""
    sampler = ScriptedSampler(["w1", "w2 w3", "w4"])
    environment = ScriptedEnvironment([words(150), words(50, 1)])
    rollout = play(environment, sampler, context(max_compactions=1, tail_steps=0))
    assert rollout.end == "budget"
    assert rollout.compactions == 1
    # Resumed with system 5, "resume w2 w3" 7 and the opening 2; then three times a response of 2 and an observation of 57.
    assert [request.max_tokens for request in sampler.requests[2:]] == [20, 20, 20, 200 - 191]
    assert len(rollout.windows[-1]) == 14 + 3 * (2 + 57) + 2


def test_budget_ends_a_rollout_when_an_observation_and_min_response_no_longer_fit() -> None:
    """x1: 12 + 2 + (n + 7) + min_response 4 <= 200 holds up to n = 175. What does not fit is not appended."""
    for n, end, length in ((175, "turns", 12 + 2 + 182 + 2), (176, "budget", 12 + 2)):
        rollout = play(ScriptedEnvironment([words(n)]), ScriptedSampler(["w1"]), context(max_compactions=0), turns=2)
        assert (rollout.end, len(rollout.windows[0])) == (end, length)
        assert rollout.reward == 1.0


def test_x1_response_may_fill_the_window() -> None:
    sampler = ScriptedSampler(["w1", Cut("w2")])
    play(ScriptedEnvironment([words(175)]), sampler, context(max_compactions=0), turns=2)
    assert [request.max_tokens for request in sampler.requests] == [20, 4]


def spans(n: int) -> list[Span]:
    return [Span("user", [0] * n)]


def test_tasks_that_leave_less_than_threshold_and_min_response_are_refused() -> None:
    budget = ContextBudget(context(budget=200, threshold=60, min_response=4, summary_tokens=20), 36)
    budget.check_task(spans(136), spans(116))
    with pytest.raises(TaskDoesNotFit, match="its prompt has 137"):
        budget.check_task(spans(137), spans(10))
    with pytest.raises(TaskDoesNotFit, match="its shortest resumed context has 137"):
        budget.check_task(spans(10), spans(117))


def test_x1_refuses_only_what_leaves_less_than_min_response() -> None:
    budget = ContextBudget(context(max_compactions=0), 0)
    budget.check_task(spans(196), spans(500))
    with pytest.raises(TaskDoesNotFit):
        budget.check_task(spans(197), spans(500))


@pytest.mark.parametrize(
    ("system", "task", "config", "fits"),
    [
        # s + u: (n + 4) + 5 + 2 <= 136
        (125, 1, {}, False),
        (100, 26, {}, True),
        (100, 27, {}, False),
        # s + u_resume: (n + 4) + ("resume " 2 + 4) + 2 + summary 20 <= 136
        (104, 1, {}, True),
        (105, 1, {}, False),
        # with the task kept: + 5
        (99, 1, {"keep_task": True}, True),
        (100, 1, {"keep_task": True}, False),
        (105, 1, {"max_compactions": 0}, True),
    ],
)
def test_a_task_that_cannot_fit_is_refused_before_anything_is_sampled(
    system: int, task: int, config: dict[str, bool], fits: bool
) -> None:
    sampler = ScriptedSampler(["w1"])
    messages = [{"role": "system", "content": words(system)}, {"role": "user", "content": words(task)}]
    rollout = play(ScriptedEnvironment(steps=1, messages=messages), sampler, context(**config))
    if fits:
        assert rollout.end == "submitted"
        return
    assert (rollout.end, rollout.retryable, sampler.requests) == ("error", False, [])
    assert rollout.error is not None
    assert rollout.error.startswith("task does not fit")
