"""Commands in fenced blocks: how a policy without native tools says what to run."""

from __future__ import annotations

import re
from collections.abc import Iterator

LANGUAGES = ("bash", "sh", "shell")
FENCE = re.compile(r"^ {0,3}(?P<ticks>`{3,}) *(?P<language>[^\s`]*)[^`\n]*$")
HOW = "Write exactly one block that begins with a line ```bash and ends with a line ```"


class NoCommand(Exception):
    """The text has not exactly one command; the message is what the policy reads."""


def fenced_command(text: str) -> str:
    """The content of the one fenced block that is a command.

    Blocks marked bash, sh or shell are commands; where there is none, blocks without a mark are. A block ends with a line
    of as many backticks as it began with, or more, so a command that writes three backticks stands between four. Raises
    NoCommand if there is no command, if there are several (none is preferred), if it is empty, or if any block is not
    closed: what is missing of a cut response may have mattered.
    """
    blocks: dict[str, list[str]] = {}
    lines = iter(re.split(r"\r?\n", text))
    for line in lines:
        opening = FENCE.match(line)
        if opening:
            blocks.setdefault(opening["language"].lower(), []).append(_content(lines, opening["ticks"]))
    commands = [block for language in LANGUAGES for block in blocks.get(language, [])] or blocks.get("", [])
    if not commands:
        raise NoCommand(f"No command was found. {HOW}.")
    if len(commands) > 1:
        raise NoCommand(f"{len(commands)} commands were found, and none was run. {HOW}.")
    if not commands[0].strip():
        raise NoCommand(f"The command is empty. {HOW}.")
    return commands[0]


def _content(lines: Iterator[str], ticks: str) -> str:
    content: list[str] = []
    for line in lines:
        if re.fullmatch(rf" {{0,3}}{ticks}`*\s*", line):
            return "\n".join(content)
        content.append(line)
    raise NoCommand(f"A block is not closed, and nothing was run. {HOW}.")
