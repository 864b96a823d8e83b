"""The loop: value pretraining, then collect, update, log; held-out evaluation and checkpoints in between."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from rich.console import Console

from compactionrl import build
from compactionrl.base import prepare
from compactionrl.config import Config
from compactionrl.evaluation.behaviour import behaviour
from compactionrl.evaluation.evaluate import evaluate
from compactionrl.evaluation.modes import for_mode, training_contexts
from compactionrl.rollout.budget import ContextBudget
from compactionrl.rollout.loop import RolloutSettings
from compactionrl.rollout.stream import Collected, CollectionError, Stream
from compactionrl.samplers.protocol import SamplerError
from compactionrl.training import checkpoint
from compactionrl.training.background import in_thread
from compactionrl.training.batch import Batch, build_batch
from compactionrl.training.checkpoint import Checkpoints, State
from compactionrl.training.interrupt import Interrupt, Interrupted
from compactionrl.training.learner import Learner
from compactionrl.training.memory import describe_memory
from compactionrl.training.metrics import MetricsLog, flatten
from compactionrl.training.order import units
from compactionrl.training.pair import new_pair
from compactionrl.training.progress import Progress
from compactionrl.training.records import credit_by_window, write_rollouts
from compactionrl.training.run_folder import RunFolder
from compactionrl.training.sampling import Sampling
from compactionrl.training.staleness import check_staleness, staleness
from compactionrl.training.threads import settle_threads

Evaluate = Callable[..., Coroutine[Any, Any, dict[str, dict[str, Any]]]]


class Trainer:
    """Trains `config` in its run folder; with `resume`, goes on from the latest checkpoint there.

    On CPU a run that was stopped, or killed at any moment, and resumed gives the same weights bit for bit as one that was
    not. Raises ConfigError if the configuration cannot work, before anything is sampled or written (a warm start alone
    comes before what its tokenizer decides). `evaluate` measures the policy on held-out tasks; see `evaluation.evaluate`.
    """

    def __init__(
        self, config: Config, *, resume: bool = False, evaluate: Evaluate = evaluate, console: Console | None = None
    ) -> None:
        config.check_trainable()
        self.training = training_contexts(config)
        contexts = [*self.training, *(for_mode(config, mode) for mode in config.evaluation.modes)]
        self.config = config
        self.measure = evaluate
        self.console = console or Console()
        self.folder = RunFolder(config, resume=resume)
        self.tasks = build.build_tasks(config)
        self.device = build.build_device(config)
        if config.model.path == "warm-start":
            self.folder.begin()  # so that a warm start that was killed is resumed, too
            prepare(config)
        self.base = build.model_folder(config)
        self.chat = build.build_chat(config, self.base)
        for context in contexts:
            ContextBudget.measure(context, self.chat)
        self.checkpoints = Checkpoints(self.folder.checkpoints, config.train.keep_checkpoints)
        self.console.print(describe_memory(config, self.base, self.device))
        self.state, self.learner = self.load()
        self.sampling = Sampling(config, self.learner.policy)
        self.value_batches = config.train.value_pretraining_steps if self.learner.critic else 0
        self.stream = self.rollouts()
        done = self.state.value_batches + self.state.step
        self.progress = Progress(self.value_batches + config.train.steps, done, self.console)
        self.interrupt = Interrupt()

    def load(self) -> tuple[State, Learner]:
        """The latest checkpoint, or the beginning: policy and critic from the same base."""
        if latest := self.checkpoints.latest(self.console.print):
            return checkpoint.load(latest, self.config, self.base, self.device)
        policy, critic = new_pair(self.config, self.base, self.device)
        return State(), Learner(policy, critic, self.config.train, temperature=self.config.sampling.temperature)

    def run(self) -> bool:
        """Train to the end, or until a signal asks to stop (False). Either way the latest state is in a checkpoint.

        Raises CollectionError when rollouts only break down, SamplerError when what samples cannot be used (before anything
        is written, if it says so at once), TrainingError when updates stay non-finite.
        """
        with self.progress, self.interrupt, suppress(Interrupted):
            asyncio.run(self.train())
        return self.finished

    async def train(self) -> None:
        try:
            await self.interrupt.guard(self.sampling.start())
            with self.writing():
                await self.between_batches()
                while not self.finished:
                    await self.train_batch()
                    await self.between_batches()
        finally:
            await self.stream.aclose()
            await self.sampling.close()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """The run's folder is there, and what stops the run from outside leaves a checkpoint in it."""
        self.folder.create()
        settle_threads(self.config, self.folder, self.learner.policy)
        self.log = MetricsLog(self.folder.path, self.state.metrics_bytes)
        self.folder.drop_rollouts_after(self.state.value_batches, self.state.step)
        try:
            yield
        except Interrupted:
            self.save()
            self.progress.say(
                f"stopped after {self.state.name}; go on with: compactionrl train {self.folder.config} --resume"
            )
        except (CollectionError, SamplerError):
            self.save()
            raise
        finally:
            self.log.close()

    @property
    def finished(self) -> bool:
        return self.state.step >= self.config.train.steps and not self.pretraining

    @property
    def pretraining(self) -> bool:
        """Whether the next batch trains the critic only, on rollouts of the frozen base."""
        return self.state.value_batches < self.value_batches

    async def train_batch(self) -> None:
        """Take the next batch of rollouts and learn from it, while rollouts of those ahead may go on; log."""
        pretraining, state = self.pretraining, self.state
        started, cpu = time.perf_counter(), time.process_time()
        collected = await self.interrupt.guard(self.collect())
        received, busy = time.perf_counter(), self.stream.busy_seconds
        version = state.step
        state.value_batches += pretraining
        state.step += not pretraining
        state.units += collected.units
        state.dropped += len(collected.dropped)
        batch, metrics = await in_thread(lambda: self.learn(collected, version, train_policy=not pretraining))
        overlap, ended = self.stream.busy_seconds - busy, time.perf_counter()
        metrics = {
            **describe(collected, batch),
            **metrics,
            "time/collect": received - started,
            "time/update": ended - received,
            "time/overlap": overlap,
            "time/total": ended - started,
            "time/cpu": time.process_time() - cpu,
            "speed/tokens_per_second": batch.accounting["sampled"] / (ended - started),
        }
        self.progress.batch(state.name, metrics)
        if pretraining:
            metrics = {f"pretraining/{key}": value for key, value in metrics.items()}
        self.log.write("value" if pretraining else "train", state.value_batches if pretraining else state.step, metrics)

    def learn(self, collected: Collected, version: int, *, train_policy: bool) -> tuple[Batch, dict[str, float]]:
        """Write the rollouts of a batch down, and update once, from `version` to the next."""
        batch = build_batch(collected.rollouts, self.config.train)
        ages = staleness(collected.rollouts, version)
        credit = self.learner.credit(batch)
        if self.config.train.save_rollouts:
            rollouts = collected.rollouts + collected.dropped
            path = self.folder.rollout_file(self.state.name)
            write_rollouts(path, rollouts, credit_by_window(rollouts, batch, credit))
        check_staleness(ages, self.config.train.staleness)
        metrics = self.learner.update(batch, credit, train_policy=train_policy)
        return batch, metrics | (ages if self.config.train.staleness else {})

    async def collect(self) -> Collected:
        """The next batch's rollouts, by the latest weights, or up to `train.staleness` versions older."""
        self.stream.sampler = await self.sampling.current(self.state.step)
        self.progress.begin(f"after {self.state.name}", self.config.train.rollouts_per_step)
        return await self.stream.batch()

    def rollouts(self) -> Stream:
        """All rollouts still to come. Which tasks, and every random stream, follow from the seed and the cursor."""
        c, state = self.config, self.state
        settings = [
            RolloutSettings(context, c.limits, c.sampling.temperature, c.sampling.top_p) for context in self.training
        ]
        return Stream(
            self.tasks,
            self.sampling.sampler,
            self.chat,
            settings[0],
            units(c.run.seed, self.tasks.size("train"), c.train.group_size, state.units, settings),
            c.train.rollouts_per_step,
            concurrency=c.sampling.concurrency,
            retries=c.train.retries,
            batches=self.value_batches + c.train.steps - state.value_batches - state.step,
            ahead=c.train.staleness,
            on_rollout=lambda _: self.progress.reached(self.stream.ready),
        )

    async def between_batches(self) -> None:
        """Evaluate and save where it is time; rollouts of the batches ahead go on while a checkpoint is written."""
        if self.evaluation_due:
            await self.interrupt.guard(self.evaluate())
        done = self.state.step or self.state.value_batches
        if self.finished or (done and done % self.config.train.checkpoint_every == 0):
            await in_thread(self.save)
        self.interrupt.check()

    @property
    def evaluation_due(self) -> bool:
        """Before the first policy update, every so many, and at the end; not twice."""
        step, every = self.state.step, self.config.evaluation.every
        due = step == self.config.train.steps or (every > 0 and step % every == 0)
        return due and not self.pretraining and self.state.evaluated != step

    async def evaluate(self) -> None:
        """Measure the policy on held-out tasks; the best one by x4 keeps its checkpoint.

        No rollout in training runs meanwhile: `sampling.concurrency` holds for both together.
        """
        settings, state = self.config.evaluation, self.state
        async with self.stream.paused():
            self.progress.begin(f"evaluating {state.name}", len(settings.modes) * settings.tasks)
            results = await self.measure(
                self.tasks,
                await self.sampling.current(state.step),
                self.chat,
                self.config,
                modes=settings.modes,
                n_tasks=settings.tasks,
                seed=settings.seed,
                on_rollout=self.progress.rollout,
            )
        state.evaluated = state.step
        self.log.write("eval", state.step, flatten(results, "eval/"))
        self.progress.evaluation(state.step, results)
        mode = "x4" if "x4" in results else settings.modes[0]
        rate = results[mode]["pass_at_1"]
        if rate is not None and rate > state.best.get("pass_at_1", -1.0):
            state.best = {"checkpoint": state.name, "step": state.step, "mode": mode, "pass_at_1": rate}
            self.save()

    def save(self) -> None:
        self.state.metrics_bytes = self.log.position()
        self.checkpoints.save(self.state, self.learner, self.base)


def describe(collected: Collected, batch: Batch) -> dict[str, float]:
    """What the rollouts of a batch did, and where all their tokens went (invariant 1)."""
    return {
        **flatten(behaviour(collected.rollouts), "rollout/"),
        "rollout/dropped": float(len(collected.dropped)),
        "rollout/retried": float(collected.retried),
        **{f"tokens/{key.replace(': ', '/')}": float(count) for key, count in batch.accounting.items()},
    }
