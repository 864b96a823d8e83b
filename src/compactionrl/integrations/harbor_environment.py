"""Our bubblewrap sandbox as one of Harbor's environments: tasks run where there is no container engine."""

from __future__ import annotations

import math
import shlex
from pathlib import Path
from typing import Any

from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities

from compactionrl.environments.dockerfile import read_dockerfile
from compactionrl.environments.image_build import build
from compactionrl.sandboxes import open_sandbox
from compactionrl.sandboxes.bwrap import bwrap_path
from compactionrl.sandboxes.protocol import SandboxError

COMPOSE = "docker-compose.yaml"


class BwrapEnvironment(BaseEnvironment):
    """A task's Dockerfile is carried out, as far as that needs no engine, on top of a system that is there already.

    `--ek image=FOLDER`: that system, a root file system; by default it is this machine's /usr. `--ek limits=JSON`: fields of
    `Limits`, which count more than the task's cpus, memory_mb and storage_mb. As Harbor wants it, a task has the network unless
    it says otherwise.
    """

    def __init__(
        self, *arguments: Any, image: str | None = None, limits: dict[str, Any] | None = None, **options: Any
    ) -> None:
        super().__init__(*arguments, **options)
        task = self.task_env_config
        asked = {"cpus": self._effective_cpus, "memory_mb": self._effective_memory_mb, "disk_mb": task.storage_mb}
        self.workdir = task.workdir or self.dockerfile.workdir
        self.sandbox = open_sandbox(
            "bwrap",
            image=image,
            network=self._network_is_public,
            limits={name: most for name, most in asked.items() if most} | (limits or {}),
            workdir=self.workdir,
        )

    @staticmethod
    def type() -> str:
        return "bwrap"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities(disable_internet=True)

    @classmethod
    def preflight(cls) -> None:
        try:
            bwrap_path()
        except SandboxError as error:
            raise SystemExit(str(error)) from None

    def _validate_definition(self) -> None:
        """Raises FileNotFoundError or DockerfileError, and says which part of the definition needs an engine."""
        if (self.environment_dir / COMPOSE).exists():
            raise ValueError(f"{self.environment_dir / COMPOSE}: tasks of several containers need a container engine")
        path = self.environment_dir / "Dockerfile"
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing: an image that is only named needs a container engine")
        self.dockerfile = read_dockerfile(path)

    async def start(self, force_build: bool) -> None:
        await self.sandbox.start(force_build)
        await build(self.dockerfile, self.sandbox, self.task_env_config.build_timeout_sec)
        folders = shlex.join(dict.fromkeys([self.workdir, *self._mount_targets()]))
        made = await self.sandbox.exec(f"mkdir -p -- {folders}", "/")
        if made.return_code:
            raise SandboxError(f"no folder can be made: {made.stderr}")

    async def stop(self, delete: bool) -> None:
        await self.sandbox.stop(delete)

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: float | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        variables = {**self.dockerfile.env, **(self._merge_env(env) or {})}
        seconds = None if timeout_sec is None else math.ceil(timeout_sec)
        ran = await self.sandbox.exec(command, cwd, variables, seconds, self._resolve_user(user))
        return ExecResult(stdout=ran.stdout, stderr=ran.stderr, return_code=ran.return_code)

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        await self.sandbox.upload_file(source_path, target_path)

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        await self.sandbox.upload_dir(source_dir, target_dir)

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        await self.sandbox.download_file(source_path, target_path)

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        await self.sandbox.download_dir(source_dir, target_dir)


__all__ = ["BwrapEnvironment"]
