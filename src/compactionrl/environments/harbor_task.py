"""A task in Harbor's format: a folder with an instruction, what to build, tests, and a solution for those who check the task."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Iterator
from functools import cached_property, partial
from math import ceil, inf
from pathlib import Path

from compactionrl.environments.dockerfile import Dockerfile, DockerfileError, Run, read_dockerfile
from compactionrl.environments.harbor_settings import TaskFolderError, read_settings, resolved
from compactionrl.environments.harbor_verifier import HarborVerifier
from compactionrl.environments.image_build import build
from compactionrl.environments.image_cache import ImageCache
from compactionrl.environments.protocol import Verdict
from compactionrl.environments.shell import open_shell
from compactionrl.environments.terminal import TerminalEnvironment, TerminalOptions
from compactionrl.sandboxes.protocol import TIMED_OUT, Sandbox, SandboxError

SETTINGS, INSTRUCTION = "task.toml", "instruction.md"
ENGINES = ("docker-compose.yaml", "docker-compose.yml", "singularity-compose.yaml")
LOG_FOLDERS = "mkdir -p /logs/agent /logs/verifier /logs/artifacts && chmod 777 /logs/*"


class HarborTask:
    """`id` is the folder's name. Raises TaskFolderError for a folder that cannot be used here, and says why."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self.id = self.folder.resolve().name
        for name in (SETTINGS, INSTRUCTION, "tests/test.sh"):
            if not (self.folder / name).is_file():
                raise TaskFolderError(f"{self.folder} has no {name}: it is no Harbor task for Linux")
        self.settings = read_settings(self.folder / SETTINGS)
        self.instruction = (self.folder / INSTRUCTION).read_text()
        self.dockerfile = self._dockerfile()
        self.image = ImageCache()

    def _dockerfile(self) -> Dockerfile:
        folder = self.folder / "environment"
        for name in ENGINES:
            if (folder / name).exists():
                raise TaskFolderError(f"{folder / name}: tasks of several containers are not supported")
        try:
            return read_dockerfile(folder / "Dockerfile")
        except FileNotFoundError:
            raise TaskFolderError(
                f"{folder} has no Dockerfile: images that are only named cannot be had here"
            ) from None
        except DockerfileError as error:
            raise TaskFolderError(str(error)) from None

    @property
    def env(self) -> dict[str, str]:
        """Variables of the image and of the task. Raises TaskFolderError for one that this process lacks."""
        return self.dockerfile.env | resolved(self.settings.environment.env)

    @property
    def workdir(self) -> str:
        return self.settings.environment.workdir or self.dockerfile.workdir

    @property
    def network(self) -> bool:
        """Only where the task asks for it: Harbor's default is a network, ours is none."""
        return self.settings.environment.network_mode == "public"

    @property
    def limits(self) -> dict[str, float]:
        """What the task says of its sandbox, by the names of `sandboxes.limits.Limits`."""
        table = self.settings.environment
        said = {"cpus": table.cpus, "memory_mb": table.memory_mb, "disk_mb": table.storage_mb}
        return {name: value for name, value in said.items() if value is not None}

    @cached_property
    def digest(self) -> str:
        """Of the instruction and of everything in `environment`: equal for what is the same task under two names."""
        digest = hashlib.sha256(self.instruction.encode())
        for path in _files(self.folder / "environment"):
            name = path.relative_to(self.folder).as_posix()
            content = path.readlink().as_posix().encode() if path.is_symlink() else path.read_bytes()
            digest.update(f"\0{name}\0{path.lstat().st_mode & 0o111}\0{len(content)}\0".encode() + content)
        return digest.hexdigest()

    async def build(self, sandbox: Sandbox) -> None:
        """Make what the Dockerfile says in a sandbox that has started. Raises SandboxError if a step fails.

        What its RUN steps make is kept for the next sandbox, if that saves time.
        """
        steps = partial(build, self.dockerfile, seconds=self.settings.environment.build_timeout_sec)
        runs = any(isinstance(step, Run) for step in self.dockerfile.steps)
        await (self.image.provide(sandbox, steps) if runs else steps(sandbox))
        result = await sandbox.exec(f"{LOG_FOLDERS} && mkdir -p -- {shlex.quote(self.workdir)}", "/", timeout_sec=60)
        if result.return_code:
            raise SandboxError(f"no folder can be made: {result.stderr or result.stdout}")

    def verifier(self, reward: str = "reward") -> HarborVerifier:
        return HarborVerifier(self.folder / "tests", self.settings.verifier, reward, self.env, self.workdir)

    def environment(
        self, sandbox: Sandbox, options: TerminalOptions | None = None, reward: str = "reward"
    ) -> TerminalEnvironment:
        """An agent in `sandbox` at work on this task."""
        agent = self.settings.agent
        return TerminalEnvironment(
            sandbox,
            self.instruction,
            self.verifier(reward),
            options,
            prepare=self.build,
            shell=open_shell(sandbox, self.workdir, self.env, agent.user),
            agent_seconds=agent.timeout_sec or inf,
        )

    async def solve(self, sandbox: Sandbox) -> None:
        """Run the solution. Raises TaskFolderError if there is none, SandboxError if it runs out of the agent's time."""
        if not (self.folder / "solution" / "solve.sh").is_file():
            raise TaskFolderError(f"{self.folder} has no solution/solve.sh")
        await sandbox.upload_dir(self.folder / "solution", "/solution")
        agent = self.settings.agent
        result = await sandbox.exec(
            "chmod +x /solution/solve.sh; /solution/solve.sh > /logs/agent/oracle.txt 2>&1",
            self.workdir,
            {**self.env, "DEBIAN_FRONTEND": "noninteractive", **resolved(self.settings.solution.env)},
            ceil(agent.timeout_sec) if agent.timeout_sec else None,
            agent.user,
        )
        if result.return_code == TIMED_OUT:
            raise SandboxError("solve.sh ran out of the agent's time")


async def run_oracle(task: HarborTask, sandbox: Sandbox, reward: str = "reward") -> Verdict:
    """What the task's own solution is worth: 1.0, or something is wrong with the task or the sandbox."""
    return await _run(task, sandbox, reward, solve=True)


async def run_nothing(task: HarborTask, sandbox: Sandbox, reward: str = "reward") -> Verdict:
    """What an agent gets that does nothing: 0.0, or the task gives its reward away."""
    return await _run(task, sandbox, reward, solve=False)


async def _run(task: HarborTask, sandbox: Sandbox, reward: str, *, solve: bool) -> Verdict:
    try:
        await sandbox.start()
        await task.build(sandbox)
        if solve:
            await task.solve(sandbox)
        return await task.verifier(reward)(sandbox)
    finally:
        await sandbox.stop(delete=True)


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_symlink() or path.is_file())
