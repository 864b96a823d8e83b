"""The logbook: its books are kept twice, an honest reader is rewarded, everything else is told what to do."""

import asyncio
import re
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compactionrl.environments.logbook import GOODS, LogbookTasks
from compactionrl.environments.protocol import Response, ToolCall

RECEIVED = re.compile(r"Received (\d+) crates of ([a-z ]+) from the")
SHIPPED = re.compile(r"Shipped (\d+) crates of ([a-z ]+) to ")
CORRECTED = re.compile(r"Correction to page (\d+): the delivery there was (\d+) crates of ([a-z ]+), not (\d+)\.")


def read_books(pages):
    """The stock after each page, from the text alone; corrections have to fit what they correct."""
    stock, delivered = Counter(), {}
    for number, page in enumerate(pages, 1):
        for crates, good in RECEIVED.findall(page):
            stock[good] += int(crates)
            delivered[number, good] = int(crates)
        for crates, good in SHIPPED.findall(page):
            stock[good] -= int(crates)
        for earlier, actual, good, wrong in CORRECTED.findall(page):
            assert int(earlier) < number
            assert delivered.pop((int(earlier), good)) == int(wrong) != int(actual)
            stock[good] += int(actual) - int(wrong)
        assert all(crates >= 0 for crates in stock.values())
    return stock


def step(environment, text="", calls=()):
    return asyncio.run(environment.step(Response(text, calls=list(calls))))


def reward(environment):
    return asyncio.run(environment.verify()).reward


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 10**6),
    st.integers(1, len(GOODS)),
    st.integers(0, 5),
    st.floats(0, 1),
    st.tuples(st.integers(1, 20), st.integers(0, 30)),
)
def test_the_books_can_be_read_from_the_pages(seed, goods, chatter, corrections, pages):
    low, more = pages
    tasks = LogbookTasks(seed=seed, pages=(low, low + more), goods=goods, chatter=chatter, corrections=corrections)
    task = tasks.task("train", seed % 1000)
    assert low <= len(task.pages) <= low + more
    assert len(task.stock) == goods
    stock = read_books(task.pages)
    assert task.stock == {good: stock[good] for good in task.stock}
    sentences = [re.sub(r"^Page \d+ of \d+\. ", "", page).count(".") for page in task.pages]
    assert all(chatter + 1 <= n <= chatter + 3 for n in sentences)  # "Mr Hollis" has no full stop


def test_corrections_happen_about_as_often_as_asked():
    entries = Counter()
    for index in range(200):
        for page in LogbookTasks(corrections=0.3, chatter=0).task("train", index).pages:
            entries.update(re.findall(r"\b(Received|Shipped|Correction)\b", page))
    assert 0.1 < entries["Correction"] / entries.total() < 0.3  # of those that have something to correct
    assert 0.25 < entries["Shipped"] / entries.total() < 0.45


def test_tasks_differ_within_and_across_the_splits_and_come_again():
    tasks = LogbookTasks()
    texts = [tasks.task(split, index).pages for split in ("train", "heldout") for index in range(300)]
    assert len(set(texts)) == 600
    assert LogbookTasks().task("heldout", 7) == tasks.task("heldout", 7)
    assert LogbookTasks(seed=1).task("heldout", 7) != tasks.task("heldout", 7)


def test_a_reader_with_tools_is_rewarded():
    environment = LogbookTasks().environment("heldout", 3)
    first = step(environment, calls=[ToolCall("a", "read", {"page": 1}), ToolCall("b", "read", {"page": 2})])
    assert first.text == list(environment.task.pages[:2])
    assert not first.done
    assert step(environment, calls=[ToolCall("c", "answer", {"stock": environment.task.stock})]).done
    assert reward(environment) == 1.0
    with pytest.raises(RuntimeError, match="answered"):
        step(environment, calls=[ToolCall("d", "read", {"page": 1})])


def test_a_reader_with_commands_is_rewarded():
    environment = LogbookTasks(calls="text").environment("heldout", 3)
    assert environment.tools is None
    assert step(environment, "I begin.\n```\nread 1\n```").text == environment.task.pages[0]
    assert step(environment, "> Read page 2").text == environment.task.pages[1]
    words = ", ".join(f"{good}: {number}" for good, number in environment.task.stock.items())
    assert step(environment, f"answer {words}").done
    assert reward(environment) == 1.0


def test_a_wrong_answer_or_none_is_not_rewarded():
    environment = LogbookTasks().environment("heldout", 3)
    assert reward(environment) == 0.0
    wrong = {good: number + (place == 0) for place, (good, number) in enumerate(environment.task.stock.items())}
    assert step(environment, calls=[ToolCall("c", "answer", {"stock": wrong})]).done
    verdict = asyncio.run(environment.verify())
    assert (verdict.reward, verdict.details["right"]) == (0.0, 2)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (ToolCall("a", "", {}, "malformed call: not JSON"), "not JSON"),
        (ToolCall("a", "write", {}), "no tool 'write'"),
        (ToolCall("a", "read", {}), "page must be"),
        (ToolCall("a", "read", {"page": "one"}), "page must be"),
        (ToolCall("a", "read", {"page": True}), "page must be"),
        (ToolCall("a", "read", {"page": 0}), "no page 0"),
        (ToolCall("a", "read", {"page": 10**30}), "no page"),
        (ToolCall("a", "answer", {"stock": [1]}), "must be an object"),
        (ToolCall("a", "answer", {"stock": {"pepper": "many"}}), "must be an object"),
        (ToolCall("a", "answer", {"stock": {}}), "lacks"),
    ],
)
def test_bad_calls_are_told(call, told):
    environment = LogbookTasks().environment("heldout", 0)
    observation = step(environment, calls=[call])
    assert told in observation.text[0]
    assert not observation.done


@pytest.mark.parametrize("text", ["", "I do not know", "read", "read the page", "already read 2"])
def test_text_without_a_command_is_told(text):
    environment = LogbookTasks(calls="text").environment("heldout", 0)
    assert "no command" in step(environment, text).text


def test_an_answer_that_names_a_good_twice_is_told():
    environment = LogbookTasks(calls="text", goods=1).environment("heldout", 0)
    (good,) = environment.task.stock
    assert "lacks" in step(environment, f"answer {good} 3 {good} 4").text


def test_a_response_without_a_call_is_told():
    assert "Call a tool" in step(LogbookTasks().environment("heldout", 0), "Hello").text


@pytest.mark.parametrize(
    "dials", [{"calls": "json"}, {"pages": (3, 2)}, {"pages": (1,)}, {"goods": 0}, {"goods": 13}, {"corrections": 2}]
)
def test_bad_dials_are_refused(dials):
    with pytest.raises(ValueError, match="must be"):
        LogbookTasks(**dials)
