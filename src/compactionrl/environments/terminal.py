"""An agent in a real shell: commands in, what they print out, until the agent says twice that the task is done."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, get_args

from compactionrl.environments.commands import HOW, NoCommand, fenced_command
from compactionrl.environments.protocol import Message, Observation, Response, Verdict
from compactionrl.environments.screen import clip, plain
from compactionrl.environments.shell import CommandRefused, Ran, Shell, open_shell
from compactionrl.environments.terminal_tools import (
    COMPLETE,
    EXAMPLE,
    NO_CALL,
    STOPPED,
    TOOLS,
    Form,
    checklist,
    system_prompt,
)
from compactionrl.environments.tools import Tool, ToolError, answer_calls
from compactionrl.rollout.environment_time import OutOfTime
from compactionrl.sandboxes.protocol import Sandbox

Verifier = Callable[[Sandbox], Awaitable[Verdict]]
Prepare = Callable[[Sandbox], Awaitable[None]]


@dataclass(frozen=True)
class TerminalOptions:
    """What the agent's scaffold is.

    tools: "native" (the tools `execute_commands` and `task_complete`) or "fenced" (one ```bash block per turn).
    output_bytes: UTF-8 bytes that one turn shows at most; head and tail are kept.
    seconds: of a command, unless its `duration` says otherwise; most_seconds: that a duration may ask for.
    ask_twice: the first `task_complete` is answered with a checklist, the next one ends the work.
    """

    tools: Form = "native"
    output_bytes: int = 30_000
    seconds: float = 60
    most_seconds: float = 600
    ask_twice: bool = True

    def __post_init__(self) -> None:
        if self.tools not in get_args(Form):
            raise ValueError(f"tools must be one of {', '.join(get_args(Form))}, not {self.tools!r}.")
        if self.output_bytes < 100:
            raise ValueError(f"output_bytes must be at least 100, not {self.output_bytes}.")
        if not 0 < self.seconds <= self.most_seconds < math.inf:
            raise ValueError(
                f"seconds must be above 0 and at most most_seconds, not {self.seconds}, {self.most_seconds}."
            )


class TerminalEnvironment:
    """An Environment over any Sandbox, which it starts and stops; `verifier` judges what is in it.

    `prepare`: makes what the task needs in the sandbox that has started. `shell`: how commands run, if not in the
    sandbox's own folder and environment. `agent_seconds`: of all commands together; then the rollout
    ends by 'time'. What is malformed is answered and costs a turn.
    """

    def __init__(
        self,
        sandbox: Sandbox,
        instruction: str,
        verifier: Verifier,
        options: TerminalOptions | None = None,
        *,
        prepare: Prepare | None = None,
        shell: Shell | None = None,
        agent_seconds: float = math.inf,
    ) -> None:
        self.sandbox, self.instruction, self.verifier = sandbox, instruction, verifier
        self.options = options or TerminalOptions()
        self.prepare, self.shell = prepare, shell or open_shell(sandbox)
        self.tools: list[Any] | None = TOOLS if self.options.tools == "native" else None
        self.seconds_left = agent_seconds
        self.turn, self.asked_at, self.done = 0, 0, False

    async def start(self) -> list[Message]:
        await self.sandbox.start()
        if self.prepare:
            await self.prepare(self.sandbox)
        options = self.options
        system = system_prompt(
            options.tools,
            output_bytes=options.output_bytes,
            seconds=options.seconds,
            most_seconds=options.most_seconds,
        )
        return [{"role": "system", "content": system}, {"role": "user", "content": self.instruction}]

    async def step(self, response: Response) -> Observation:
        """Raises OutOfTime when the agent's time is used up, and whatever the sandbox raises."""
        if self.done:
            raise RuntimeError("The task has been completed, no step may follow. Start a new environment.")
        self.turn += 1
        if not self.tools:
            return Observation(clip(await self.fenced(response.text), self.options.output_bytes), self.done)
        if not response.calls:
            return Observation(NO_CALL)
        self.room = self.options.output_bytes // len(response.calls)
        tools: dict[str, Tool] = {"execute_commands": self.execute_commands, COMPLETE: self.task_complete}
        texts = await answer_calls(response, tools)
        return Observation([clip(text, self.room) for text in texts], self.done)

    async def fenced(self, text: str) -> str:
        self.room = self.options.output_bytes
        try:
            command = fenced_command(text)
            if command.strip() == COMPLETE:
                return self.task_complete()
            return self.shown(await self.run(command, self.options.seconds), self.room)
        except NoCommand as error:
            return str(error).removesuffix(f"{HOW}.") + EXAMPLE
        except CommandRefused as error:
            return str(error)

    async def execute_commands(self, commands: list, analysis: str = "", plan: str = "") -> str:
        """The tool. `analysis` and `plan` are the policy's notes to itself."""
        if self.done:
            return "Nothing was run: the work has ended."
        checked = [self.command(item) for item in commands]
        if not checked:
            raise ToolError("commands is empty. Nothing was run.")
        shown, room = list[str](), self.room
        for left, (command, seconds) in zip(range(len(checked), 0, -1), checked, strict=True):
            title = f"$ {clip(plain(command).partition(chr(10))[0], 80)}\n" if len(checked) > 1 else ""
            try:
                text = title + self.shown(await self.run(command, seconds), room // left)
            except CommandRefused as refused:
                text = title + str(refused)
            room = max(0, room - len(text.encode()))
            shown.append(text)
        return "\n".join(shown)

    def command(self, item: Any) -> tuple[str, float]:
        """An element of `commands`, checked before anything is run."""
        if not isinstance(item, dict) or not isinstance(item.get("command"), str):
            raise ToolError("Each of commands must be an object with a string 'command'. Nothing was run.")
        if unknown := item.keys() - {"command", "duration"}:
            raise ToolError(f"A command has no {sorted(unknown)[0]!r}, only command and duration. Nothing was run.")
        seconds = item.get("duration", self.options.seconds)
        if (
            isinstance(seconds, bool)
            or not isinstance(seconds, int | float)
            or not 0 < seconds <= self.options.most_seconds
        ):
            raise ToolError(
                f"duration must be a number of seconds, above 0 and at most {self.options.most_seconds:g}. Nothing was run."
            )
        return item["command"], float(seconds)

    async def run(self, command: str, seconds: float) -> Ran:
        ran = await self.shell.run(command, min(seconds, self.seconds_left))
        self.seconds_left -= ran.seconds
        if self.seconds_left <= 0:
            raise OutOfTime("the agent's time for commands is used up")
        return ran

    def shown(self, ran: Ran, most: int) -> str:
        """What the policy sees of a command: at most about `most` bytes of its output, and how it ended if not well."""
        output = clip(plain(ran.output), most).rstrip("\n")
        if ran.out_of_time:
            return f"{output}\n{STOPPED.format(seconds=ran.seconds)}".lstrip("\n")
        if ran.return_code:
            return f"{output}\n[exit status {ran.return_code}]".lstrip("\n")
        return output or "[no output]"

    def task_complete(self) -> str:
        """The tool. It ends the work if a turn before this one was shown the checklist."""
        if self.options.ask_twice and not 0 < self.asked_at < self.turn:
            self.asked_at = self.asked_at or self.turn
            return checklist(self.options.tools, self.instruction)
        self.done = True
        return "The work has ended."

    async def verify(self) -> Verdict:
        return await self.verifier(self.sandbox)

    async def close(self) -> None:
        await self.sandbox.stop(delete=True)
