"""The scripted expert: it solves every task from what it sees, and sees nothing else."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compactionrl.environments.demonstrator import Demonstrator
from compactionrl.environments.notes import NotesEnvironment, NotesTasks
from compactionrl.environments.protocol import Response

Turns = list[tuple[str, str]]


class Bytes:
    """The simplest tokenizer there is."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: list[int]) -> str:
        return bytes(token_ids).decode()


def prompt(turns: Turns) -> str:
    return "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns) + "<|im_start|>assistant\n"


def play(
    expert: Demonstrator, environment: NotesEnvironment, steps_per_window: int = 10**9, tail: int = 0, limit: int = 80
) -> float:
    """The whole rollout in plain text; every `steps_per_window` steps only a summary and `tail` steps are left."""
    system, task = ((message["role"], message["content"]) for message in asyncio.run(environment.start()))
    turns: Turns = [system, task]
    since = 0
    for number in range(limit):
        reply = expert.reply(prompt(turns), number)
        observation = asyncio.run(environment.step(Response(reply)))
        if observation.done:
            return asyncio.run(environment.verify()).reward
        turns += [("assistant", reply), ("user", str(observation.text))]
        since += 1
        if since == steps_per_window:
            summary = expert.reply(prompt([*turns, ("user", "summarise")]), number)
            turns = [system, ("user", f"you {summary}"), *turns[len(turns) - 2 * tail :]]
            since = 0
    raise AssertionError("the expert did not finish")


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_the_perfect_expert_solves_every_task_with_and_without_compactions(data: st.DataObject) -> None:
    facts, updates = data.draw(st.integers(1, 12)), data.draw(st.integers(0, 3))
    fewest = facts + updates + data.draw(st.integers(1, 4))
    tasks = NotesTasks(
        notes=(fewest, fewest + 6),
        facts=facts,
        updates=updates,
        values=12,
        style=data.draw(st.sampled_from(["token", "pairs"])),
        mode=data.draw(st.sampled_from(["scan", "chain"])),
        noise=data.draw(st.integers(1, 2)),
        n_train=200,
        n_heldout=0,
    )
    expert = Demonstrator(tasks, Bytes())
    steps = data.draw(st.integers(1, 8))
    for index in data.draw(st.lists(st.integers(0, 199), min_size=3, max_size=3)):
        assert play(expert, tasks.environment("train", index)) == 1.0
        assert play(expert, tasks.environment("train", index), steps, tail=data.draw(st.integers(0, steps))) == 1.0


def test_an_expert_that_forgets_all_fails_after_a_compaction_and_only_then() -> None:
    tasks = NotesTasks(notes=(12, 12), n_train=50, n_heldout=0)
    expert = Demonstrator(tasks, Bytes(), forget=1.0)
    assert all(play(expert, tasks.environment("train", i)) == 1.0 for i in range(50))
    # Facts come early or late in 12 notes: whatever came in the first 11 is gone.
    assert not any(play(expert, tasks.environment("train", i), steps_per_window=11) for i in range(50))


SCAN = NotesTasks()
CHAIN = NotesTasks(mode="chain", style="pairs", updates=2, notes=(8, 10))


@pytest.mark.parametrize(
    ("turns", "reply"),
    [
        ([("user", "begin")], "next"),
        ([("user", "note map5")], "next"),
        ([("user", "unknown")], "next"),
        ([("user", "you found cup3")], "next"),
        ([("user", "note map5"), ("assistant", "next"), ("user", "end")], "answer map5"),
        ([("user", "you found cup3 hat1"), ("user", "note cup4"), ("user", "end")], "answer cup4 hat1"),
        ([("user", "note map5"), ("user", "note cup1"), ("user", "summarise")], "found cup1 map5"),
        ([("user", "note map5"), ("user", "again")], "found map5"),
        ([("user", "begin"), ("user", "later"), ("user", "summarise")], "found"),
        ([("user", "end")], "answer"),
        ([("user", "note map5"), ("user", "end"), ("user", "summarise")], "found map5 end"),
        ([("user", "you found map5 end")], "answer map5"),
        ([("system", "map5"), ("assistant", "cup1"), ("user", "end")], "answer"),
        ([("user", "map9 map cup maps7 xmap1 map2x"), ("user", "end")], "answer map9"),
    ],
)
def test_what_it_says_in_a_scan(turns: Turns, reply: str) -> None:
    assert Demonstrator(SCAN, Bytes()).reply(prompt(turns)) == reply


