"""The notes tasks: what they contain, that no two are alike, and when they pay."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from dataclasses import replace
from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compactionrl.environments.notes import NAMES, NOISE, SLOTS, NotesEnvironment, NotesTask, NotesTasks
from compactionrl.environments.protocol import Observation, Response


@st.composite
def dials(draw: st.DrawFn) -> NotesTasks:
    facts, updates = draw(st.integers(1, 6)), draw(st.integers(0, 3))
    fewest = facts + updates + draw(st.integers(2, 5))
    return NotesTasks(
        seed=draw(st.integers(0, 5)),
        notes=(fewest, fewest + draw(st.integers(0, 4))),
        facts=facts,
        values=draw(st.integers(3, 9)),
        style=draw(st.sampled_from(["token", "pairs"])),
        updates=updates,
        noise=draw(st.integers(1, 3)),
        mode=draw(st.sampled_from(["scan", "chain"])),
        n_train=40,
        n_heldout=20,
    )


@st.composite
def early_dials(draw: st.DrawFn) -> NotesTasks:
    facts, updates = draw(st.integers(1, 4)), draw(st.integers(0, 2))
    fewest = facts + updates + draw(st.integers(0, 5))
    return NotesTasks(
        seed=draw(st.integers(0, 5)),
        notes=(fewest, fewest + draw(st.integers(0, 6))),
        facts=facts,
        values=draw(st.integers(6, 9)),
        updates=updates,
        noise=draw(st.integers(1, 2)),
        repeats=draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)),
        early=draw(st.integers(0, 100)) / 100,
        mode=draw(st.sampled_from(["scan", "chain"])),
        n_train=6,
        n_heldout=0,
    )


def share(early: float, length: int) -> int:
    """Notes of the first share, rounded up exactly."""
    return -(-round(early * 100) * length // 100)


def say(environment: NotesEnvironment, text: str) -> Observation:
    return asyncio.run(environment.step(Response(text)))


def reward(environment: NotesEnvironment) -> float:
    return asyncio.run(environment.verify()).reward


def details(environment: NotesEnvironment) -> dict[str, object]:
    return asyncio.run(environment.verify()).details


def contents(task: NotesTask) -> tuple[object, ...]:
    return task.prompt, task.commands, task.notes


def read_all(environment: NotesEnvironment) -> list[str]:
    return [str(say(environment, command).text) for command in environment.task.commands]


SCAN = NotesTask(
    system="rules",
    prompt="begin",
    commands=("next", "next", "next"),
    notes=("note map0", "note rain", "note cup3"),
    answer=("cup3", "map0"),
)
CHAIN = NotesTask(
    system="rules",
    prompt="begin next n7",
    commands=("open n7", "open n2"),
    notes=("note cup v1 next n2", "note rain end"),
    answer=("cup v1",),
)


def test_a_scan_reads_each_note_once_and_then_says_end() -> None:
    environment = NotesEnvironment(SCAN)
    start = asyncio.run(environment.start())
    assert start == [{"role": "system", "content": "rules"}, {"role": "user", "content": "begin"}]
    assert read_all(environment) == ["note map0", "note rain", "note cup3"]
    assert say(environment, "next") == say(environment, " next\n") == Observation("end")


def test_a_chain_opens_only_the_note_that_is_next_and_only_once() -> None:
    environment = NotesEnvironment(CHAIN)
    assert say(environment, "open n2") == Observation("missing")
    assert say(environment, "open n7") == Observation("note cup v1 next n2")
    assert say(environment, "open n7") == Observation("missing")
    assert say(environment, "next") == Observation("unknown")
    assert say(environment, "open n2") == Observation("note rain end")
    assert say(environment, "open n2") == Observation("missing")


@pytest.mark.parametrize(
    ("answer", "paid", "right"),
    [
        ("answer cup3 map0", 1.0, 2),
        ("  answer\n cup3\tmap0 ", 1.0, 2),
        ("answer map0 cup3", 0.0, 2),
        ("answer cup3", 0.0, 1),
        ("answer cup3 map0 map0", 0.0, 2),
        ("answer cup3 map1", 0.0, 1),
        ("answer cup33 map00", 0.0, 0),
        ("answer", 0.0, 0),
    ],
)
def test_only_the_exact_answer_pays(answer: str, paid: float, right: int) -> None:
    environment = NotesEnvironment(SCAN)
    assert say(environment, answer).done
    assert reward(environment) == paid
    found = details(environment)
    assert (found["facts_right"], found["facts"]) == (right, 2)
    assert (found["expected"], found["answered"]) == ("cup3 map0", " ".join(answer.split()[1:]))


def test_no_answer_is_no_reward_and_nothing_follows_an_answer() -> None:
    environment = NotesEnvironment(SCAN)
    read_all(environment)
    assert reward(environment) == 0.0
    assert details(environment)["answered"] is None
    say(environment, "answer cup3 map0")
    with pytest.raises(RuntimeError, match="has been answered"):
        say(environment, "next")
    assert reward(environment) == 1.0


def test_the_word_none_is_not_a_missing_answer() -> None:
    environment = NotesEnvironment(SCAN)
    say(environment, "answer None")
    assert details(environment)["answered"] == "None"


HOSTILE = [
    "",
    " ",
    "Next",
    "next next",
    "next; answer",
    "<|im_end|>next",
    "open",
    "open n7 n2",
    "OPEN n7",
    "answers cup3",
]


@pytest.mark.parametrize("task", [SCAN, CHAIN])
@given(text=st.sampled_from(HOSTILE) | st.text() | st.lists(st.sampled_from([*HOSTILE, "x", "\x00"])).map(" ".join))
def test_text_that_is_no_command_gets_one_word_and_changes_nothing(task: NotesTask, text: str) -> None:
    words = text.split()
    if words[:1] == ["answer"] or " ".join(words) in task.commands:
        return
    environment = NotesEnvironment(task)
    assert say(environment, text) in (Observation("unknown"), Observation("missing"))
    assert environment.read == 0
    assert read_all(environment) == list(task.notes)


def test_a_long_answer_is_not_recorded_whole() -> None:
    environment = NotesEnvironment(SCAN)
    say(environment, "answer " + "cup3 " * 10_000)
    assert len(str(details(environment)["answered"])) == 200


@settings(max_examples=60, deadline=None)
@given(tasks=dials())
def test_a_task_holds_what_the_dials_say(tasks: NotesTasks) -> None:
    lengths = Counter()
    for index in range(tasks.size("train")):
        task = tasks.task("train", index)
        lengths[len(task.notes)] += 1
        latest: dict[int, str] = {}
        fact_notes = 0
        for note in task.notes:
            found = tasks.read_facts(note)
            assert len(found) <= 1
            for slot, fact in found.items():
                assert latest.get(slot) != fact, "an update must change the value"
                latest[slot] = fact
            fact_notes += len(found)
            if not found:
                assert sum(word in NOISE for word in note.split()) == tasks.noise
        assert fact_notes == tasks.facts + tasks.updates
        assert task.answer == tuple(latest[slot] for slot in range(tasks.facts))
        if tasks.mode == "chain":
            names = [command.removeprefix("open ") for command in task.commands]
            assert len(set(names)) == len(names)
            assert set(names) <= set(NAMES)
            assert task.prompt == f"begin next {names[0]}"
            assert [note.rsplit(" next ")[-1] for note in task.notes[:-1]] == names[1:]
            assert task.notes[-1].endswith(" end")
    assert set(lengths) == set(range(tasks.notes[0], tasks.notes[1] + 1))
    assert max(lengths.values()) - min(lengths.values()) <= 1


@settings(max_examples=40, deadline=None)
@given(tasks=dials())
def test_splits_share_no_task_and_repeat_none(tasks: NotesTasks) -> None:
    seen = [contents(tasks.task(split, i)) for split in ("train", "heldout") for i in range(tasks.size(split))]
    assert len(set(seen)) == len(seen) == 60


@pytest.mark.parametrize(
    ("facts", "values", "updates", "length", "early", "repeats"),
    [
        (1, 2, 0, 2, 1.0, [1]),
        (2, 2, 1, 4, 1.0, [1]),
        (1, 3, 2, 3, 1.0, [1]),
        (3, 1, 0, 3, 1.0, [1]),
        (1, 2, 0, 3, 0.5, [1]),  # the fact in the first two notes of three
        (1, 2, 0, 3, 0.0, [2, 1, 3]),  # in the first one
        (2, 1, 0, 3, 0.4, [1, 4]),  # two facts need two notes
        (1, 2, 1, 4, 0.75, [3]),
    ],
)
def test_the_tasks_of_one_length_are_exactly_all_there_are(
    facts: int, values: int, updates: int, length: int, early: float, repeats: list[int]
) -> None:
    def valid(folder: tuple[str, ...]) -> bool:
        found = [note for note in folder if note not in NOISE]
        by_slot = {slot: [note[3:] for note in found if note[:3] == slot] for slot in SLOTS[:facts]}
        changed = all(a != b for given in by_slot.values() for a, b in pairwise(given))
        late = [note for note in folder[max(facts + updates, share(early, length)) :] if note not in NOISE]
        return len(found) == facts + updates and all(by_slot.values()) and changed and not late

    def written(note: str) -> str:
        times = repeats[NOISE.index(note) % len(repeats)] if note in NOISE else 1
        return " ".join(["note", *[note] * times])

    words = [*NOISE, *(f"{slot}{value}" for slot in SLOTS[:facts] for value in range(values))]
    brute = {tuple(map(written, folder)) for folder in product(words, repeat=length) if valid(folder)}
    size = {"n_train": len(brute) // 2, "n_heldout": len(brute) - len(brute) // 2}
    dials = {
        "notes": (length, length),
        "facts": facts,
        "values": values,
        "updates": updates,
        "noise": 1,
        "early": early,
        "repeats": repeats,
    }
    tasks = NotesTasks(**dials, **size)  # type: ignore[arg-type]
    assert tasks.distinct(length) == len(brute)
    train, heldout = ({tasks.task(split, i).notes for i in range(tasks.size(split))} for split in ("train", "heldout"))
    assert train | heldout == brute
    assert not train & heldout
    with pytest.raises(ValueError, match=f"give {len(brute)} distinct tasks with {length} notes"):
        NotesTasks(**dials, n_train=len(brute), n_heldout=1)  # type: ignore[arg-type]


@settings(max_examples=80, deadline=None)
@given(tasks=early_dials())
def test_early_facts_lie_in_the_first_share_of_the_notes(tasks: NotesTasks) -> None:
    """Unless that is too little room for them: then they are the first notes of all."""
    for index in range(tasks.size("train")):
        notes = tasks.task("train", index).notes
        places = [place for place, note in enumerate(notes) if tasks.read_facts(note)]
        assert len(places) == tasks.facts + tasks.updates
        assert places[-1] < max(share(tasks.early, len(notes)), tasks.facts + tasks.updates)


@pytest.mark.parametrize(("early", "length", "last"), [(0.28, 25, 7), (0.56, 25, 14), (0.5, 25, 13), (1.0, 25, 25)])
def test_a_share_is_rounded_up_exactly(early: float, length: int, last: int) -> None:
    """0.28 of 25 notes are 7, though 0.28 * 25 is a little more in floating point."""
    tasks = NotesTasks(notes=(length, length), early=early, n_train=400, n_heldout=0)
    drawn = [tasks.task("train", index).notes for index in range(400)]
    assert max(place for notes in drawn for place, note in enumerate(notes, 1) if tasks.read_facts(note)) == last


@settings(max_examples=40, deadline=None)
@given(tasks=early_dials())
def test_repeats_change_the_lengths_of_noise_and_nothing_else(tasks: NotesTasks) -> None:
    """Word by word: one that stands r times in the plain note stands r times `repeats` in the other."""
    plain = replace(tasks, repeats=(1,))
    for index in range(tasks.size("train")):
        repeated, once = tasks.task("train", index), plain.task("train", index)
        assert replace(repeated, notes=()) == replace(once, notes=())
        for note, short in zip(repeated.notes, once.notes, strict=True):
            times = {word: tasks.repeats[NOISE.index(word) % len(tasks.repeats)] for word in NOISE}
            assert note.split() == [word for word in short.split() for _ in range(times.get(word, 1))]
    assert tasks.distinct(tasks.notes[0]) == plain.distinct(tasks.notes[0])
    assert tasks.texts == plain.texts


def test_noise_of_unequal_length() -> None:
    tasks = NotesTasks(notes=(3, 3), facts=1, noise=1, repeats=(1, 3), n_train=200, n_heldout=0)
    notes = {note for index in range(200) for note in tasks.task("train", index).notes}
    assert {"note rain", "note wind wind wind", "note snow", "note dust dust dust", "note haze"} <= notes


def test_without_early_and_repeats_the_tasks_are_those_of_before() -> None:
    """Tasks of record: runs that were made before there were these dials must stay comparable."""
    tasks = NotesTasks(seed=1, notes=(5, 22), facts=4, values=8, noise=1, n_train=100_000, n_heldout=2000)
    assert " ".join(tasks.task("heldout", 0).notes).split("note ")[1:5] == ["snow ", "key5 ", "mist ", "hail "]
    text = repr([tasks.task(split, index) for split in ("train", "heldout") for index in range(300)])
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "64298ce28b46c691"
    explicit = replace(tasks, early=1.0, repeats=[1])
    assert [explicit.task("train", i) for i in range(50)] == [tasks.task("train", i) for i in range(50)]


def test_all_chains_of_a_tiny_folder_differ() -> None:
    tasks = NotesTasks(notes=(2, 2), facts=1, values=1, noise=0, mode="chain", n_train=3000, n_heldout=120)
    assert tasks.distinct(2) == 2 * 40 * 39 == 3120  # the fact first or second, and an ordered pair of names
    seen = {contents(tasks.task(split, i)) for split in ("train", "heldout") for i in range(tasks.size(split))}
    assert len(seen) == 3120


def test_facts_values_and_places_are_evenly_spread() -> None:
    tasks = NotesTasks(notes=(8, 8), facts=4, values=8, n_train=4000, n_heldout=0)
    drawn = [tasks.task("train", i) for i in range(4000)]
    counts = Counter(fact for task in drawn for fact in task.answer)
    assert len(counts) == 32
    assert all(abs(count - 500) < 105 for count in counts.values())  # 5 standard deviations
    for place in range(8):
        held = sum(bool(tasks.read_facts(task.notes[place])) for task in drawn)
        assert abs(held - 2000) < 160


def test_same_seed_same_tasks_other_seed_other_tasks() -> None:
    first, again, other = (NotesTasks(seed=seed) for seed in (3, 3, 4))
    assert [first.task("heldout", i) for i in range(20)] == [again.task("heldout", i) for i in range(20)]
    assert [first.task("heldout", i) for i in range(20)] != [other.task("heldout", i) for i in range(20)]
    assert first.task_id("heldout", 7) == "notes-heldout-7"


def test_held_out_tasks_do_not_depend_on_how_many_there_are() -> None:
    few, many = (NotesTasks(n_train=1000, n_heldout=count) for count in (9, 2000))
    assert [few.task("heldout", i) for i in range(9)] == [many.task("heldout", i) for i in range(9)]


@pytest.mark.parametrize(
    ("dials", "message"),
    [
        ({"style": "words"}, "style must be one of token, pairs"),
        ({"mode": "loop"}, "mode must be one of scan, chain"),
        ({"facts": 0}, "facts must be an integer from 1 to 12"),
        ({"facts": 13, "notes": (20, 20)}, "facts must be an integer from 1 to 12"),
        ({"facts": 2.0}, "facts must be an integer"),
        ({"values": 1, "updates": 1}, "values must be an integer from 2"),
        ({"noise": -1}, "noise must be an integer from 0"),
        ({"early": 1.1}, "early is a share from 0 to 1, not 1.1"),
        ({"early": -0.1}, "early is a share"),
        ({"repeats": []}, "repeats must be integers from 1 to 1000"),
        ({"repeats": [1, 0]}, "repeats must be integers from 1"),
        ({"repeats": [1.5]}, "repeats must be integers"),
        # Early facts leave fewer places: 2 values of 1 slot in the first of 2 notes, and 15 kinds of noise behind it.
        (
            {"facts": 1, "values": 2, "notes": (2, 2), "early": 0.5, "n_train": 31, "n_heldout": 0},
            "give 30 distinct tasks",
        ),
        ({"notes": (3, 9)}, r"facts \+ updates = 4 <= fewest"),
        ({"notes": (9, 8)}, "fewest <= most"),
        ({"notes": (5,)}, r"\[fewest, most\]"),
        ({"notes": (5, 41), "mode": "chain"}, "<= 40"),
        ({"n_train": -1}, "n_train must be an integer from 0"),
        ({"facts": 1, "values": 2, "notes": (1, 1), "noise": 0, "n_train": 2, "n_heldout": 1}, "give 2 distinct tasks"),
    ],
)
def test_a_wrong_dial_is_refused_by_name(dials: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NotesTasks(**dials)  # type: ignore[arg-type]


def test_a_wrong_split_or_index_is_refused() -> None:
    tasks = NotesTasks(n_train=3, n_heldout=2)
    assert (tasks.size("train"), tasks.size("heldout")) == (3, 2)
    with pytest.raises(ValueError, match="train, heldout"):
        tasks.size("test")
    for index in (-1, 2):
        with pytest.raises(IndexError, match="it has 2 tasks"):
            tasks.environment("heldout", index)
