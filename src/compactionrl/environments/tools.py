"""What an environment with native tools answers: one text per call, also for a call that cannot be carried out."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import get_type_hints

from compactionrl.environments.protocol import Response, ToolCall

Tool = Callable[..., str | Awaitable[str]]
NAMES: dict[type, str] = {
    str: "a string",
    bool: "true or false",
    int: "an integer",
    float: "a number",
    list: "a list",
    dict: "an object",
}


class ToolError(Exception):
    """Raised by a tool for a mistake of the policy's; the message is what the policy reads."""


async def answer_calls(response: Response, tools: Mapping[str, Tool]) -> list[str]:
    """The answers to a response's calls, in order, carried out one after the other.

    `tools`: functions by name, plain or async, with the arguments as parameters. A malformed call, an unknown name, arguments
    that the function does not take or that are of another type than its annotation (str, bool, int, float, list, dict), and
    ToolError are answered with what is wrong, and the rollout goes on. Any other exception is the environment's trouble.
    """
    return [await _answer(call, tools) for call in response.calls]


async def _answer(call: ToolCall, tools: Mapping[str, Tool]) -> str:
    if call.error:
        return f"{call.error}. Nothing was done."
    tool = tools.get(call.name)
    if tool is None:
        return f"There is no tool {call.name!r}: the tools are {', '.join(tools)}."
    problem = _problem(tool, call.arguments)
    if problem:
        return f"{call.name}: {problem}. Nothing was done."
    try:
        result = tool(**call.arguments)
        return await result if inspect.isawaitable(result) else result
    except ToolError as error:
        return str(error)


def _problem(tool: Tool, arguments: dict[str, object]) -> str | None:
    """What is wrong with the arguments."""
    try:
        inspect.signature(tool).bind(**arguments)
    except TypeError as error:
        return str(error)
    hints: dict[str, type] = get_type_hints(tool if inspect.isroutine(tool) else type(tool).__call__)
    for name, value in arguments.items():
        kind = hints.get(name)
        if kind not in NAMES:
            continue
        accepted = (int, float) if kind is float else kind
        if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
            return f"argument {name!r} must be {NAMES[kind]}"
    return None
