"""One batch of training (values, advantages, the policy's and the critic's updates), laid out in three ways.

Ours: windows packed end to end, each forwarded once for its acting and its summary. `update_vs_row_per_segment`: the same
packing, but a row for every segment with all of its context, so the row of a summary repeats its window; rollouts of four
windows of 1,024 tokens and seven segments (where summaries are short, the limit is 7/4). `update_vs_padded`: windows as
the rows of [B, T] batches, padded on the right to the longest, in the order of the rollouts, as many as the same token
budget holds padded; window lengths are uniform in 64..512. `update_vs_padded_sorted`: the same windows, but sorted by
length, so that padding wastes least. `update_vs_padded_demo`: padded, on the first batch of rollouts of
`recipes/demo.toml`.

All have the demo's model (width 96, 2 layers), its training section, and one thread. Each layout must give our losses and
gradients within 1e-5 before it is timed. A ratio is the other layout's CPU seconds over ours, each pair measured back to back.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from compactionrl import build
from compactionrl.config import Config, load_config
from compactionrl.method import token_logprobs
from compactionrl.models import Critic, Transformer, load_policy
from compactionrl.models.transformer import Decoder
from compactionrl.rollout.collect import collect
from compactionrl.rollout.ledger import Rollout, Segment, Window
from compactionrl.rollout.loop import RolloutSettings
from compactionrl.training.batch import Batch, MicroBatch, build_batch
from compactionrl.training.learner import Learner
from compactionrl.training.order import units

RECIPE = Path(__file__).parents[1] / "recipes" / "demo.toml"
TOKENS = 16_384
WINDOW, SHORTEST, LONGEST = 1024, 64, 512


def measure(repeats: int, tokens: int = TOKENS, config: Config | None = None) -> dict[str, dict[str, Any]]:
    """Median and range over `repeats` of the ratios; `tokens`: about those of an synthetic batch."""
    torch.set_num_threads(1)
    config = config or load_config(RECIPE)
    rng = random.Random(0)
    equal = [[WINDOW] * 4 for _ in range(tokens // (4 * WINDOW))]
    uneven = [[rng.randint(SHORTEST, LONGEST) for _ in range(4)] for _ in range(tokens // (2 * (SHORTEST + LONGEST)))]
    results = {}
    for key, batch, kind in (
        ("update_vs_row_per_segment", synthetic_batch(config, equal), Learner),
        ("update_vs_padded", synthetic_batch(config, uneven), PaddedLearner),
        ("update_vs_padded_sorted", synthetic_batch(config, [[x] for x in sorted(chain(*uneven))]), PaddedLearner),
        ("update_vs_padded_demo", demo_batch(config), PaddedLearner),
    ):
        other = row_per_segment(batch) if kind is Learner else batch
        results[key] = compare((new_learner(config), batch), (new_learner(config, kind), other), repeats)
    return results


def compare(ours: tuple[Learner, Batch], other: tuple[Learner, Batch], repeats: int) -> dict[str, Any]:
    check_same(first_update(*ours), first_update(*other))
    times = [(seconds(*ours), seconds(*other)) for _ in range(repeats)]
    ratios = [theirs / own for own, theirs in times]
    return {
        "median": statistics.median(ratios),
        "spread": [min(ratios), max(ratios)],
        "tokens": sum(ours[1].lengths),
        "ours_seconds": statistics.median(own for own, _ in times),
        "other_seconds": statistics.median(theirs for _, theirs in times),
    }


def seconds(learner: Learner, batch: Batch) -> float:
    began = time.process_time()
    learner.update(batch, learner.credit(batch))
    return time.process_time() - began


def first_update(learner: Learner, batch: Batch) -> dict[str, tuple[float, Tensor]]:
    """Loss and gradient of policy and critic in a learner's first update: Adam's first moment is then a tenth of it."""
    credit = learner.credit(batch)
    metrics = learner.update_policy(batch, credit) | learner.update_critic(batch, credit)
    found = {}
    for optimiser in (learner.policy_optimiser, learner.critic_optimiser):
        assert optimiser is not None
        moments = [tensor.flatten() for key, tensor in optimiser.tensors().items() if key.endswith(".exp_avg")]
        found[optimiser.name] = (metrics[f"{optimiser.name}/loss"], torch.cat(moments))
    return found


def check_same(
    ours: dict[str, tuple[float, Tensor]], other: dict[str, tuple[float, Tensor]], tolerance: float = 1e-5
) -> None:
    """Raises AssertionError if a loss or a gradient differs, relative to its own size."""
    for model, (loss, gradient) in ours.items():
        differences = abs(other[model][0] / loss - 1), float((other[model][1] - gradient).norm() / gradient.norm())
        assert max(differences) <= tolerance, f"the {model}'s loss and gradient differ by {differences}"


# Ours, and the other layouts.


def new_learner(config: Config, kind: type[Learner] = Learner) -> Learner:
    """The demo's base; the critic's head is not zero, so that its gradient reaches the decoder."""
    folder = build.model_folder(config)
    critic = Critic(load_policy(folder))
    nn.init.constant_(critic.score.weight, 0.05)
    return kind(load_policy(folder), critic, config.train)


def row_per_segment(batch: Batch) -> Batch:
    """The same tokens optimised, each segment in a row of its own: its window up to the segment's last token."""
    layout, rows = batch.layout, []
    for start, length in zip(batch.starts, batch.lengths, strict=True):
        segments = layout.segment[start : start + length]
        for number in segments[segments >= 0].unique():
            rows.append((start, start + int((segments == number).nonzero()[-1]) + 1, int(number)))
    positions = torch.cat([torch.arange(start, end) for start, end, _ in rows])
    owner = torch.cat([torch.full((end - start,), number) for start, end, number in rows])
    segment = layout.segment[positions]
    return replace(
        batch,
        token_ids=batch.token_ids[positions],
        lengths=[end - start for start, end, _ in rows],
        layout=replace(layout, segment=segment.where(segment == owner, -1)),
    )


