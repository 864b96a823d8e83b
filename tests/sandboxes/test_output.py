"""What is kept of a stream."""

from __future__ import annotations

import asyncio
import os

from hypothesis import given
from hypothesis import strategies as st

from compactionrl.sandboxes.output import MOST_LEFT, Capture, Leftovers, Reader


@given(st.lists(st.binary(max_size=40)), st.integers(0, 60))
def test_head_and_tail_are_kept_whatever_the_pieces(pieces: list[bytes], most: int) -> None:
    capture = Capture(most)
    for piece in pieces:
        capture.add(piece)
    whole = b"".join(pieces)
    if len(whole) <= most:
        assert capture.text() == whole.decode(errors="replace")
        return
    head, tail = most - most // 2, most // 2
    start, end = whole[:head].decode(errors="replace"), whole[len(whole) - tail :].decode(errors="replace")
    assert capture.text() == f"{start}\n[{len(whole) - most} bytes left out]\n{end}"


@given(st.lists(st.integers(1, 5000), max_size=50))
def test_memory_is_bounded(sizes: list[int]) -> None:
    capture = Capture(1000)
    for size in sizes:
        capture.add(b"x" * size)
        assert len(capture.head) + sum(map(len, capture.tail)) <= 1000 + max(sizes)


def test_reader_takes_what_is_there_and_goes_on() -> None:
    async def scenario() -> tuple[str, str, bool]:
        ours, theirs = os.pipe()
        reader = Reader(ours, 100)
        os.write(theirs, b"first")
        first = reader.take()
        os.write(theirs, b"second")
        os.close(theirs)
        await reader.ended.wait()
        second = reader.take()
        reader.close()
        return first, second, reader.descriptor == -1

    assert asyncio.run(scenario()) == ("first", "second", True)


def test_leftovers_are_few_and_the_oldest_go() -> None:
    async def scenario() -> tuple[int, int]:
        leftovers, pipes = Leftovers(), [os.pipe() for _ in range(MOST_LEFT + 3)]
        for ours, _ in pipes:
            leftovers.keep(Reader(ours, 10))
        broken = 0
        for _, theirs in pipes:
            try:
                os.write(theirs, b"x")
            except BrokenPipeError:
                broken += 1
            os.close(theirs)
        kept = len(leftovers.readers)
        leftovers.close()
        return kept, broken

    assert asyncio.run(scenario()) == (MOST_LEFT, 3)
