"""A ledger as Harbor keeps it: one detail for each segment, ids as they were sampled, and a trajectory that it can show."""

import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compactionrl.integrations.atif import trajectory
from compactionrl.integrations.harbor_rollout import metadata, rollout_details, tokens
from compactionrl.rollout.ledger import Rollout

sys.path.append(str(Path(__file__).parents[1] / "rollout"))
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
    token,
    words,
)

ROOM = context(budget=600, threshold=250, response_tokens=70, summary_tokens=70, max_calls=2)
"""For tools."""
WHO = {"name": "compactionrl", "version": "1", "model_name": "m"}
END = token("<|im_end|>")


def compacted() -> tuple[Rollout, ScriptedSampler]:
    """Two responses, a summary that is no good, one that is, two more responses."""
    sampler = ScriptedSampler(["w1", "w2 w3", "", "w7 w8", "w4", "w5"])
    environment = ScriptedEnvironment([words(50, 10), words(70, 20), "w9", "w6"], steps=4)
    return play(environment, sampler), sampler


def test_one_detail_for_each_segment_in_time_order() -> None:
    rollout, sampler = compacted()
    details = rollout_details(rollout)
    assert [detail["extra"] for detail in details] == [
        {"kind": ["execution"] * 2, "segment": [0, 0], "turn": [0, 1]},
        {"kind": ["summary"], "segment": [1], "turn": [2]},
        {"kind": ["execution"] * 2, "segment": [2, 2], "turn": [3, 4]},
    ]
    assert [detail["completion_token_ids"] for detail in details] == [
        [[*ids_of("w1"), END], [*ids_of("w2 w3"), END]],
        [[*ids_of("w7 w8"), END]],
        [[*ids_of("w4"), END], [*ids_of("w5"), END]],
    ]
    sent = [request.prompt for request in sampler.requests]
    del sent[2]  # that of the rejected summary
    assert [prompt for detail in details for prompt in detail["prompt_token_ids"]] == sent
    assert details[1]["logprobs"] == [[-0.5, -0.5 - 1 / 1024, -0.5 - 2 / 1024]]


def test_rejected_summaries_are_counted() -> None:
    rollout, sampler = compacted()
    told = metadata(rollout)
    assert (told["compactions"], told["rejected_summaries"], told["windows"], told["turns"]) == (1, 1, 2, 4)
    # The two attempts at a summary were asked for behind the same window, but for the words of the request.
    read, wrote = tokens(rollout)
    assert wrote == sum(len(request.sampled) for request in sampler.requests) == rollout.token_counts()["sampled"]
    assert read == sum(len(request.prompt) for request in sampler.requests) + len(sampler.requests[3].prompt) - len(
        sampler.requests[2].prompt
    )


def test_a_rollout_of_text_has_no_ids_to_give() -> None:
    rollout, _ = compacted()
    rollout.approximate = True
    assert rollout_details(rollout) == []
    assert metadata(rollout)["exact_tokens"] is False


entries = st.one_of(
    st.integers(1, 12).map(words),
    st.just(""),
    st.just(call()),
    st.just(call() + call()),
    st.integers(1, 3).map(lambda n: Cut(words(n))),
)


@settings(deadline=None)
@given(st.lists(entries, min_size=1, max_size=12), st.lists(st.integers(0, 100).map(words), min_size=1, max_size=6))
def test_details_are_what_was_sent_and_sampled(script: list[Any], observations: list[str]) -> None:
    sampler = ScriptedSampler(script)

    def answer(text: str) -> Any:
        return lambda response: [text] * len(response.calls) if response.calls else text

    rollout = play(ScriptedEnvironment([answer(text) for text in observations], tools=TOOLS), sampler, ROOM, turns=10)
    details = rollout_details(rollout)
    given_back = {
        (tuple(prompt), tuple(sampled))
        for detail in details
        for prompt, sampled in zip(detail["prompt_token_ids"], detail["completion_token_ids"], strict=True)
    }
    assert given_back <= {(tuple(request.prompt), tuple(request.sampled)) for request in sampler.requests}
    rejected = sum(len(window.rejected) for window in rollout.windows)
    turns = [turn for detail in details for turn in detail["extra"]["turn"]]
    # A response that is longer than the room left breaks the rollout; it is in no ledger.
    assert turns == list(range(len(sampler.requests) - rejected - (rollout.error is not None)))
    assert [detail["extra"]["segment"][0] for detail in details] == list(range(len(details)))
    check(trajectory(rollout, chat_format(), agent=WHO, tools=TOOLS))


def check(told: dict[str, Any]) -> None:
    """What ATIF asks of a trajectory."""
    assert [step["step_id"] for step in told["steps"]] == list(range(1, len(told["steps"]) + 1))
    for step in told["steps"]:
        assert step["source"] in ("system", "user", "agent")
        if step["source"] != "agent":
            assert not step.keys() & {"tool_calls", "metrics", "reasoning_content"}
        calls = {each["tool_call_id"] for each in step.get("tool_calls", [])}
        for result in step.get("observation", {"results": []})["results"]:
            assert result.get("source_call_id") in {None, *calls}


def test_a_trajectory_marks_the_compaction() -> None:
    rollout, _ = compacted()
    told = trajectory(rollout, chat_format(), agent=WHO)
    check(told)
    sources = [(step["source"], step["message"] if step["source"] == "agent" else "") for step in told["steps"]]
    assert sources[:7] == [
        ("system", ""),
        ("user", ""),
        ("agent", "w1"),
        ("agent", "w2 w3"),
        ("user", ""),  # the request
        ("agent", "w7 w8"),
        ("system", ""),  # the mark
    ]
    marked = [step for step in told["steps"] if "context_management" in step.get("extra", {})]
    assert [step["extra"]["context_management"] for step in marked] == [{"type": "compaction", "boundary": "replace"}]
    assert told["steps"][2]["observation"]["results"][0]["content"].count("w10") == 1
    read, wrote = tokens(rollout)
    assert told["final_metrics"] == {
        "total_prompt_tokens": read,
        "total_completion_tokens": wrote,
        "total_steps": len(told["steps"]),
    }
    new = told["steps"][7:]
    assert [step.get("is_copied_context", False) for step in new if step["source"] != "agent"][:2] == [False, False]
    assert [step["message"] for step in new if step["source"] == "agent" and "metrics" in step] == ["w4", "w5"]
    assert all(step["is_copied_context"] for step in new if step["source"] == "agent" and "metrics" not in step)


def test_answers_stand_with_their_calls() -> None:
    environment = ScriptedEnvironment([["w1", "w2"], "w3"], steps=2, tools=TOOLS)
    rollout = play(environment, ScriptedSampler([call() + call('{"a": 1}'), "w4"]), ROOM)
    step = trajectory(rollout, chat_format(), agent=WHO, tools=TOOLS)["steps"][2]
    assert [each["arguments"] for each in step["tool_calls"]] == [{}, {"a": 1}]
    results = step["observation"]["results"]
    assert [result["source_call_id"] for result in results] == [each["tool_call_id"] for each in step["tool_calls"]]
    assert [("w1" in result["content"], "w2" in result["content"]) for result in results] == [
        (True, False),
        (False, True),
    ]


@pytest.mark.parametrize("end", ["time", "error"])
def test_a_rollout_that_was_cut_short_is_shown_as_far_as_it_came(end: Any) -> None:
    rollout, _ = compacted()
    del rollout.windows[1:]
    rollout.end = end
    check(trajectory(rollout, chat_format(), agent=WHO))
    assert metadata(rollout)["end"] == end
