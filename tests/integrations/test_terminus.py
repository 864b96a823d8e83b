"""Runs of stock Terminus-2 become ledgers in which every sampled token stands behind exactly what the server read."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from terminus_run import AGENT, CLOSE, OPEN, Run, encode

from compactionrl.config import TrainConfig
from compactionrl.integrations.terminus import ImportRefused, import_details, import_trial, occurrences
from compactionrl.rollout.ledger import CONTEXT, Rollout

NAMES = {"rollout_id": "r", "task_id": "t"}


PART = {"": "turn", "summary": "summary", "summary questions": "questions", "summary answers": "answers"}


def sampled(rollout: Rollout) -> list[tuple[str, list[int], list[int]]]:
    """(what it is, everything before it in its window, ids) of every sampled turn, in the ledger's order."""
    return [
        (PART[turn.note], window.token_ids[: turn.start], window.token_ids[turn.start : turn.end])
        for window in rollout.windows
        for turn in window.turns
        if window.segment_ids[turn.start] != CONTEXT
    ]


def said(run: Run) -> list[tuple[str, list[int], list[int]]]:
    """What happened, in order, but that answers which go on from their summary stand before the questions."""
    told = list(run.requests)
    for i, (part, prompt, completion) in enumerate(told):
        before = [*prompt, *completion]
        if part == "summary" and told[i + 2][1][: len(before)] == before:
            told[i + 1 : i + 3] = told[i + 2], told[i + 1]
    return told


def plain(turns: int = 3) -> Run:
    run = Run("abc")
    for number in range(turns):
        run.say("c" * (number + 1), "a" * (number + 1))
    return run


def compacted() -> Run:
    run = plain()
    run.hand_over("b", "bb", "cc", "ca")
    run.say("", "ba")
    run.say("bbb", "cb")
    return run


def test_one_conversation_is_one_window() -> None:
    run = Run("a")
    run.say("", "b")
    run.say("c", "cc")
    rollout = import_details(run.details, **NAMES, reward=0.5, version=3)
    (window,) = rollout.windows
    # <0 2 a 1> <0 3 | b 1> <0 2 c 1> <0 3 | c c 1>
    assert window.token_ids == [0, 2, 10, 1, 0, 3, 11, 1, 0, 2, 12, 1, 0, 3, 12, 12, 1]
    assert window.segment_ids == [-1] * 6 + [0, 0] + [-1] * 6 + [0, 0, 0]
    assert window.versions == [-1] * 6 + [3, 3] + [-1] * 6 + [3, 3, 3]
    assert [window.logprobs[i] for i in (6, 7, 14, 15, 16)] == [-1 / 3, -1 / 4, -1 / 4, -1 / 5, -1 / 6]
    assert [(turn.role, turn.note) for turn in window.turns] == [
        ("user", "task"),
        ("assistant", ""),
        ("user", ""),
        ("assistant", ""),
    ]
    assert (rollout.reward, rollout.end, rollout.turns) == (0.5, "submitted", 2)
    assert rollout.token_counts() == {"sampled": 5, "trained": 5}


def test_a_hand_off_stands_where_it_was_made() -> None:
    run = compacted()
    rollout = import_details(run.details, **NAMES, hand_offs=1)
    assert [[segment.kind for segment in window.segments] for window in rollout.windows] == [
        ["execution", "summary"],
        ["summary"],
        ["execution"],
    ]
    assert sampled(rollout) == said(run)
    assert [turn.note for window in rollout.windows for turn in window.turns if turn.role == "user"] == [
        *("task", "", "", "summary request", "answers request"),
        "questions request",
        *("resume", ""),
    ]
    assert rollout.compactions == 1
    assert rollout.details == {"harness": "terminus-2", "hand-offs": 1, "forks": 0, "unrecorded responses": 0}


def test_messages_dropped_before_a_hand_off_keep_what_was_sampled() -> None:
    run = plain(4)
    run.hand_over("b", "bb", "cc", "ca", unwound=2)
    run.say("", "ba")
    rollout = import_details(run.details, **NAMES, hand_offs=1)
    # The summary's context is shorter than the window that it closes: it has one of its own, and the answers go on there.
    assert [[turn.note for turn in window.turns if turn.role == "assistant"] for window in rollout.windows] == [
        *([""] * 4, ["summary", "summary answers"], ["summary questions"], [""])
    ]
    assert sampled(rollout) == said(run)


