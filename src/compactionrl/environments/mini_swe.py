"""Environments of mini-swe-agent behind the Environment protocol: a shell in whatever they run it in."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from compactionrl.environments.commands import HOW, NoCommand, fenced_command
from compactionrl.environments.own_thread import OwnThread
from compactionrl.environments.protocol import Message, Observation, Response, Verdict

SUBMIT = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
SYSTEM = (
    f"You work in a shell. {HOW}. Each block runs in a new shell: the working directory and variables do not "
    f"last, files do. When the task is done, run `echo {SUBMIT}` alone."
)


class Shell(Protocol):
    """What mini-swe-agent's environments (local, docker, bubblewrap, ...) have in common; `execute` may block."""

    def execute(self, action: dict[str, Any], cwd: str = "") -> dict[str, Any]:
        """{"output", "returncode", "exception_info"} of `action["command"]`; raises its Submitted at the end."""
        ...


class MiniSweEnvironment:
    """An Environment: one task in a mini-swe-agent environment.

    `environment` has been made by its own class, for this task alone; its `cleanup`, where it has one, is called on close.
    `verify` judges it when the rollout has ended, plain or async: `verify(environment) -> Verdict`; it may block where it is
    plain, as it runs in a thread. A response must have one fenced command; else it is told so, which costs a turn. Of an
    output longer than `output_chars` characters the middle is left out.
    """

    def __init__(
        self,
        environment: Shell,
        task: str,
        verify: Callable[[Any], Verdict | Awaitable[Verdict]],
        *,
        system: str = SYSTEM,
        output_chars: int = 10_000,
    ) -> None:
        if output_chars < 2:
            raise ValueError(
                f"output_chars is {output_chars}: an output keeps a head and a tail, at least 2 characters."
            )
        self.environment, self.task, self.system = environment, task, system
        self._verify, self.output_chars = verify, output_chars
        self.submitted = False
        self._thread = OwnThread()

    async def start(self) -> list[Message]:
        return [{"role": "system", "content": self.system}, {"role": "user", "content": self.task}]

    async def step(self, response: Response) -> Observation:
        if self.submitted:
            raise RuntimeError("The task has been submitted, no step may follow. Start a new environment.")
        try:
            command = fenced_command(response.text)
        except NoCommand as problem:
            return Observation(str(problem))
        try:
            result = await self._thread.call(self.environment.execute, {"command": command})
        except Exception as error:
            if not is_submitted(error):
                raise
            self.submitted = True
            return Observation("", done=True)
        return Observation(self._told(result))

    def _told(self, result: dict[str, Any]) -> str:
        output, trouble = clip(str(result["output"]), self.output_chars), result.get("exception_info")
        return "\n".join(part for part in (output.rstrip("\n"), trouble, f"[exit code {result['returncode']}]") if part)

    async def verify(self) -> Verdict:
        verdict = await self._thread.call(self._verify, self.environment)
        return await verdict if inspect.isawaitable(verdict) else verdict

    async def close(self) -> None:
        """Behind a command that may still run."""
        try:
            if (cleanup := getattr(self.environment, "cleanup", None)) is not None:
                await self._thread.call(cleanup)
        finally:
            self._thread.close()


def is_submitted(error: Exception) -> bool:
    """Whether it is mini-swe-agent's signal that the task was handed in (found by name: the package is not imported)."""
    return any(kind.__name__ == "Submitted" for kind in type(error).__mro__)


def clip(text: str, chars: int) -> str:
    """Head and tail of a text that is longer than `chars`; a mark says how many characters are missing."""
    missing = len(text) - chars
    if missing <= 0:
        return text
    head = chars - chars // 2
    return f"{text[:head]}\n[... {missing} characters left out ...]\n{text[len(text) - chars // 2 :]}"
