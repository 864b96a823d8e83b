"""Warm start: supervised training of a small policy, from nothing, on scripted demonstrations.

The demonstrations are ordinary rollouts in which a script samples the tokens, so the policy learns the very ids that it
will act with. Their summaries are unreliable on purpose: what comes out can act, but compacts badly.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from compactionrl.config import Config, ContextConfig
from compactionrl.environments.protocol import TaskSet
from compactionrl.evaluation.modes import longest_window
from compactionrl.method import token_logprobs
from compactionrl.models import ModelConfig, Transformer
from compactionrl.rollout.chat import ChatFormat
from compactionrl.rollout.collect import CollectionError, Job, collect
from compactionrl.rollout.ledger import CONTEXT, Rollout, Window
from compactionrl.rollout.loop import RolloutSettings
from compactionrl.samplers.protocol import Sampler

Progress = Callable[[int, int, float], None]
"""(updates done, updates in all, loss of the latest) -> None."""


def demonstrate(config: Config, tasks: TaskSet, chat: ChatFormat, demonstrator: Sampler) -> list[Rollout]:
    """Play the train split; a share of the rollouts in one long window, so that long positions are trained as well."""
    warm = config.warm_start
    n_long = round(warm.long_share * warm.demonstrations)
    rollouts: list[Rollout] = []
    for name, context, first, count in (
        ("short", config.context, 0, warm.demonstrations - n_long),
        ("long", long_context(config), warm.demonstrations - n_long, n_long),
    ):
        settings = RolloutSettings(context, config.limits)
        size = tasks.size("train")
        jobs = ([Job("train", i % size, f"{name}-{i}", (warm.seed << 32) + i)] for i in range(first, first + count))
        played = asyncio.run(collect(tasks, demonstrator, chat, settings, jobs, count, concurrency=64, retries=0))
        if played.dropped:
            raise CollectionError(
                f"{len(played.dropped)} demonstrations broke down; the first: {played.dropped[0].error}"
            )
        rollouts += played.rollouts
    return rollouts


def long_context(config: Config) -> ContextConfig:
    """One window, at least 4C, as long as any that this configuration trains or evaluates in."""
    budget = max(4 * config.context.budget, longest_window(config))
    return config.context.model_copy(update={"max_compactions": 0, "budget": budget})


def new_policy(config: Config, tokenizer: Any) -> Transformer:
    """A Qwen3 decoder with random weights, seeded."""
    warm = config.warm_start
    torch.manual_seed(warm.seed)
    return Transformer(
        ModelConfig(
            architecture="Qwen3ForCausalLM",
            vocab_size=len(tokenizer),
            hidden_size=warm.hidden_size,
            intermediate_size=warm.intermediate_size,
            num_hidden_layers=warm.layers,
            num_attention_heads=warm.heads,
            num_key_value_heads=warm.kv_heads,
            head_dim=warm.head_dim,
            max_position_embeddings=long_context(config).budget,
            tie_word_embeddings=True,
            source={"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id},
        )
    )


def batches(windows: Sequence[Window], batch_tokens: int, epochs: int, seed: int) -> Iterator[list[Window]]:
    """Shuffled windows, about `batch_tokens` at a time, `epochs` times over."""
    order = random.Random(seed)
    for _ in range(epochs):
        batch: list[Window] = []
        tokens = 0
        for window in order.sample(list(windows), len(windows)):
            batch.append(window)
            tokens += len(window)
            if tokens >= batch_tokens:
                yield batch
                batch, tokens = [], 0
        if batch:
            yield batch


def imitation_loss(policy: Transformer, windows: Sequence[Window], device: torch.device | str) -> Tensor:
    """Mean negative log-likelihood of the windows' sampled tokens."""
    ids = torch.tensor([i for window in windows for i in window.token_ids], device=device)
    segments = torch.tensor([s for window in windows for s in window.segment_ids], device=device)
    positions = (segments != CONTEXT).nonzero().squeeze(1)
    hidden = policy(ids, [len(window) for window in windows])
    logprobs, _ = token_logprobs(hidden[positions - 1], policy.head_weight, ids[positions])
    return -logprobs.mean()


def fit(policy: Transformer, rollouts: Sequence[Rollout], config: Config, progress: Progress | None = None) -> float:
    """Train `policy` in place on all sampled tokens; returns the mean loss of the last tenth of the updates."""
    warm = config.warm_start
    windows = [window for rollout in rollouts for window in rollout.windows if window.segments]
    device = next(policy.parameters()).device
    optimizer = torch.optim.AdamW(policy.parameters(), lr=warm.lr, betas=(0.9, 0.98), weight_decay=warm.weight_decay)
    plan = list(batches(windows, warm.batch_tokens, warm.epochs, warm.seed))
    rise = max(1, len(plan) // 20)
    losses = []
    for number, batch in enumerate(plan):
        share = number / len(plan)
        factor = min(1.0, (number + 1) / rise) * (0.1 + 0.9 * (0.5 + 0.5 * math.cos(math.pi * share)))
        for group in optimizer.param_groups:
            group["lr"] = warm.lr * factor
        loss = imitation_loss(policy, batch, device)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if progress:
            progress(number + 1, len(plan), losses[-1])
    last = losses[-max(1, len(losses) // 10) :]
    return sum(last) / len(last)
