"""The readable rollout: hostile text stays text, and every number is the ledger's."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from compactionrl.config import ContextConfig
from compactionrl.rollout.ledger import Attempt, Rollout, Segment, Window
from compactionrl.show import BAR, bar, clip, escape, show

CONTEXT = ContextConfig(budget=100, threshold=40, response_tokens=20, min_response=5, summary_tokens=20)


def rollout() -> Rollout:
    """Two windows: 60 tokens with a summary of 10 and a rejected try of 3; then 30 with one step kept."""
    first, second = Window(), Window()
    first.append_context([1] * 20, "user", "task")
    first.append_sampled([2] * 15, [-1.0] * 15, [0] * 15, Segment("execution", 0))
    first.append_context([1] * 10, "user")
    first.append_context([1] * 5, "user", "summary request")
    first.append_sampled([3] * 10, [-1.0] * 10, [0] * 10, Segment("summary", 1), "summary")
    first.rejected.append(Attempt([4] * 3, [-1.0] * 3, "only thinking"))
    second.append_context([1] * 12, "user", "resume")
    second.append_context([2] * 8, "assistant", "tail")
    second.append_context([1] * 5, "user", "tail")
    second.append_sampled([2] * 5, [-1.0] * 5, [0] * 5, Segment("execution", 2))
    return Rollout("r", "t", [first, second], reward=1.0, end="submitted", turns=2, tool_calls=2)


def words(ids: Sequence[int]) -> str:
    return {1: "seen", 2: "done", 3: "noted", 4: "hmm"}[ids[0]]


def test_says_what_was_summarised_and_what_survived() -> None:
    text = "\n".join(line.plain for line in show(rollout(), words, CONTEXT))
    assert "30 trained + 3 rejected: only thinking" in text
    assert "33 tokens sampled" in text
    assert "goes on from a summary of 10 tokens and the latest 1 steps (13 tokens)" in text
    assert "assistant    10  [summary] noted" in text
    assert "rejected     3  [only thinking] hmm" in text
    assert "submitted, reward 1" in text


def test_what_survived_a_hand_off_is_seen_in_the_next_window_of_acting() -> None:
    handed = rollout()
    questions = Window()
    questions.append_context([1] * 2, "user", "questions request")
    questions.append_sampled([3] * 2, [-1.0] * 2, [0] * 2, Segment("summary", 1), "questions")
    assert questions.aside
    handed.windows.insert(1, questions)
    shown = "\n".join(line.plain for line in show(handed, words, CONTEXT))
    assert shown.count("goes on from") == shown.count("latest 1 steps") == 1


def test_bar_is_to_scale() -> None:
    drawn = bar(rollout().windows[0], budget=100).plain
    assert len(drawn) == BAR
    assert drawn.count("·") == BAR - 60 * BAR // 100
    assert bar(rollout().windows[0], budget=60).plain.count("·") == 0


@pytest.mark.parametrize(
    "hostile",
    ["[bold red]x[/]", "[/nonsense]", "\x1b[2J\x1b]0;title\x07", "\u202egnp.exe", "a\rb", "\x9b31m", "\u2028x"],
)
def test_hostile_text_is_neither_markup_nor_control(hostile: str) -> None:
    made = rollout()
    made.details[hostile] = hostile
    made.error = made.task_id = made.windows[0].rejected[0].reason = hostile
    console = Console(width=500, record=True, force_terminal=False)
    with console.capture() as capture:
        for line in show(made, lambda _: hostile, CONTEXT):
            console.print(line)
    printed = capture.get()
    assert not set(printed) & set("\x1b\x07\r\x9b\u202e\u2028")
    assert escape(hostile) in printed


@given(st.text())
def test_escaped_text_is_printable(text: str) -> None:
    assert all(character.isprintable() or character.isspace() for character in escape(text))
    assert "\n" not in escape(text)


def test_clip_says_how_much_is_missing() -> None:
    assert clip("abcdefghij", 4) == "ab [... 6 characters ...] ij"
    assert clip("abc", 4) == "abc"
    assert clip("abcdefghij", 0) == "abcdefghij"