@pytest.mark.parametrize(
    ("turns", "reply"),
    [
        ([("user", "begin next n7")], "open n7"),
        ([("user", "begin next n7"), ("user", "note cup v1 next n2")], "open n2"),
        ([("user", "note cup v1 next n2"), ("user", "missing")], "open n2"),
        ([("user", "note hat v1 next n2"), ("user", "note cup v3 end")], "answer cup v3 hat v1"),
        ([("user", "note hat v1 next n2"), ("user", "summarise")], "found hat v1 next n2"),
        ([("user", "you found hat v1 next n2")], "open n2"),
        ([("user", "note hat v1 end"), ("user", "summarise")], "found hat v1 end"),
        ([("user", "you found hat v1 end")], "answer hat v1"),
        ([("user", "you lost the way")], "answer"),
    ],
)
def test_what_it_says_in_a_chain(turns: Turns, reply: str) -> None:
    assert Demonstrator(CHAIN, Bytes()).reply(prompt(turns)) == reply


def test_each_fact_is_forgotten_independently_at_the_given_rate() -> None:
    expert = Demonstrator(SCAN, Bytes(), forget=0.25, seed=1)
    request = prompt([("user", "you found cup1 map2 key3 hat4"), ("user", "summarise")])
    kept = [set(expert.reply(request, seed).split()[1:]) for seed in range(4000)]
    for fact in ("cup1", "map2", "key3", "hat4"):
        assert abs(sum(fact in words for words in kept) - 3000) < 137  # 5 standard deviations
    both = sum({"cup1", "hat4"} <= words for words in kept)
    assert abs(both - 2250) < 157


def test_a_reply_depends_on_the_prompt_and_the_seeds_alone() -> None:
    request = prompt([("user", "you found cup1 map2 key3 hat4"), ("user", "summarise")])
    replies = [
        [Demonstrator(SCAN, Bytes(), forget=0.5, seed=seed).reply(request, i) for i in range(30)] for seed in (1, 1, 2)
    ]
    assert replies[0] == replies[1] != replies[2]


def test_other_requests_for_a_summary() -> None:
    expert = Demonstrator(SCAN, Bytes(), summary_requests=["Write it down.\n"])
    assert expert.reply(prompt([("user", "note cup1"), ("user", "Write it down.")])) == "found cup1"
    assert expert.reply(prompt([("user", "note cup1"), ("user", "summarise")])) == "next"


def test_as_a_sampler() -> None:
    expert = Demonstrator(SCAN, Bytes())
    ids = Bytes().encode(prompt([("user", "note map5"), ("user", "end")]), add_special_tokens=False)

    def sample(max_tokens: int) -> tuple[list[int], list[float], str, list[int]]:
        request = expert.sample(
            ids, max_tokens=max_tokens, stop_token_ids=[300, 301], temperature=1.0, top_p=1.0, seed=0, affinity="a"
        )
        sampled = asyncio.run(request)
        return sampled.token_ids, sampled.logprobs, sampled.finish, sampled.versions

    whole = [*b"answer map5", 300]
    assert sample(12) == (whole, [0.0] * 12, "stop", [0] * 12)
    assert sample(11) == (whole[:11], [0.0] * 11, "length", [0] * 11)


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match="forget is a probability"):
        Demonstrator(SCAN, Bytes(), forget=1.5)
    with pytest.raises(ValueError, match="no ChatML user turn"):
        Demonstrator(SCAN, Bytes()).reply("User: begin")
