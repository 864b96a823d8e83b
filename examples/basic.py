"""CompactionRL without the command line: the whole algorithm, from rollouts to updates.

python examples/basic.py
"""

import asyncio
from pathlib import Path

from compactionrl import build
from compactionrl.config import Config, load_config
from compactionrl.models import Critic, load_policy
from compactionrl.rollout.collect import collect
from compactionrl.rollout.loop import RolloutSettings
from compactionrl.training.batch import build_batch
from compactionrl.training.learner import Learner
from compactionrl.training.order import units

RECIPE = Path(__file__).parents[1] / "recipes" / "demo.toml"


def train(config: Config, updates: int) -> Learner:
    """Update the policy `updates` times, after `train.value_pretraining_steps` batches that train the critic alone."""
    base = build.model_folder(config)
    tasks = build.build_tasks(config)
    chat = build.build_chat(config, base)
    policy, critic = load_policy(base), Critic(load_policy(base))
    learner = Learner(policy, critic, config.train)
    sampler = build.build_sampler(config, policy)
    settings = RolloutSettings(config.context, config.limits)
    jobs = units(config.run.seed, tasks.size("train"), group_size=1)

    for number in range(-config.train.value_pretraining_steps, updates):
        collecting = collect(
            tasks,
            sampler,
            chat,
            settings,
            jobs,
            config.train.rollouts_per_step,
            concurrency=config.sampling.concurrency,
            retries=config.train.retries,
        )
        rollouts = asyncio.run(collecting).rollouts
        batch = build_batch(rollouts, config.train)  # the windows of all rollouts, end to end
        credit = learner.credit(batch)  # values, advantages (E13, E14) and targets, before any update
        learner.update(batch, credit, train_policy=number >= 0)  # E12
        sampler.weights_changed(max(0, number + 1))
        reward = sum(rollout.reward for rollout in rollouts) / len(rollouts)
        compactions = sum(rollout.compactions for rollout in rollouts) / len(rollouts)
        label = f"update {number + 1}" if number >= 0 else "critic only"
        print(f"{label}: reward {reward:.3f}, {compactions:.2f} compactions, {batch.layout.count} tokens")
    return learner


if __name__ == "__main__":
    train(load_config(RECIPE), updates=10)
