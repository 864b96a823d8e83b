"""Answers to native calls: one per call, whatever the call is."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from compactionrl.environments.protocol import Response, ToolCall
from compactionrl.environments.tools import ToolError, answer_calls

ran: list[Any] = []


def read(page: int, loud: bool = False) -> str:
    ran.append(page)
    if page > 9:
        raise ToolError("There are 9 pages.")
    return f"page {page}{'!' * loud}"


async def wait(seconds: float, reasons: list, note=None) -> str:  # type: ignore[no-untyped-def,type-arg]
    await asyncio.sleep(0)
    return f"{seconds} {reasons} {note}"


class Shell:
    def __call__(self, command: str) -> str:
        return command.upper()


TOOLS = {"read": read, "wait": wait, "shell": Shell()}


def answers(*calls: ToolCall) -> list[str]:
    return asyncio.run(answer_calls(Response("", calls=list(calls)), TOOLS))


@pytest.mark.parametrize(
    ("name", "arguments", "answer"),
    [
        ("read", {"page": 3}, "page 3"),
        ("read", {"page": 3, "loud": True}, "page 3!"),
        ("read", {"page": 10}, "There are 9 pages."),
        ("read", {}, "read: missing a required argument: 'page'. Nothing was done."),
        ("read", {"page": 3, "line": 1}, "read: got an unexpected keyword argument 'line'. Nothing was done."),
        ("read", {"page": "3"}, "read: argument 'page' must be an integer. Nothing was done."),
        ("read", {"page": True}, "read: argument 'page' must be an integer. Nothing was done."),
        ("read", {"page": 3, "loud": 1}, "read: argument 'loud' must be true or false. Nothing was done."),
        ("wait", {"seconds": 1, "reasons": [], "note": {}}, "1 [] {}"),
        ("wait", {"seconds": None, "reasons": []}, "wait: argument 'seconds' must be a number. Nothing was done."),
        ("wait", {"seconds": 0.5, "reasons": {}}, "wait: argument 'reasons' must be a list. Nothing was done."),
        ("shell", {"command": "ls"}, "LS"),
        ("shell", {"command": ["ls"]}, "shell: argument 'command' must be a string. Nothing was done."),
        ("fly", {}, "There is no tool 'fly': the tools are read, wait, shell."),
        ("", {}, "There is no tool '': the tools are read, wait, shell."),
    ],
)
def test_each_call_is_answered(name: str, arguments: dict[str, Any], answer: str) -> None:
    assert answers(ToolCall("c", name, arguments)) == [answer]


def test_a_malformed_call_is_not_carried_out_and_the_others_are() -> None:
    ran.clear()
    broken = ToolCall("b", "read", {"page": 5}, error="Malformed call: it is not closed")
    found = answers(ToolCall("a", "read", {"page": 1}), broken, ToolCall("c", "read", {"page": 2}))
    assert found == ["page 1", "Malformed call: it is not closed. Nothing was done.", "page 2"]
    assert ran == [1, 2]


def test_trouble_of_the_tool_itself_is_not_the_policys() -> None:
    def broken() -> str:
        raise TypeError("the disk is gone")

    with pytest.raises(TypeError, match="the disk is gone"):
        asyncio.run(answer_calls(Response("", calls=[ToolCall("a", "broken", {})]), {"broken": broken}))
