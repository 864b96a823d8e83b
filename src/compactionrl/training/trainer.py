"""The loop: value pretraining, then collect, update, log; held-out evaluation and checkpoints in between."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine
from typing import Any

from rich.console import Console

from compactionrl import build
from compactionrl.base import prepare
from compactionrl.config import Config
from compactionrl.evaluation.behaviour import behaviour
from compactionrl.evaluation.evaluate import evaluate
from compactionrl.evaluation.modes import for_mode, training_contexts
from compactionrl.rollout.budget import ContextBudget
from compactionrl.rollout.collect import Collected, CollectionError, collect
from compactionrl.rollout.loop import RolloutSettings
from compactionrl.samplers.protocol import Sampler
from compactionrl.training import checkpoint
from compactionrl.training.batch import Batch, build_batch
from compactionrl.training.checkpoint import Checkpoints, State
from compactionrl.training.interrupt import Interrupt, Interrupted
from compactionrl.training.learner import Learner
from compactionrl.training.metrics import MetricsLog, flatten
from compactionrl.training.order import units
from compactionrl.training.pair import new_pair
from compactionrl.training.progress import Progress
from compactionrl.training.records import credit_by_window, write_rollouts
from compactionrl.training.run_folder import RunFolder
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
        self.state, self.learner = self.load()
        self.sampler: Sampler = build.build_sampler(config, self.learner.policy)
        self.folder.create()
        settle_threads(config, self.folder, self.learner.policy)
        self.log = MetricsLog(self.folder.path, self.state.metrics_bytes)
        self.folder.drop_rollouts_after(self.state.value_batches, self.state.step)
        self.value_batches = config.train.value_pretraining_steps if self.learner.critic else 0
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

        Raises CollectionError when rollouts only break down, TrainingError when updates stay non-finite.
        """
        with self.progress, self.interrupt:
            try:
                self.between_batches()
                while not self.finished:
                    self.train_batch()
                    self.between_batches()
            except Interrupted:
                self.save()
                self.progress.say(
                    f"stopped after {self.state.name}; go on with: compactionrl train {self.folder.config} --resume"
                )
            except CollectionError:
                self.save()
                raise
            finally:
                self.log.close()
        return self.finished

    @property
    def finished(self) -> bool:
        return self.state.step >= self.config.train.steps and not self.pretraining

    @property
    def pretraining(self) -> bool:
        """Whether the next batch trains the critic only, on rollouts of the frozen base."""
        return self.state.value_batches < self.value_batches

    def train_batch(self) -> None:
        """Collect rollouts, write them down, update once, log."""
        pretraining, state = self.pretraining, self.state
        started, cpu = time.perf_counter(), time.process_time()
        collected = self.interrupt.run(self.collect())
        batch = build_batch(collected.rollouts, self.config.train)
        time_collect = time.perf_counter() - started
        credit = self.learner.credit(batch)
        state.value_batches += pretraining
        state.step += not pretraining
        state.units += collected.units
        state.dropped += len(collected.dropped)
        if self.config.train.save_rollouts:
            rollouts = collected.rollouts + collected.dropped
            path = self.folder.rollout_file(state.name)
            write_rollouts(path, rollouts, credit_by_window(rollouts, batch, credit))
        metrics = self.learner.update(batch, credit, train_policy=not pretraining)
        time_total = time.perf_counter() - started
        metrics = {
            **describe(collected, batch),
            **metrics,
            "time/collect": time_collect,
            "time/total": time_total,
            "time/cpu": time.process_time() - cpu,
            "speed/tokens_per_second": batch.accounting["sampled"] / time_total,
        }
        self.progress.batch(state.name, metrics)
        if pretraining:
            metrics = {f"pretraining/{key}": value for key, value in metrics.items()}
        self.log.write("value" if pretraining else "train", state.value_batches if pretraining else state.step, metrics)

    async def collect(self) -> Collected:
        """The next batch's rollouts. Which tasks, and every random stream, follow from the seed and the cursor."""
        c = self.config
        self.progress.begin(f"after {self.state.name}", c.train.rollouts_per_step)
        settings = [
            RolloutSettings(context, c.limits, c.sampling.temperature, c.sampling.top_p) for context in self.training
        ]
        return await collect(
            self.tasks,
            self.current_sampler(),
            self.chat,
            settings[0],
            units(c.run.seed, self.tasks.size("train"), c.train.group_size, self.state.units, settings),
            c.train.rollouts_per_step,
            concurrency=c.sampling.concurrency,
            retries=c.train.retries,
            on_rollout=self.progress.rollout,
        )

    def current_sampler(self) -> Sampler:
        """The sampler with the present weights. A local one is new for every batch: what it cached, and how much room
        that took, must not differ between a resumed run and one that was never stopped.
        """
        if self.config.sampling.sampler == "local":
            self.sampler = build.build_sampler(self.config, self.learner.policy)
        self.sampler.weights_changed(self.state.step)  # type: ignore[attr-defined]
        return self.sampler

    def between_batches(self) -> None:
        if self.evaluation_due:
            self.evaluate()
        done = self.state.step or self.state.value_batches
        if self.finished or (done and done % self.config.train.checkpoint_every == 0):
            self.save()
        self.interrupt.check()

    @property
    def evaluation_due(self) -> bool:
        """Before the first policy update, every so many, and at the end; not twice."""
        step, every = self.state.step, self.config.evaluation.every
        due = step == self.config.train.steps or (every > 0 and step % every == 0)
        return due and not self.pretraining and self.state.evaluated != step

    def evaluate(self) -> None:
        """Measure the policy on held-out tasks; the best one by x4 keeps its checkpoint."""
        settings, state = self.config.evaluation, self.state
        self.progress.begin(f"evaluating {state.name}", len(settings.modes) * settings.tasks)
        results = self.interrupt.run(
            self.measure(
                self.tasks,
                self.current_sampler(),
                self.chat,
                self.config,
                modes=settings.modes,
                n_tasks=settings.tasks,
                seed=settings.seed,
                on_rollout=self.progress.rollout,
            )
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
