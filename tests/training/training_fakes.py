"""Small models, and rollouts made through the ledger without any sampler."""

from __future__ import annotations

import random
from typing import Any

import torch

from compactionrl.config import TrainConfig
from compactionrl.models import Critic, ModelConfig, Transformer
from compactionrl.rollout.ledger import Attempt, Rollout, Segment, Window
from compactionrl.training.learner import Learner

VOCABULARY = 40


def small_config(vocabulary: int, **options: Any) -> ModelConfig:
    """Two layers of width 32."""
    return ModelConfig(
        architecture="Qwen3ForCausalLM",
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        tie_word_embeddings=True,
        **options,
    )


def small_policy(seed: int = 0, dtype: torch.dtype = torch.float32) -> Transformer:
    torch.manual_seed(seed)
    return Transformer(small_config(VOCABULARY, initializer_range=0.2)).to(dtype)


def small_learner(dtype: torch.dtype = torch.float32, *, seed: int = 0, **options: Any) -> Learner:
    """A learner whose critic has a random head: with the zero head of a new critic, too many numbers are zero."""
    config = TrainConfig(**{"policy_lr": 1e-2, "critic_lr": 1e-2, **options})
    critic = None
    if config.estimator != "group":
        critic = Critic(small_policy(seed, dtype))
        torch.nn.init.normal_(critic.score.weight, std=0.3)
    return Learner(small_policy(seed, dtype), critic, config)


def random_rollout(number: int, seed: int = 0, *, compactions: int | None = None, end: str = "submitted") -> Rollout:
    """A rollout of 1 to 3 windows; every window but the last one ends in a summary."""
    rng = random.Random(f"{seed}-{number}")
    compactions = rng.randrange(3) if compactions is None else compactions
    rollout = Rollout(id=f"r{number}", task_id=f"t{number}", end=end, reward=rng.choice([0.0, 1.0]))  # type: ignore[arg-type]
    index = 0
    for place in range(compactions + 1):
        window = Window()
        window.append_context(random_ids(rng, 3, 8), "user", "task")
        execution = Segment("execution", index)
        for _ in range(rng.randint(1, 3)):
            sample(rng, window, execution)
            window.append_context(random_ids(rng, 0, 4), "tool")
        index += 1
        if place < compactions:
            window.append_context(random_ids(rng, 2, 2), "user", "summary request")
            window.rejected.append(Attempt([1, 2], [-1.0, -1.0], "empty"))
            sample(rng, window, Segment("summary", index))
            index += 1
        rollout.windows.append(window)
    return rollout


def sample(rng: random.Random, window: Window, segment: Segment) -> None:
    ids = random_ids(rng, 1, 6)
    # Near the log-probabilities of a nearly uniform policy, so that some ratios are clipped and most are not.
    window.append_sampled(ids, [rng.uniform(-4.4, -3.0) for _ in ids], [0] * len(ids), segment)


def random_ids(rng: random.Random, low: int, high: int) -> list[int]:
    return [rng.randrange(VOCABULARY) for _ in range(rng.randint(low, high))]


def random_rollouts(count: int, seed: int = 0) -> list[Rollout]:
    return [random_rollout(number, seed) for number in range(count)]


def parameters(learner: Learner) -> dict[str, torch.Tensor]:
    """Copies of all weights of policy and critic."""
    models = {"policy": learner.policy, "critic": learner.critic}
    return {
        f"{name}.{key}": p.detach().clone()
        for name, model in models.items()
        if model is not None
        for key, p in model.named_parameters()
    }