def test_a_hand_off_after_the_first_turn_is_told_from_a_drift_after_it() -> None:
    handed, drifted = Run("abc"), Run("abc")
    for run in (handed, drifted):
        run.say("", "cab", drift=run is drifted)
    handed.hand_over("b", "bb", "cc", "ca")
    for run in (handed, drifted):
        run.say("c", "a")
    first = import_details(handed.details, **NAMES)
    assert (first.details["hand-offs"], first.details["forks"]) == (1, 0)
    second = import_details(drifted.details, **NAMES)
    assert (second.details["hand-offs"], second.details["forks"]) == (0, 1)


@pytest.mark.parametrize("cause", [{"drift": True}, {"thinking": "ab"}], ids=["retokenised", "thinking stripped"])
def test_a_drift_opens_a_window_and_loses_nothing(cause: dict[str, Any]) -> None:
    run = Run("abc")
    run.say("", "cc")
    run.say("b", "cabc", **cause)
    run.say("bb", "a")
    rollout = import_details(run.details, **NAMES)
    assert [[turn.note for turn in window.turns] for window in rollout.windows] == [["task", "", "", ""], ["fork", ""]]
    assert sampled(rollout) == said(run)
    assert rollout.details["forks"] == 1
    # The fork's context is what the server read, the drifted turn as it was encoded anew included.
    assert rollout.windows[1].token_ids[:-2] == run.requests[-1][1]


def test_a_drift_and_a_hand_off_in_one_run() -> None:
    run = Run("abc")
    run.say("", "cab", drift=True)
    run.say("b", "cc")
    run.hand_over("b", "bb", "cc", "ca")
    run.say("", "ab", thinking="c")
    run.say("bbb", "cb")
    run.hand_over("ab", "bc", "a", "cab")
    run.say("", "b")
    rollout = import_details(run.details, **NAMES, hand_offs=2)
    assert sampled(rollout) == said(run)
    assert (rollout.details["hand-offs"], rollout.details["forks"]) == (2, 2)


def test_a_template_that_takes_its_empty_thinking_out_forks_at_every_turn() -> None:
    run = Run("abc", thinks=True)
    run.say("", "cc")
    run.say("b", "a")
    run.hand_over("b", "bb", "cc", "ca")
    run.say("", "ba")
    run.say("bbb", "cb")
    rollout = import_details(run.details, **NAMES, hand_offs=1)
    assert sampled(rollout) == said(run)
    assert (rollout.details["hand-offs"], rollout.details["forks"]) == (1, 2)


def test_hand_offs_that_cannot_be_told_apart_are_refused() -> None:
    run = Run("abc")
    run.say("", "cc")
    run.hand_over("b", "bb", "cc", "ca")
    run.say("", "cab", drift=True)
    run.say("bbb", "cb")
    run.hand_over("b", "bb", "cc", "ca")
    run.say("", "ba")
    with pytest.raises(ImportRefused, match="only 1 of the conversation's contexts"):
        import_details(run.details, **NAMES, hand_offs=2)


@given(
    st.lists(st.sampled_from([0, 1, 256, 257]), max_size=12), st.lists(st.sampled_from([0, 1, 256, 257]), max_size=3)
)
def test_occurrences(ids: list[int], part: list[int]) -> None:
    found = start = 0
    while part and start <= len(ids) - len(part):
        here = ids[start : start + len(part)] == part
        found, start = found + here, start + (len(part) if here else 1)
    assert occurrences(ids, part) == found


def test_a_cut_response_is_context_and_counted() -> None:
    run = Run("abc")
    run.say("", "cc")
    run.say("b", "abcabc", cut=True)
    run.say("bcbc", "a")
    rollout = import_details(run.details, **NAMES)
    (window,) = rollout.windows
    assert rollout.details["unrecorded responses"] == 1
    assert [turn.note for turn in window.turns] == ["task", "", "unrecorded response", ""]
    lost = [OPEN, AGENT, *encode("abcabc"), CLOSE]
    (gap,) = [window.token_ids[turn.start : turn.end] for turn in window.turns if turn.note == "unrecorded response"]
    assert any(gap[i : i + len(lost)] == lost for i in range(len(gap)))
    assert rollout.token_counts()["sampled"] == 3 + 2


