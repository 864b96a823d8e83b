"""A Harbor task's `task.toml`, as far as it says how to run and judge the task."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Network = Literal["public", "no-network"]
TEMPLATE = re.compile(r"\$\{(\w+)(?::-(.*))?\}", re.DOTALL)
SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMG])", re.IGNORECASE)
MEGABYTES = {"K": 1 / 1024, "M": 1, "G": 1024}


class TaskFolderError(ValueError):
    """A task folder that cannot be used here. The message names the file and what is wrong with it."""


class Table(BaseModel):
    """Keys that are not listed say nothing about how to run or judge the task, and are left alone."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class AgentTable(Table):
    timeout_sec: Seconds | None = None
    user: str | int | None = None
    network_mode: Network | None = None


class VerifierTable(Table):
    timeout_sec: Seconds = 600.0
    env: dict[str, str] = {}
    user: str | int | None = None
    network_mode: Network | None = None
    environment_mode: Literal["shared"] = "shared"
    environment: None = None
    collect: list[Any] = Field([], max_length=0)


class EnvironmentTable(Table):
    """`network_mode` None: the task does not say; Harbor takes that for "public"."""

    build_timeout_sec: Seconds = 600.0
    os: Literal["linux"] = "linux"
    cpus: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    memory_mb: Annotated[int, Field(gt=0)] | None = None
    storage_mb: Annotated[int, Field(gt=0)] | None = None
    gpus: Annotated[int, Field(le=0)] | None = None
    env: dict[str, str] = {}
    workdir: str | None = None
    network_mode: Network | None = None
    healthcheck: None = None
    mcp_servers: list[Any] = Field([], max_length=0)

    @model_validator(mode="before")
    @classmethod
    def earlier_names(cls, table: Any) -> Any:
        """`memory = "2G"`, `storage = "10G"` and `allow_internet` of older schemas."""
        if not isinstance(table, dict):
            return table
        table = dict(table)
        for name in ("memory", "storage"):
            if isinstance(table.get(name), str):
                table.setdefault(f"{name}_mb", megabytes(table[name]))
        if isinstance(table.get("allow_internet"), bool):
            table.setdefault("network_mode", "public" if table["allow_internet"] else "no-network")
        return table

    @field_validator("os", mode="before")
    @classmethod
    def any_case(cls, value: Any) -> Any:
        return value.lower() if isinstance(value, str) else value


class SolutionTable(Table):
    env: dict[str, str] = {}


class HarborSettings(Table):
    """`metadata` is whatever the task's author wrote there."""

    metadata: dict[str, Any] = {}
    agent: AgentTable = AgentTable()
    verifier: VerifierTable = VerifierTable()
    environment: EnvironmentTable = EnvironmentTable()
    solution: SolutionTable = SolutionTable()
    steps: list[Any] = Field([], max_length=0)

    @model_validator(mode="after")
    def one_network(self) -> HarborSettings:
        for table in (self.agent, self.verifier):
            if table.network_mode not in (None, self.environment.network_mode or "public"):
                raise ValueError("agent and verifier must have the network_mode of the environment")
        return self


def read_settings(path: Path) -> HarborSettings:
    """Raises TaskFolderError for what is no TOML, has a wrong type, or asks for what is not supported."""
    try:
        return HarborSettings.model_validate(tomllib.loads(path.read_text()))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"])) or "the file"
        raise TaskFolderError(f"{path}: {key} cannot be {first['input']!r:.80} here: {first['msg']}") from None
    except (OSError, ValueError) as error:
        raise TaskFolderError(f"{path}: {error}") from None


def megabytes(size: str) -> int:
    match = SIZE.fullmatch(size.strip())
    if match is None:
        raise ValueError(f"{size!r} is no size such as 512M or 2G")
    return int(float(match[1]) * MEGABYTES[match[2].upper()])


def resolved(env: dict[str, str]) -> dict[str, str]:
    """Variables whose value is ${NAME} or ${NAME:-default} get that of this process. Raises TaskFolderError if it has none."""
    values = {}
    for name, value in env.items():
        template = TEMPLATE.fullmatch(value)
        found = os.environ.get(template[1], template[2]) if template else value
        if found is None:
            raise TaskFolderError(f"task.toml: {name} needs the environment variable {value[2:-1]}, which is not set")
        values[name] = found
    return values
