"""run_rollout: one agent acting on one environment under a context budget -> Rollout."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from compactionrl.config import ContextConfig, LimitsConfig
from compactionrl.environments.protocol import Environment, Message, Observation, Response
from compactionrl.rollout.budget import ContextBudget, TaskDoesNotFit
from compactionrl.rollout.chat import ChatFormat, Span, length
from compactionrl.rollout.compaction import CannotResume, Compactor, Step, judge, label
from compactionrl.rollout.environment_time import OutOfTime, stopwatch, within
from compactionrl.rollout.handoff import UNEXECUTED, strategy_of
from compactionrl.rollout.ledger import Attempt, End, Kind, Rollout, Segment, Window
from compactionrl.rollout.spoken import said
from compactionrl.rollout.strategy import filled
from compactionrl.rollout.writer import Writer, random_stream
from compactionrl.samplers.protocol import Sampled, Sampler, Summariser, optional

__all__ = ["RolloutSettings", "describe", "random_stream", "run_rollout"]

T = TypeVar("T")


@dataclass(frozen=True)
class RolloutSettings:
    """What every rollout of a run has in common."""

    context: ContextConfig
    limits: LimitsConfig
    temperature: float = 1.0
    top_p: float = 1.0


async def run_rollout(
    environment: Environment,
    sampler: Sampler,
    chat: ChatFormat,
    settings: RolloutSettings,
    *,
    rollout_id: str,
    task_id: str,
    seed: int,
    summariser: Summariser | None = None,
) -> Rollout:
    """Act until the rollout ends in one of the five ways (`End`), verify, and return the ledger.

    Trouble of the sampler or the environment does not raise: the rollout ends with `error` and says what broke, and is
    never scored. Each request's random stream depends on `seed` and the request's number alone. `summariser` writes the
    summaries in the policy's place (the paper's Table 1); its tokens are then excluded from training.
    """
    rollout = Rollout(rollout_id, task_id, approximate=chat.approximate)
    agent = _Agent(rollout, environment, sampler, chat, settings, seed, summariser)
    try:
        await agent.run()
    except TaskDoesNotFit as error:
        rollout.end, rollout.error, rollout.retryable = "error", str(error), False
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        # Nobody cancelled this rollout: it leaked out of what the environment or the sampler runs inside.
        rollout.end, rollout.error = "error", describe(error)
    except Exception as error:  # whatever a user's environment or sampler raises: recorded, counted, never a reward
        rollout.end, rollout.error = "error", describe(error)
        rollout.retryable = getattr(error, "retryable", True)
    finally:
        await agent.close()
    if rollout.end == "error":
        rollout.exclude("error")
    return rollout


class _Ended(Exception):
    """The rollout ended; `end` says how."""

    def __init__(self, end: End) -> None:
        self.end = end


class _Agent:
    def __init__(
        self,
        rollout: Rollout,
        environment: Environment,
        sampler: Sampler,
        chat: ChatFormat,
        settings: RolloutSettings,
        seed: int,
        summariser: Summariser | None,
    ) -> None:
        self.rollout, self.environment, self.chat, self.settings = rollout, environment, chat, settings
        self.tools: list[Any] | None = getattr(environment, "tools", None)
        self.budget = ContextBudget.measure(settings.context, chat, self.tools)
        self.writer = Writer(
            rollout,
            sampler,
            summariser,
            chat,
            temperature=settings.temperature,
            top_p=settings.top_p,
            seed=seed,
        )
        self.segments_made = 0
        self.window = Window()
        self.segment: Segment | None = None
        self.steps: list[Step] = []
        self.transcript: list[Message] = []
        """What the window says."""

    @property
    def limit(self) -> float:
        return self.settings.limits.environment_seconds

    @property
    def compactions_left(self) -> int:
        return self.settings.context.max_compactions - self.rollout.compactions

    async def run(self) -> None:
        self.transcript = [*check_start(await self.timed(self.environment.start(), self.limit))]
        *system, task = self.transcript
        context, says = self.settings.context, task["content"]
        self.strategy = strategy_of(context, says)
        self.budget = ContextBudget.measure(context, self.chat, self.tools, says)
        self.compactor = Compactor(self.budget, self.strategy, self.chat, list(system), task, self.tools)
        append(self.window, self.compactor.check_task(), "task")
        self.rollout.windows.append(self.window)
        try:
            while True:
                await self.turn()
        except _Ended as ended:
            end = ended.end
        verdict = await self.timed(self.environment.verify(), self.limit)
        if not math.isfinite(verdict.reward):
            raise ValueError(f"the environment's reward is {verdict.reward}: it must be a finite number")
        json.dumps(verdict.details, default=str)  # what no file can hold is the environment's trouble, not the run's
        self.rollout.reward, self.rollout.end = float(verdict.reward), end
        self.rollout.details |= verdict.details

    async def turn(self) -> None:
        """One step z_i, and what has to happen before the next one."""
        response, ids = await self.respond()
        observation = await self.observe(response)
        if observation.done:
            raise _Ended("submitted")
        if self.rollout.turns >= self.settings.limits.turns:
            raise _Ended("turns")
        messages = self.messages(response, observation)
        self.steps.append(Step(ids, self.transcript[-1], messages))
        spans = self.extension(messages)
        used = self.window.used + length(spans)
        if self.compactions_left:
            if self.budget.triggers(used):
                await self.compact(messages, used)
                return
        elif not self.budget.can_act(used, 0):
            raise _Ended("budget")
        append(self.window, spans)
        self.transcript += messages

    async def respond(self) -> tuple[Response, list[int]]:
        opening = self.opening()
        cap = self.budget.response_cap(self.window.used, self.compactions_left)
        sampled = await self.writer.respond(self.window.token_ids, cap)
        self.segment = self.segment or self.new_segment("execution")
        append_sampled(self.window, sampled, self.segment)
        response = self.chat.parse(opening, sampled.token_ids, sampled.finish == "length", self.tools)
        self.transcript.append(said(response))
        self.rollout.turns += 1
        self.rollout.tool_calls += len(response.calls) if self.tools else 1
        self.rollout.cut_responses += response.cut
        self.rollout.thinking_tokens += len(self.chat.encode(response.thinking)) if response.thinking else 0
        return response, sampled.token_ids

    def too_many_calls(self, response: Response) -> bool:
        """Whether the reserve could not hold an answer to each call; none is executed then, and the policy is told."""
        return bool(self.tools) and len(response.calls) > self.settings.context.max_calls

    async def observe(self, response: Response) -> Observation:
        if self.too_many_calls(response):
            return Observation(f"More than {self.settings.context.max_calls} calls in one response: none was executed.")
        left = self.limit - self.rollout.environment_seconds
        if left <= 0:
            raise _Ended("time")
        try:
            return await self.timed(self.environment.step(response), left)
        except OutOfTime:
            raise _Ended("time") from None

    def messages(self, response: Response, observation: Observation) -> list[Message]:
        """The observation as chat messages: one per native call, or one user message."""
        text = observation.text
        if not (self.tools and response.calls) or self.too_many_calls(response):
            return [{"role": "user", "content": text if isinstance(text, str) else "\n".join(text)}]
        texts = [text] if isinstance(text, str) else text
        if len(texts) != len(response.calls):
            raise ValueError(f"the environment gave {len(texts)} observations for {len(response.calls)} calls")
        return [
            {"role": "tool", "content": content, "tool_call_id": call.id, "name": call.name}  # type: ignore[typeddict-unknown-key]
            for call, content in zip(response.calls, texts, strict=True)
        ]

    async def compact(self, messages: list[Message], used: int) -> None:
        """Close this window with a summary (E8) and open the next one (E9). `used`: |h|, the observation included."""
        fits = self.budget.summary_fits(used) and all(
            self.budget.summary_fits(self.window.used + length(self.extension([*messages, request])))
            for request in self.strategy.requests
        )
        if not fits:
            messages = [{**message, "content": self.settings.context.placeholder} for message in messages]
        texts = await self.strategy.write(self, messages, "" if fits else "placeholder")
        try:
            self.window, self.transcript = self.compactor.resume(
                texts, self.steps, self.compactions_left, must_keep_last=not fits
            )
        except CannotResume as error:
            self.rollout.details["budget"] = str(error)
            raise _Ended("budget") from None
        self.rollout.windows.append(self.window)
        self.segment, self.steps = None, []

    async def summarise(self, messages: list[Message], note: str) -> str:
        """Sample summaries until one is good or attempts run out; the last one is used as it is."""
        context = self.settings.context
        first, retry = self.strategy.requests
        for attempt in range(1, context.summary_attempts + 1):
            asked = [*messages, first if attempt == 1 else retry]
            spans = self.extension(asked)
            sampled, response = await self.writer.summarise(
                self.window.token_ids, spans, [*self.transcript, *asked], context.summary_tokens, self.tools
            )
            reason = judge(response)
            if reason is None or attempt == context.summary_attempts:
                break
            self.window.rejected.append(Attempt(sampled.token_ids, sampled.logprobs, reason, sampled.reported))
        append(self.window, spans[:-1], note)
        append(self.window, spans[-1:], "summary request")
        append_sampled(self.window, sampled, self.new_segment("summary"), label("summary", response))
        self.transcript += [*asked, said(response)]
        return response.text

    async def go_on(self, name: str, template: str, texts: Mapping[str, str]) -> str:
        """See `Scribe`. Nothing is asked where an endpoint of text counts so much more than it did that no room is left."""
        refusals = self.refusals()
        fitted = self.compactor.fit(template, texts, lambda message: self.extension([*refusals, message]))
        asked = [*refusals, filled(template, fitted)]
        spans = self.extension(asked)
        used = self.window.used if self.chat.approximate else len(self.window)
        room = min(self.settings.context.summary_tokens, self.settings.context.budget - used - length(spans))
        if room < 1:
            return ""
        sampled, response = await self.writer.summarise(
            self.window.token_ids, spans, [*self.transcript, *asked], room, self.tools
        )
        append(self.window, spans[:-1], "not executed")
        append(self.window, spans[-1:], f"{name} request")
        append_sampled(self.window, sampled, self.window.segments[-1], label(f"summary {name}", response))
        self.transcript += [*asked, said(response)]
        return response.text

    async def aside(self, name: str, template: str, texts: Mapping[str, str]) -> str:
        """See `Scribe`. The context is a window of its own."""
        observation = "\n".join(message["content"] for message in self.steps[-1].messages)
        messages = self.compactor.aside(template, texts, observation)
        spans = self.chat.prompt(messages, self.tools)
        sampled, response = await self.writer.summarise(
            [], spans, messages, self.settings.context.summary_tokens, self.tools
        )
        window = Window()
        append(window, spans[:-1], "task")
        append(window, spans[-1:], f"{name} request")
        append_sampled(window, sampled, self.new_segment("summary"), label(f"summary {name}", response))
        self.rollout.windows.append(window)
        return response.text

    def refusals(self) -> list[Message]:
        """Answers to the native calls in the response that ends the window, none of which is executed."""
        before, response = self.window.turns[-2:]
        ids = self.window.token_ids
        written = self.chat.parse(ids[before.start : before.end], ids[response.start :], False, self.tools)
        if not (self.tools and written.calls) or self.too_many_calls(written):
            return []
        return self.messages(written, Observation([UNEXECUTED] * len(written.calls)))

    def new_segment(self, kind: Kind) -> Segment:
        """The next one. What cannot be trained says why."""
        self.segments_made += 1
        excluded = "sampled as text" if self.chat.approximate else None
        if kind == "summary" and self.writer.summariser is not None:
            excluded = "written by another summariser"
        if kind == "summary":
            excluded = self.strategy.excluded or excluded
        return Segment(kind, self.segments_made - 1, excluded)

    def opening(self) -> list[int]:
        """Ids of the turn right before what the policy samples now."""
        return self.window.token_ids[self.window.turns[-1].start :]

    def extension(self, messages: list[Message]) -> list[Span]:
        """What `messages` add behind the response that ends the window."""
        before, response = self.window.turns[-2:]
        ids = self.window.token_ids
        return self.chat.extend(ids[before.start : before.end], ids[response.start :], messages, self.tools)

    async def timed(self, call: Awaitable[T], seconds: float) -> T:
        """What the environment answers. Its own time is counted; raises OutOfTime after `seconds` of it."""
        elapsed = stopwatch({id(sampler): sampler for sampler in self.writer.samplers.values()}.values())
        try:
            return await within(seconds, elapsed, call)
        finally:
            self.rollout.environment_seconds += elapsed()

    async def close(self) -> None:
        """Release what the rollout holds; trouble here does not undo what it achieved, but is recorded."""
        closing: dict[str, Callable[[], Awaitable[None]]] = {
            f"{name}.release": partial(optional, sampler, "release", self.rollout.id)
            for name, sampler in self.writer.samplers.items()
        }
        closing["close"] = lambda: self.timed(self.environment.close(), self.limit)
        for name, close in closing.items():
            try:
                await close()
            except Exception as error:
                self.rollout.details[f"{name} failed"] = describe(error)


def append(window: Window, spans: Sequence[Span], note: str = "") -> None:
    for span in spans:
        window.append_context(span.ids, span.role, note)


def append_sampled(window: Window, sampled: Sampled, segment: Segment, note: str = "") -> None:
    window.append_sampled(sampled.token_ids, sampled.logprobs, sampled.versions, segment, note, sampled.reported)


def check_start(messages: list[Message]) -> list[Message]:
    if not messages or messages[-1]["role"] != "user":
        raise ValueError("the environment's start must return chat messages, the last one with role 'user': the task")
    return messages


def describe(error: BaseException) -> str:
    """An error for the ledger. A message may name a file that is no UTF-8, which no file of ours could hold."""
    return f"{type(error).__name__}: {error}".encode(errors="backslashreplace").decode()
