"""Situations in which agents that train on their own rollouts go wrong, each with what has to happen here."""

from __future__ import annotations

from typing import Any

import pytest
from rollout_stubs import (
    TOOLS,
    Cut,
    ScriptedEnvironment,
    ScriptedSampler,
    call,
    chat_format,
    context,
    ids_of,
    play,
    text_of,
    token,
    words,
)

from compactionrl.rollout.ledger import Rollout


def compacting(summaries: list[Any], **options: Any) -> tuple[Rollout, ScriptedSampler, ScriptedEnvironment]:
    """Three steps fill the first window, then come the summaries and one more step."""
    sampler = ScriptedSampler(["w1", "w2", "w3", *summaries, "w4"])
    environment = ScriptedEnvironment([words(40)] * 3 + ["w1"], steps=4, **options)
    return play(environment, sampler, context(budget=200)), sampler, environment


def test_ids_that_decode_to_the_same_text_are_kept_apart() -> None:
    """The policy may write " w1" as one token or as its three bytes: what was sampled is what is stored and shown again."""
    one = ids_of("w1")
    bytewise = [ids_of(char)[0] for char in "w1"]
    decode = chat_format().decode
    assert one != bytewise
    assert decode(one) == decode(bytewise)
    for ids in (one, bytewise):
        sampler = ScriptedSampler([[*ids, token("<|im_end|>")], "w2"])
        rollout = play(ScriptedEnvironment(steps=2), sampler)
        window = rollout.windows[0]
        assert window.token_ids[12 : 12 + len(ids)] == ids
        assert sampler.requests[1].prompt == window.token_ids[: len(sampler.requests[1].prompt)]
        assert sum(logprob < 0 for logprob in window.logprobs) == sum(len(r.sampled) for r in sampler.requests)


def test_an_observation_behind_a_long_thought_appears_verbatim_in_the_next_prompt() -> None:
    """A plain user turn behind a response that thought for long: templates drop the thinking, a window keeps all of it."""
    sampler = ScriptedSampler([f"<think>{words(15)}</think>w2", "w3"])
    play(ScriptedEnvironment(["w7 w8 w9"], steps=2), sampler)
    first, second = sampler.requests
    observation = ids_of("\n<|im_start|>user\nw7 w8 w9<|im_end|>\n<|im_start|>assistant\n")
    assert second.prompt == [*first.prompt, *first.sampled, *observation]


def test_a_full_window_ends_cleanly_and_keeps_the_verdict() -> None:
    """C = 100 and a history of 95: no request asks for more than is left, and the end has its own name and reward."""
    config = context(budget=100, max_compactions=0, response_tokens=10, min_response=6, threshold=50, summary_tokens=10)
    sampler = ScriptedSampler(["w1"])
    rollout = play(ScriptedEnvironment([words(74)], reward=0.25), sampler, config)
    assert (len(sampler.requests), rollout.end, rollout.reward) == (1, "budget", 0.25)
    finished = play(ScriptedEnvironment([words(73), words(500)], steps=2), ScriptedSampler(["w1"]), config)
    assert (finished.end, finished.reward) == ("submitted", 1.0)


def test_the_limit_of_a_response_does_not_cut_the_rollout() -> None:
    """Three turns of eight tokens under a limit of eight: 24 sampled tokens are kept, all of them to be trained."""
    sampler = ScriptedSampler([words(7)])
    rollout = play(ScriptedEnvironment(steps=3), sampler, context(response_tokens=8))
    (window,) = rollout.windows
    assert rollout.token_counts() == {"sampled": 24, "trained": 24}
    assert sum(index >= 0 for index in window.segment_ids) == 24


def test_limits_of_response_summary_and_budget_are_apart() -> None:
    """Raising one of them moves no request of another kind."""

    def limits(**changes: int) -> tuple[int, int]:
        sampler = ScriptedSampler(["w1", "w9", "w2"])
        play(ScriptedEnvironment([words(150), "w1"], steps=2), sampler, context(**{"budget": 250, **changes}))
        response, summary = sampler.requests[:2]
        return response.max_tokens, summary.max_tokens

    assert limits(threshold=90) == (20, 20)
    assert limits(threshold=90, response_tokens=30) == (30, 20)
    assert limits(threshold=90, summary_tokens=25) == (20, 25)


def test_the_system_prompt_is_the_beginning_of_every_window() -> None:
    rollout, _, _ = compacting(["w9"])
    system = ids_of("<|im_start|>system\nsystem<|im_end|>\n")
    assert len(rollout.windows) == 2
    assert all(window.token_ids[: len(system)] == system for window in rollout.windows)