letters = st.text("abc", min_size=1, max_size=6)


@st.composite
def runs(draw: st.DrawFn) -> Run:
    run = Run(draw(letters), thinks=draw(st.booleans()))
    for number in range(draw(st.integers(1, 9))):
        if run.messages and not run.handoff and draw(st.integers(0, 3)) == 0:
            # What a screen shows tells hand-offs apart.
            screen = draw(letters) + "b" * number
            run.hand_over(screen, draw(letters), draw(letters), draw(letters), unwound=draw(st.integers(0, 2)))
        cut = draw(st.integers(0, 5)) == 0
        if cut:
            run.say(draw(letters), draw(letters), cut=True)
        odd = draw(st.sampled_from(["", "", "drift", "thinking"]))
        run.say(draw(letters), draw(letters), drift=odd == "drift", thinking=draw(letters) if odd == "thinking" else "")
    return run


@settings(deadline=None)
@given(runs())
def test_every_sampled_token_stands_once_behind_what_the_server_read(run: Run) -> None:
    rollout = import_details(run.details, **NAMES, hand_offs=run.hand_offs)
    assert sampled(rollout) == said(run)
    assert [segment.index for segment in rollout.segments] == list(range(len(rollout.segments)))
    assert {segment.index: segment.kind for segment in rollout.segments} == {
        window.segment_ids[turn.start]: "execution" if not turn.note else "summary"
        for window in rollout.windows
        for turn in window.turns
        if turn.role == "assistant"
    }
    n = sum(len(completion) for _, _, completion in run.requests)
    assert rollout.token_counts() == {"sampled": n, "trained": n}
    assert rollout.details["hand-offs"] == run.hand_offs
    assert rollout.details["unrecorded responses"] <= run.unrecorded


@settings(deadline=None)
@given(runs())
def test_logprobs_stay_with_their_tokens(run: Run) -> None:
    rollout = import_details(run.details, **NAMES)
    recorded = sorted(p for detail in run.details for turn in detail["logprobs"] for p in turn)
    kept = [
        p for w in rollout.windows for p, segment in zip(w.logprobs, w.segment_ids, strict=True) if segment != CONTEXT
    ]
    assert sorted(kept) == recorded


def test_the_ledger_is_trained(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from compactionrl.training.batch import build_batch

    run = compacted()
    batch = build_batch([import_details(run.details, **NAMES, reward=1.0)], TrainConfig())
    n = sum(len(completion) for _, _, completion in run.requests)
    assert batch.accounting == {"sampled": n, "trained": n}
    assert batch.layout.is_summary.tolist() == [False, True, True, False]


def test_without_logprobs_nothing_is_trained_and_the_reason_is_said() -> None:
    run = compacted()
    for detail in run.details:
        del detail["logprobs"]
    counts = import_details(run.details, **NAMES).token_counts()
    n = sum(len(completion) for _, _, completion in run.requests)
    assert counts == {"sampled": n, "trained": 0, "excluded: no log-probabilities recorded": n}


@pytest.mark.parametrize("number", [0, 1, 2], ids=["summary", "questions", "answers"])
def test_only_the_request_without_logprobs_is_not_trained(number: int) -> None:
    run = compacted()
    del run.others[number]["logprobs"]
    counts = import_details(run.details, **NAMES).token_counts()
    lost = len(run.others[number]["completion_token_ids"][0])
    assert counts["excluded: no log-probabilities recorded"] == lost
    assert counts["trained"] == counts["sampled"] - lost


def test_a_failed_trial_is_excluded_by_name() -> None:
    run = plain()
    assert import_details(run.details, **NAMES, end="error").token_counts()["trained"] == 0


Spoil = Callable[[Run], Any]


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda run: run.main["completion_token_ids"].pop(1), "shifts the others"),
        (lambda run: run.main["prompt_token_ids"].pop(), "shifts the others"),
        (lambda run: run.main["logprobs"].pop(0), "shifts the others"),
        (lambda run: run.main["logprobs"][2].pop(), r"turn 2: 4 ids, 3 log-probabilities"),
        (lambda run: run.main["logprobs"][2].__setitem__(0, float("nan")), "no finite number"),
        (lambda run: run.main["logprobs"][2].__setitem__(0, None), "no finite number"),
        (lambda run: run.main["prompt_token_ids"].__setitem__(0, []), "turn 0: no ids"),
        (lambda run: run.others.pop(), "2 requests of hand-offs, three for each"),
        (lambda run: run.others.extend(run.others), "6|two hand-offs|2 hand-offs"),
        (lambda run: run.others[0]["prompt_token_ids"].append([1]), "shifts the others"),
        (lambda run: run.others.__setitem__(0, run.main), r"rollout_details\[1\] has 5 turns"),
        (lambda run: run.others.clear(), "summarization_count is 1"),
        (
            lambda run: [values.__delitem__(slice(3, None)) for values in run.main.values()],
            "only 0 of the conversation's",
        ),
    ],
)
def test_what_does_not_add_up_is_refused(spoil: Spoil, says: str) -> None:
    run = compacted()
    spoil(run)
    with pytest.raises(ImportRefused, match=says):
        import_details(run.details, **NAMES, hand_offs=1)


