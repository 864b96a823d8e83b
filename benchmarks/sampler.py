"""Continuous batching against a bare decode loop: what the sampler's bookkeeping costs.

The bare loop is the same decoder over a preallocated cache: a fixed batch in lockstep, no masks, drawing a token and its
log-probability each step. Both take prompts of 16 tokens to contexts of 256. A ratio is the sampler's time divided by the
bare loop's, of runs that alternate.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from compactionrl.models import ModelConfig, Transformer
from compactionrl.samplers.local import LocalSampler
from compactionrl.samplers.protocol import Sampled

CONFIG = ModelConfig("Qwen3ForCausalLM", 512, 128, 384, 4, 4, 2, 32, tie_word_embeddings=True)
PROMPT, CONTEXT = 16, 256
BATCHES = (1, 16, 64)


class BareCache:
    """Keys and values of a batch in lockstep; called as the decoder's attention."""

    def __init__(self, config: ModelConfig, batch: int) -> None:
        shape = (config.num_hidden_layers, 2, batch, config.num_key_value_heads, CONTEXT, config.head_dim)
        self.stored = torch.zeros(shape)
        self.batch, self.start, self.count = batch, 0, 0

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        end = self.start + self.count
        for stored, new in zip(self.stored[layer], (key, value), strict=True):
            stored[:, :, self.start : end] = new.unflatten(0, (self.batch, self.count)).transpose(1, 2)
        keys, values = self.stored[layer, :, :, :, :end]
        if self.count > 1:
            q = query.unflatten(0, (self.batch, self.count)).transpose(1, 2)
            out = scaled_dot_product_attention(q, keys, values, is_causal=True, enable_gqa=True)
            return out.transpose(1, 2).flatten(0, 1)
        grouped = query.view(self.batch, keys.shape[1], -1, query.shape[-1])
        return scaled_dot_product_attention(grouped, keys, values).reshape(query.shape)


@torch.inference_mode()
def bare_loop(model: Transformer, prompts: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Of each step, the tokens and their log-probabilities, each [B, 1]."""
    cache = BareCache(model.config, len(prompts))
    ids, generated = prompts, []
    while cache.start + ids.shape[1] < CONTEXT:
        cache.count = ids.shape[1]
        positions = torch.arange(cache.start, cache.start + cache.count).repeat(len(prompts))
        hidden = model.model(ids.reshape(-1), positions, cache).unflatten(0, ids.shape)[:, -1]
        cache.start += cache.count
        logprobs = (hidden @ model.head_weight.T).log_softmax(-1)
        ids = torch.multinomial(logprobs.exp(), 1)
        generated.append((ids, logprobs.gather(-1, ids)))
    return generated


def sampler_loop(model: Transformer, prompts: Tensor) -> list[Sampled]:
    sampler = LocalSampler(model, max_rows=len(prompts), max_tokens_per_row=CONTEXT)

    async def run() -> list[Sampled]:
        return await asyncio.gather(
            *(
                sampler.sample(
                    prompt,
                    max_tokens=CONTEXT - PROMPT,
                    stop_token_ids=[],
                    temperature=1.0,
                    top_p=1.0,
                    seed=i,
                    affinity=str(i),
                )
                for i, prompt in enumerate(prompts.tolist())
            )
        )

    return asyncio.run(run())


def measure(repeats: int) -> dict[str, dict[str, Any]]:
    """Median and range of the ratio over interleaved repeats, per batch size."""
    torch.manual_seed(0)
    model = Transformer(CONFIG)
    results = {}
    for batch in BATCHES:
        prompts = torch.randint(CONFIG.vocab_size, (batch, PROMPT))
        seconds(sampler_loop, model, prompts), seconds(bare_loop, model, prompts)
        ratios = [seconds(sampler_loop, model, prompts) / seconds(bare_loop, model, prompts) for _ in range(repeats)]
        spread = [min(ratios), max(ratios)]
        results[f"sampler_vs_bare_loop_{batch}"] = {"median": statistics.median(ratios), "spread": spread}
    return results


def seconds(loop: Callable[[Transformer, Tensor], object], model: Transformer, prompts: Tensor) -> float:
    """CPU seconds of this process: with one thread, what an idle machine's clock would show."""
    began = time.process_time()
    loop(model, prompts)
    return time.process_time() - began


def main() -> None:
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    print(json.dumps(measure(parser.parse_args().repeats), indent=2))


if __name__ == "__main__":
    main()