class PaddedLearner(Learner):
    """Every micro-batch is a [B, T] batch of windows, padded on the right."""

    def __init__(self, policy: Transformer, critic: Critic, config: Any) -> None:
        super().__init__(policy, critic, config)
        for decoder in (policy.model, critic.model):
            decoder.packed = PaddedDecoder(decoder)

    def micro_batches(self, batch: Batch) -> Iterator[MicroBatch]:
        start = done = 0
        for lengths in rows_in_order(batch.lengths, self.config.micro_batch_tokens):
            token_ids = batch.token_ids[start : start + sum(lengths)]
            optimised = batch.layout.mask[start : start + sum(lengths)].nonzero().squeeze(1)
            index = torch.arange(done, done + len(optimised))
            yield MicroBatch(token_ids, lengths, optimised - 1, token_ids[optimised], index)
            start, done = start + len(token_ids), done + len(optimised)


def rows_in_order(lengths: Sequence[int], budget: int) -> Iterator[list[int]]:
    """Consecutive rows, as many at a time as `budget` tokens hold when all are padded to the longest."""
    rows: list[int] = []
    for length in lengths:
        if rows and max(*rows, length) * (len(rows) + 1) > budget:
            yield rows
            rows = []
        rows.append(length)
    yield rows


class PaddedDecoder:
    """`Decoder.packed` by way of padded rows. Causal attention alone keeps the padding out of the others' sight."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder

    def __call__(self, token_ids: Tensor, lengths: Sequence[int]) -> Tensor:
        rows, width = len(lengths), max(lengths)
        real = torch.arange(width) < torch.tensor(lengths)[:, None]
        padded = token_ids.new_zeros(rows, width)
        padded[real] = token_ids

        def attention(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            q, k, v = (x.unflatten(0, (rows, width)).transpose(1, 2) for x in (query, key, value))
            out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return out.transpose(1, 2).flatten(0, 1)

        return self.decoder(padded.flatten(), torch.arange(width).repeat(rows), attention)[real.flatten()]


# What is trained.


def synthetic_batch(config: Config, lengths: Sequence[Sequence[int]]) -> Batch:
    """Random tokens, one rollout for each list of window lengths (at least 32), recorded as if the base had sampled them."""
    policy = load_policy(build.model_folder(config))
    rng = random.Random(0)
    rollouts = [synthetic_rollout(rng, number, each, policy.config.vocab_size) for number, each in enumerate(lengths)]
    batch = build_batch(rollouts, config.train)
    positions = batch.layout.positions
    with torch.no_grad():
        hidden = policy(batch.token_ids, batch.lengths)[positions - 1]
        logprobs, _ = token_logprobs(hidden, policy.head_weight, batch.token_ids[positions])
    return replace(batch, behaviour=logprobs.double())


def synthetic_rollout(rng: random.Random, number: int, lengths: Sequence[int], vocabulary: int) -> Rollout:
    """In 32 parts of a window: two of context, 14 times a response and an observation, then request and summary.

    The last window has an observation and a response there.
    """
    rollout = Rollout(f"rollout-{number}", f"task-{number}", end="submitted", reward=float(number % 2))
    for place, length in enumerate(lengths):
        part, last = length // 32, place == len(lengths) - 1
        window, acting = Window(), Segment("execution", 2 * place)

        def context(count: int, window: Window = window) -> None:
            window.append_context(rng.choices(range(vocabulary), k=count), "user")

        def sample(segment: Segment, window: Window = window, part: int = part) -> None:
            window.append_sampled(rng.choices(range(vocabulary), k=part), [0.0] * part, [0] * part, segment)

        context(length - 30 * part)
        for _ in range(14):
            sample(acting)
            context(part)
        context(part)
        sample(acting if last else Segment("summary", 2 * place + 1))
        rollout.windows.append(window)
    return rollout


def demo_batch(config: Config) -> Batch:
    """The first batch that the recipe trains on."""
    folder = build.model_folder(config)
    tasks = build.build_tasks(config)
    collecting = collect(
        tasks,
        build.build_sampler(config, load_policy(folder)),
        build.build_chat(config, folder),
        RolloutSettings(config.context, config.limits),
        units(config.run.seed, tasks.size("train"), config.train.group_size),
        config.train.rollouts_per_step,
        concurrency=config.sampling.concurrency,
        retries=config.train.retries,
    )
    return build_batch(asyncio.run(collecting).rollouts, config.train)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of an synthetic batch, about")
    options = parser.parse_args()
    print(json.dumps(measure(options.repeats, options.tokens), indent=2))


if __name__ == "__main__":
    main()