def test_a_run_without_details_is_refused() -> None:
    with pytest.raises(ImportRefused, match="collect_rollout_details=true"):
        import_details([], **NAMES)


def test_a_hand_off_that_nothing_took_over_is_refused_even_where_a_drift_makes_up_the_number() -> None:
    run = Run("abc")
    run.say("", "cab", drift=True)
    run.say("b", "cc")
    run.hand_over("b", "bb", "cc", "ca")  # and here the run's time is over
    with pytest.raises(ImportRefused, match="only 0 of the conversation's contexts"):
        import_details(run.details, **NAMES, hand_offs=1)


def write(folder: Path, run: Run, **changes: Any) -> Path:
    result = {
        "trial_name": "t__1",
        "task_name": "org/t",
        "agent_info": {"name": "terminus-2", "version": "2.0.0"},
        "agent_result": {
            "rollout_details": run.details,
            "metadata": {"n_episodes": len(run.requests), "summarization_count": run.hand_offs},
        },
        "verifier_result": {"rewards": {"reward": 1.0}},
        "exception_info": None,
        "step_results": None,
    }
    (folder / "result.json").write_text(json.dumps(result | changes))
    return folder


def exception(kind: str) -> dict[str, str]:
    return {"exception_type": kind, "exception_message": "it broke", "exception_traceback": "", "occurred_at": ""}


def test_a_trial_is_imported(tmp_path: Path) -> None:
    run = compacted()
    rollout = import_trial(write(tmp_path, run))
    assert (rollout.id, rollout.task_id, rollout.reward, rollout.end) == ("t__1", "org/t", 1.0, "submitted")
    assert sampled(rollout) == said(run)


@pytest.mark.parametrize(
    ("changes", "end", "reward"),
    [
        ({"exception_info": exception("AgentTimeoutError")}, "time", 1.0),
        ({"exception_info": exception("VerifierTimeoutError")}, "error", 0.0),
        ({"verifier_result": None}, "error", 0.0),
        ({"verifier_result": {"rewards": {"speed": 0.25}}}, "submitted", 0.25),
        ({"verifier_result": {"rewards": {"speed": 0.25, "size": 1}}}, "error", 0.0),
        ({"verifier_result": {"rewards": {"reward": 0, "size": 1}}}, "submitted", 0.0),
    ],
)
def test_how_a_trial_ended(tmp_path: Path, changes: dict[str, Any], end: str, reward: float) -> None:
    rollout = import_trial(write(tmp_path, plain(), **changes))
    assert (rollout.end, rollout.reward) == (end, reward)
    assert (rollout.error is not None) == (end == "error")
    assert rollout.token_counts()["trained"] == (0 if end == "error" else rollout.token_counts()["sampled"])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"agent_info": {"name": "computer-1"}}, "computer-1"),
        ({"step_results": [{}]}, "several steps"),
        ({"agent_result": None}, "no rollout details"),
    ],
)
def test_other_trials_are_refused(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ImportRefused, match=says):
        import_trial(write(tmp_path, plain(), **changes))


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ImportRefused, match="no result of a trial"):
        import_trial(tmp_path)
    (tmp_path / "result.json").write_text("{")
    with pytest.raises(ImportRefused, match="no result of a trial"):
        import_trial(tmp_path)
