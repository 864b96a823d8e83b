"""Carries a Dockerfile's steps out inside a sandbox that has started."""

from __future__ import annotations

import shlex
import time

from compactionrl.environments.dockerfile import Copy, Dockerfile, MakeFolder, Run
from compactionrl.sandboxes.protocol import Sandbox, SandboxError


async def build(dockerfile: Dockerfile, sandbox: Sandbox, seconds: float) -> None:
    """Raises SandboxError for a step that fails, and when all of them together take longer than `seconds`."""
    ends = time.monotonic() + seconds
    for step in dockerfile.steps:
        if time.monotonic() > ends:
            raise SandboxError(f"building took longer than build_timeout_sec ({seconds:g})")
        match step:
            case MakeFolder(path):
                await run(sandbox, f"mkdir -p {shlex.quote(path)}", ends)
            case Copy():
                await copy(step, sandbox, ends)
            case Run(command, workdir, env):
                await run(sandbox, f"sh -c {shlex.quote(command)}", ends, workdir, dict(env))


async def copy(step: Copy, sandbox: Sandbox, ends: float) -> None:
    """A folder's content goes into the target, a file becomes it, or goes into it where that is a folder."""
    files = any(source.is_file() for source in step.sources)
    into = step.into or (files and await sandbox_says(sandbox, f"[ -d {shlex.quote(step.target)} ]", ends))
    for source in step.sources:
        if source.is_dir():
            await sandbox.upload_dir(source, step.target)
        else:
            await sandbox.upload_file(source, f"{step.target.rstrip('/')}/{source.name}" if into else step.target)


async def sandbox_says(sandbox: Sandbox, test: str, ends: float) -> bool:
    result = await sandbox.exec(test, "/", timeout_sec=left(ends))
    return result.return_code == 0


async def run(sandbox: Sandbox, command: str, ends: float, cwd: str = "/", env: dict[str, str] | None = None) -> None:
    result = await sandbox.exec(command, cwd, env, left(ends))
    if result.return_code:
        said = f"{result.stdout or ''}{result.stderr or ''}"[-2000:]
        raise SandboxError(f"building the task failed: {command} ended with status {result.return_code}: {said}")


def left(ends: float) -> int:
    return max(1, int(ends - time.monotonic()))