def test_a_last_response_that_was_cut_is_counted() -> None:
    environment = ScriptedEnvironment(steps=2)
    rollout = play(environment, ScriptedSampler(["w1", Cut("w2")]))
    assert (rollout.cut_responses, rollout.turns) == (1, 2)
    assert [response.cut for response in environment.responses] == [False, True]


def test_a_fat_observation_never_makes_the_summary_overflow() -> None:
    """C = 100, T_comp = 50, history 30, observation 80: still a whole summary, and a clipped copy of the observation."""
    config = context(budget=100, threshold=50, summary_tokens=20, min_response=4)
    sampler = ScriptedSampler(["w1", "w2", "w9", "w3"])
    environment = ScriptedEnvironment([words(7), words(80), "w1"], steps=3)
    rollout = play(environment, sampler, config)
    assert (rollout.end, rollout.compactions) == ("submitted", 1)
    assert sampler.requests[2].max_tokens == 20
    assert all(len(request.prompt) + request.max_tokens <= 100 for request in sampler.requests)
    assert "tokens cut" in text_of(rollout, 1)
    assert "tokens cut" not in text_of(rollout, 0)
    assert environment.given[1] == words(80)


@pytest.mark.parametrize(
    "bad", [Cut("w9"), " \n ", call(), "<think>w9</think>"], ids=["cut", "blank", "call", "thinking"]
)
def test_a_bad_summary_is_tried_again_without_touching_history(bad: Any) -> None:
    rollout, sampler, environment = compacting([bad, bad, "w9"])
    assert rollout.end == "submitted"
    window = rollout.windows[0]
    request = sampler.requests[5]
    assert [len(attempt.token_ids) for attempt in window.rejected] == [len(r.sampled) for r in sampler.requests[3:5]]
    assert window.token_ids == [*request.prompt, *request.sampled]
    assert len(environment.responses) == 4


def test_every_summary_has_its_whole_limit_and_nothing_takes_its_place() -> None:
    """No request of 0 tokens, and no canned text: the summary in the next window is the one that was sampled."""
    rollout, sampler, _ = compacting([Cut("w9"), Cut("w8"), Cut("w7 w7")])
    assert [request.max_tokens for request in sampler.requests[3:6]] == [20, 20, 20]
    assert rollout.windows[0].turns[-1].note == "summary (cut)"
    assert " ".join(["w7"] * 20) in text_of(rollout, 1)


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("written", [call(), "<tool_call>w5", "<tool_call>w5</tool_call>"])
def test_a_call_in_a_summary_is_flagged_and_never_executed(tools: Any, written: str) -> None:
    sampler = ScriptedSampler(["w1", "w9" + written, "w4"])
    environment = ScriptedEnvironment([words(330), "w1"], steps=2, tools=tools)
    rollout = play(environment, sampler, context(budget=500, threshold=170, summary_tokens=40))
    assert (rollout.end, rollout.compactions) == ("submitted", 1)
    assert rollout.windows[0].turns[-1].note == "summary (with a tool call, not executed)"
    assert [response.text for response in environment.responses] == ["w1", "w4"]
    assert rollout.tool_calls == (0 if tools else 2)
    resumed = rollout.windows[1]
    end = next(turn.end for turn in resumed.turns if turn.note == "resume" and turn.role == "user")
    assert text_of(rollout, 1).count("resume w9<|im_end|>") == 1
    assert token("<tool_call>") not in resumed.token_ids[resumed.turns[0].end : end]


def test_only_the_accepted_summary_and_the_work_around_it_are_trained() -> None:
    """Attempts [bad, bad, good]: trained are the work before once, the good summary once, and what comes behind it."""
    rollout, sampler, _ = compacting(["", Cut("w8"), "w9"])
    trained = [
        token_id
        for window in rollout.windows
        for token_id, index in zip(window.token_ids, window.segment_ids, strict=True)
        if index >= 0
    ]
    accepted = [i for request in sampler.requests if request not in sampler.requests[3:5] for i in request.sampled]
    assert trained == accepted
    assert rollout.token_counts() == {
        "sampled": len(accepted) + 1 + 20,
        "trained": len(accepted),
        "rejected: empty": 1,
        "rejected: cut": 20,
    }


def test_summarising_loses_no_sampled_token() -> None:
    sampler = ScriptedSampler(["w1", "<think>w2</think>w3", "w4"])
    rollout = play(ScriptedEnvironment([words(70)]), sampler, turns=9)
    assert rollout.compactions == 3
    sampled = sum(len(request.sampled) for request in sampler.requests)
    assert rollout.token_counts() == {"sampled": sampled, "trained": sampled}
