"""Our agent for Harbor: a rollout with compaction, over any environment of Harbor's, against a served model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, TypeVar

from harbor.agents.base import BaseAgent
from harbor.agents.capabilities import AgentCapabilities
from harbor.agents.options import AgentOptions
from harbor.environments.base import BaseEnvironment
from harbor.models.agent.context import AgentContext
from pydantic import Field

from compactionrl.agents import open_agent, resolve
from compactionrl.config import Config, load_config
from compactionrl.config_toml import dump
from compactionrl.environments.protocol import Observation, Response, Verdict
from compactionrl.environments.terminal import TerminalEnvironment, TerminalOptions
from compactionrl.eval_options import eval_keys
from compactionrl.evaluation.modes import for_mode
from compactionrl.evaluation.rollout_file import RolloutFile
from compactionrl.integrations.atif import trajectory
from compactionrl.integrations.harbor_rollout import metadata, rollout_details, tokens
from compactionrl.results_folder import without_logins
from compactionrl.rollout.environment_time import OutOfTime
from compactionrl.rollout.ledger import Rollout
from compactionrl.rollout.loop import RolloutSettings, random_stream, run_rollout
from compactionrl.samplers.protocol import Sampled, Sampler, SamplerRefused, optional
from compactionrl.sandboxes.protocol import ExecResult, Sandbox

T = TypeVar("T")


class CompactionOptions(AgentOptions):
    """What `--ak name=value` may say."""

    api_base: str = Field(
        description="Address of the served model; more than one, separated by commas, stand in for each other."
    )
    context_limit: str = Field(description="C: tokens of one context window, such as 65536 or 64k.")
    mode: str = Field("x4", description="x1: compaction off. xN: up to N windows of C. 2C: one window of 2C.")
    tokenizer: str | None = Field(
        None,
        description="The model's Hugging Face folder: token ids in and out. Without it: text, budgets are approximate.",
    )
    api: Literal["auto", "vllm", "sglang", "chat"] | None = Field(
        None,
        description="What the server speaks; by default it is asked if there is a tokenizer, and is 'chat' if not.",
    )
    config: str | None = Field(None, description="A TOML file with other keys of the configuration.")
    keys: dict[str, Any] = Field(default_factory=dict, description='Such keys, as JSON: {"sampling.temperature": 0.6}.')
    terminal: dict[str, Any] = Field(default_factory=dict, description="Options of the scaffold, as JSON.")


class CompactionAgent(BaseAgent):
    """The rollout that `compactionrl eval` would run, on a task that Harbor starts and verifies.

    Beside `trajectory.json` the agent's folder holds the ledger, as `compactionrl rollout --from` shows it. When Harbor's time
    for the agent is over, what there is until then is kept, and the rollout ends by 'time'.
    """

    capabilities = AgentCapabilities(atif=True)
    options_model = CompactionOptions

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        assert isinstance(self.options, CompactionOptions)
        self.config = configuration(self.options, self._parsed_model_name)
        self.context = for_mode(self.config, self.options.mode)
        self.scaffold = scaffold(self.options.terminal)

    @staticmethod
    def name() -> str:
        return "compactionrl"

    def version(self) -> str:
        return version("compactionrl")

    async def setup(self, environment: BaseEnvironment) -> None:
        """Ask the server, so that what cannot work is refused before the task's time begins."""
        self.config = await resolve(self.config)
        self.agent = await open_agent(self.config, [self.options.mode])

    async def run(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
        """Raises RuntimeError for a rollout that broke down: no verdict on it would be the policy's."""
        stop = Stop()
        terminal = Terminal(stop, Borrowed(environment), instruction, unverified, self.scaffold)
        sampler = Watched(self.agent.sampler, stop, context)
        work = asyncio.ensure_future(self.rollout(terminal, sampler, environment.environment_name))
        try:
            rollout = await asyncio.shield(work)
        except asyncio.CancelledError:
            stop.now.set()
            self.keep(out_of_time(await work), context, terminal)
            raise
        self.keep(rollout, context, terminal)
        if rollout.end == "error":
            raise RuntimeError(rollout.error)

    async def rollout(self, terminal: Terminal, sampler: Sampler, task_id: str) -> Rollout:
        sampling, trial = self.config.sampling, self.session_id or task_id
        await optional(sampler, "start", self.context.budget)
        try:
            return await run_rollout(
                terminal,
                sampler,
                self.agent.chat,
                RolloutSettings(self.context, self.config.limits, sampling.temperature, sampling.top_p),
                rollout_id=f"{self.options.mode}-{trial}",
                task_id=task_id,
                seed=random_stream(self.config.evaluation.seed, trial),
            )
        finally:
            await optional(sampler, "close")

    def keep(self, rollout: Rollout, context: AgentContext, terminal: Terminal) -> None:
        """Write down what there is of a rollout, for Harbor and for us."""
        context.n_input_tokens, context.n_output_tokens = tokens(rollout)
        context.rollout_details = rollout_details(rollout) or None
        asked = {"mode": self.options.mode, "context_limit": self.context.budget, "model": self.agent.description}
        context.metadata = asked | metadata(rollout)
        (self.logs_dir / "config.toml").write_text(dump(without_logins(self.config)))
        with RolloutFile(self.logs_dir / "rollouts.jsonl.gz") as file:
            file.append(rollout)
        if rollout.windows:
            who = {"name": self.name(), "version": self.version(), "model_name": self.config.server.model}
            steps = trajectory(rollout, self.agent.chat, agent=who, tools=terminal.tools)
            (self.logs_dir / "trajectory.json").write_text(json.dumps(steps, ensure_ascii=False, indent=2))


def configuration(options: CompactionOptions, model: str | None) -> Config:
    """Raises ConfigError for what cannot work."""
    file = Path(options.config) if options.config else None
    keys = eval_keys(
        file,
        options.keys,
        url=options.api_base,
        api=options.api or ("auto" if options.tokenizer else "chat"),
        model=model,
        tokenizer=Path(options.tokenizer) if options.tokenizer else None,
        budget=options.context_limit,
    )
    return load_config(file, keys)


def scaffold(options: dict[str, Any]) -> TerminalOptions:
    try:
        return TerminalOptions(**options)
    except (TypeError, ValueError) as error:
        raise ValueError(f"terminal: {error}") from None


async def unverified(sandbox: Sandbox) -> Verdict:
    """Harbor verifies, later."""
    return Verdict(0.0)


class Stop:
    """Ends a rollout from outside in such a way that its ledger is kept."""

    def __init__(self) -> None:
        self.now = asyncio.Event()

    async def unless(self, call: Awaitable[T], error: Exception) -> T:
        """What `call` gives; once the time has come, it is cancelled and `error` raised."""
        work, told = asyncio.ensure_future(call), asyncio.ensure_future(self.now.wait())
        try:
            await asyncio.wait((work, told), return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                return work.result()
            raise error
        finally:
            work.cancel()
            told.cancel()
            await asyncio.gather(work, told, return_exceptions=True)


class Stopped(SamplerRefused):
    """Harbor's time for the agent is over."""


def out_of_time(rollout: Rollout) -> Rollout:
    """A rollout that was stopped between two turns ended by 'time', as one that was stopped in its environment did."""
    if (rollout.error or "").startswith(Stopped.__name__):
        rollout.end, rollout.error = "time", None
        for segment in rollout.segments:
            segment.excluded = None if segment.excluded == "error" else segment.excluded
    return rollout


class Watched:
    """A sampler that can be stopped, and whose tokens are counted in Harbor's context at once."""

    def __init__(self, sampler: Sampler, stop: Stop, context: AgentContext) -> None:
        self.sampler, self.stop, self.context = sampler, stop, context

    async def start(self, budget: int) -> None:
        await optional(self.sampler, "start", budget)

    async def close(self) -> None:
        await optional(self.sampler, "close")

    async def release(self, affinity: str) -> None:
        await self.sampler.release(affinity)

    async def sample(self, token_ids: Sequence[int], **request: Any) -> Sampled:
        sampled = await self.stop.unless(self.sampler.sample(token_ids, **request), Stopped())
        counted = sampled.reported
        read, wrote = (counted.prompt, counted.completion) if counted else (len(token_ids), len(sampled.token_ids))
        self.context.n_input_tokens = (self.context.n_input_tokens or 0) + read
        self.context.n_output_tokens = (self.context.n_output_tokens or 0) + wrote
        return sampled


class Terminal(TerminalEnvironment):
    """A terminal that can be stopped."""

    def __init__(self, stop: Stop, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.stop = stop

    async def step(self, response: Response) -> Observation:
        return await self.stop.unless(super().step(response), OutOfTime("the agent's time is over"))


class Borrowed:
    """Harbor's environment as a Sandbox: who lent it starts and stops it."""

    def __init__(self, environment: BaseEnvironment) -> None:
        self.environment = environment
        self.upload_file, self.upload_dir = environment.upload_file, environment.upload_dir
        self.download_file, self.download_dir = environment.download_file, environment.download_dir

    async def start(self, force_build: bool = False) -> None:
        return

    async def exec(self, *arguments: Any, **options: Any) -> ExecResult:
        return await self.environment.exec(*arguments, **options)

    async def stop(self, delete: bool = True) -> None:
        return


__all__ = ["CompactionAgent", "CompactionOptions"]
