"""The generic path for any model of `transformers` against our own decoder, on the demo's base: tokens per CPU second.

Sampling takes prompts of 16 tokens to contexts of 256; an update runs forward and backward over windows of 100 to 384
tokens. Both load the same weights, and runs alternate.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from compactionrl.build import DEMO
from compactionrl.method import token_logprobs
from compactionrl.models import Policy, load_policy
from compactionrl.samplers.local import LocalSampler

PROMPT, CONTEXT = 16, 256
ROWS = (1, 16, 64)
LENGTHS = [random.Random(0).randint(100, 384) for _ in range(16)]


def sample(policy: Policy, rows: int) -> int:
    """Tokens sampled."""
    sampler = LocalSampler(policy, max_rows=rows, max_tokens_per_row=CONTEXT)
    prompt = [token % policy.config.vocab_size for token in range(PROMPT)]
    request: dict[str, Any] = {"stop_token_ids": (), "temperature": 1.0, "top_p": 1.0}

    async def run() -> None:
        requests = (
            sampler.sample(prompt, max_tokens=CONTEXT - PROMPT, seed=row, affinity=str(row), **request)
            for row in range(rows)
        )
        await asyncio.gather(*requests)

    asyncio.run(run())
    return sampler.stats.sampled_tokens


def update(policy: Policy) -> int:
    """Tokens that were computed forward and backward."""
    ids = torch.arange(sum(LENGTHS)) % policy.config.vocab_size
    logprobs, _ = token_logprobs(policy(ids, LENGTHS), policy.head_weight, ids)
    logprobs.sum().backward()
    policy.zero_grad()
    return len(ids)


def measure(repeats: int) -> dict[str, dict[str, Any]]:
    """Tokens per CPU second of both, and the median and range of the ratio of runs that follow each other."""
    ours, generic = (load_policy(DEMO, implementation=name) for name in ("packed", "transformers"))
    jobs: dict[str, Callable[[Policy], int]] = {f"sample_{rows}": partial(sample, rows=rows) for rows in ROWS}
    results = {}
    for name, job in {**jobs, "update": update}.items():
        speeds = [[speed(job, policy) for policy in (ours, generic)] for _ in range(repeats + 1)][1:]
        ratios = [fast / slow for fast, slow in speeds]
        packed, slow = (statistics.median(column) for column in zip(*speeds, strict=True))
        results[f"generic_{name}"] = {
            "median": statistics.median(ratios), "spread": [min(ratios), max(ratios)],
            "packed_tokens_per_second": round(packed), "generic_tokens_per_second": round(slow),
        }  # fmt: skip
    return results


def speed(job: Callable[[Policy], int], policy: Policy) -> float:
    """Tokens per CPU second of this process, with one thread."""
    began = time.process_time()
    return job(policy) / (time.process_time() - began)


def main() -> None:
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    print(json.dumps(measure(parser.parse_args().repeats), indent=2))


if __name__ == "__main__":
    main()
