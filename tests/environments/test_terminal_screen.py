"""What a model is shown of an output: plain text, never more than was allowed, head and tail kept."""

import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from compactionrl.environments.screen import clip, plain

ANY = st.text(st.characters(codec=None) | st.sampled_from("\x1b[]0;m\r\n\x07\0\x9b"))


def test_colours_titles_and_cursor_moves_are_gone_and_the_text_stays():
    assert plain("\x1b[1;31mred\x1b[0m \x1b]0;title\x07here\x1b[2K\x1b[10;3Hnow\x1b(B \x1b]8;;http://x\x1b\\link") == (
        "red herenow link"
    )


def test_line_ends_become_newlines_and_controls_become_visible():
    assert plain("a\r\nb\rc\n\td") == "a\nb\nc\n\td"
    assert plain("a\0b\x08c\x7f\x9b") == "a\ufffdb\ufffdc\ufffd\ufffd"
    assert plain("\udc80x") == "\ufffd\ufffd\ufffdx"  # each byte of what is no UTF-8


@given(ANY)
def test_nothing_but_text_is_left(text):
    shown = plain(text)
    assert not [char for char in shown if unicodedata.category(char) in ("Cc", "Cs") and char not in "\n\t"]
    shown.encode()


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=300), st.integers(100, 200))
def test_a_clip_keeps_head_and_tail_and_counts_what_is_gone(text, most):
    text = text * 3
    size, shown = len(text.encode()), clip(text, most)
    if size <= most:
        assert shown == text
        return
    mark = f"\n[... {size - most} bytes left out ...]\n"
    head, found, tail = shown.rpartition(mark)
    assert found
    assert text.startswith(head)
    assert text.endswith(tail)
    assert most - 6 <= len((head + tail).encode()) <= most  # at either cut, up to 3 bytes of half a character
    assert abs(len(head.encode()) - len(tail.encode())) <= 4


def test_clipping_to_nothing_leaves_the_mark():
    assert clip("abc", 0) == "\n[... 3 bytes left out ...]\n"
    assert clip("abc", 1) == "a\n[... 2 bytes left out ...]\n"
