"""The file of finished rollouts: nothing is lost, nothing half written is read, nobody writes beside another."""

import gzip
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compactionrl.config import ConfigError
from compactionrl.evaluation.rollout_file import RolloutFile, from_json, read_rollouts, to_json
from compactionrl.rollout.ledger import ENDS, Attempt, Rollout, Segment, Window
from compactionrl.samplers.protocol import Reported

ids = st.lists(st.integers(0, 200_000), max_size=5)
words = st.text(max_size=8)
counts = st.none() | st.builds(Reported, st.integers(0, 99), st.integers(0, 99), st.integers(0, 9))
logprobs = st.floats(max_value=0, allow_nan=False)


@st.composite
def windows(draw: st.DrawFn, first: int) -> Window:
    window = Window()
    for index in range(first, first + draw(st.integers(0, 2))):
        segment = Segment(draw(st.sampled_from(["execution", "summary"])), index, draw(st.none() | words))
        for _ in range(draw(st.integers(1, 3))):
            window.append_context(
                draw(ids), draw(st.sampled_from(["system", "user", "tool", "assistant"])), draw(words)
            )
            sampled = draw(st.lists(st.tuples(st.integers(0, 9), logprobs, st.integers(0, 9)), min_size=1, max_size=4))
            tokens, logs, versions = map(list, zip(*sampled, strict=True))
            window.append_sampled(tokens, logs, versions, segment, draw(words), draw(counts))
    window.append_context(draw(ids), "user")
    for tokens in draw(st.lists(ids, max_size=2)):
        window.rejected.append(Attempt(tokens, [-0.5] * len(tokens), draw(words), draw(counts)))
    return window


@st.composite
def rollouts(draw: st.DrawFn) -> Rollout:
    return Rollout(
        draw(words),
        draw(words),
        [draw(windows(3 * number)) for number in range(draw(st.integers(0, 3)))],
        reward=draw(st.floats(allow_nan=False, allow_infinity=False)),
        end=draw(st.sampled_from(ENDS)),
        error=draw(st.none() | words),
        details=draw(st.dictionaries(words, words | st.integers() | st.lists(words, max_size=2), max_size=2)),
        turns=draw(st.integers(0, 99)),
        environment_seconds=draw(st.floats(0, 1e6)),
    )


@settings(deadline=None)
@given(rollouts())
def test_a_rollout_reads_back_as_it_was(rollout: Rollout) -> None:
    assert from_json(json.loads(json.dumps(to_json(rollout)))) == rollout


@settings(max_examples=20, deadline=None)
@given(st.lists(rollouts(), max_size=4))
def test_a_file_holds_what_was_appended(tmp_path_factory: pytest.TempPathFactory, written: list[Rollout]) -> None:
    path = tmp_path_factory.mktemp("file") / "rollouts.jsonl.gz"
    with RolloutFile(path) as file:
        for rollout in written:
            file.append(rollout)
    assert list(read_rollouts(path)) == written
    assert recovered(path) == written
    assert len(gzip.decompress(path.read_bytes()).splitlines()) == len(written)  # any tool reads it


def recovered(path: Path) -> list[Rollout]:
    found: list[Rollout] = []
    with RolloutFile(path) as file:
        file.recover(found.append)
    return found


def small(name: str, tokens: int = 3) -> Rollout:
    window = Window()
    window.append_context(list(range(tokens)), "user", "task")
    window.append_sampled([1, 2], [-0.25, -math.pi], [0, 4], Segment("execution", 0))
    return Rollout(name, f"task-{name}", [window], reward=1.0, end="submitted")


def test_whatever_was_half_written_is_cut_off_and_written_again(tmp_path: Path) -> None:
    """For every number of bytes that a killed process may have got to disk."""
    path = tmp_path / "rollouts.jsonl.gz"
    with RolloutFile(path) as file:
        file.append(small("a"))
        file.append(small("b"))
        whole = path.stat().st_size
        file.append(small("c"))
    content = path.read_bytes()
    for length in range(whole, len(content)):
        path.write_bytes(content[:length])
        assert [rollout.id for rollout in read_rollouts(path)] == ["a", "b"]
        assert [rollout.id for rollout in recovered(path)] == ["a", "b"]
        assert path.stat().st_size == whole
        with RolloutFile(path) as file:
            file.recover(lambda _: None)
            file.append(small("c"))
        assert [rollout.id for rollout in recovered(path)] == ["a", "b", "c"]


def test_files_longer_than_a_read(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl.gz"
    many = [small(str(n), tokens=60_000 + n) for n in range(24)]
    with RolloutFile(path) as file:
        for rollout in many:
            file.append(rollout)
    assert path.stat().st_size > 2 << 20
    assert recovered(path) == many


def test_damage_is_no_torn_end(tmp_path: Path) -> None:
    """Cutting there would throw away what is whole behind it."""
    path = tmp_path / "rollouts.jsonl.gz"
    with RolloutFile(path) as file:
        for name in "abc":
            file.append(small(name))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"rollouts\.jsonl\.gz is damaged.*move it away"):
        recovered(path)
    assert path.read_bytes() == content


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl.gz"
    with RolloutFile(path) as file:
        with pytest.raises(ConfigError, match="another evaluation is writing here"):
            RolloutFile(path)
        file.append(small("a"))
        assert [rollout.id for rollout in read_rollouts(path)] == ["a"]  # whoever only looks may
    RolloutFile(path).file.close()


def test_details_that_are_no_json_become_text(tmp_path: Path) -> None:
    path, rollout = tmp_path / "rollouts.jsonl.gz", small("a")
    details: dict[str, Any] = {"path": tmp_path}
    rollout.details = details
    with RolloutFile(path) as file:
        file.append(rollout)
    assert next(read_rollouts(path)).details == {"path": str(tmp_path)}
