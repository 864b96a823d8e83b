"""How many threads torch computes with: more are not always faster, so they are measured with the run's own work."""

from __future__ import annotations

import asyncio
import os
import platform
import time
from collections.abc import Callable
from typing import Literal

import torch

from compactionrl.config import Config
from compactionrl.method import token_logprobs
from compactionrl.models import Policy
from compactionrl.samplers.local import LocalSampler
from compactionrl.training.run_folder import RunFolder


def settle_threads(config: Config, folder: RunFolder, policy: Policy) -> int:
    """Set torch's threads as `run.threads` says. The choice is stored with the run and reused when it is resumed."""
    threads = folder.recall().get("threads") or choose_threads(config.run.threads, lambda: work(config, policy))
    torch.set_num_threads(threads)
    machine = {"threads": threads, "cores": available_cores(), "device": str(policy.head_weight.device)}
    folder.remember(machine | {"python": platform.python_version(), "torch": torch.__version__})
    return threads


def choose_threads(setting: int | Literal["auto"], workload: Callable[[], object]) -> int:
    """`setting`, or, for "auto", the number of threads that does `workload` fastest."""
    if setting != "auto":
        return setting
    return min(candidates(available_cores()), key=lambda threads: seconds(threads, workload))


def work(config: Config, policy: Policy) -> None:
    """One micro-batch forward and backward, and sixteen steps of sampling at full concurrency. Changes nothing."""
    length = config.context.budget
    windows = max(1, config.train.micro_batch_tokens // length)
    ids = torch.arange(windows * length, device=policy.head_weight.device) % policy.config.vocab_size
    logprobs, _ = token_logprobs(policy(ids, [length] * windows), policy.head_weight, ids)
    trained = [p for p in policy.parameters() if p.requires_grad]
    torch.autograd.grad(logprobs.sum(), trained, allow_unused=True)
    asyncio.run(decode(policy, config.sampling.concurrency, ids[: max(1, length // 2)].tolist()))


async def decode(policy: Policy, rows: int, prompt: list[int]) -> None:
    sampler = LocalSampler(policy, max_rows=rows, max_tokens_per_row=len(prompt) + 16)
    request = {"max_tokens": 16, "stop_token_ids": (), "temperature": 1.0, "top_p": 1.0, "seed": 0}
    await asyncio.gather(*(sampler.sample(prompt, **request, affinity=str(row)) for row in range(rows)))  # type: ignore[arg-type]


def candidates(cores: int) -> list[int]:
    """1, 2, 4, ... and the number of cores."""
    return sorted({2**i for i in range(cores.bit_length()) if 2**i <= cores} | {cores})


def seconds(threads: int, workload: Callable[[], object]) -> float:
    """The faster of two runs, after one that warms up."""
    torch.set_num_threads(threads)
    workload()
    times = []
    for _ in range(2):
        started = time.perf_counter()
        workload()
        times.append(time.perf_counter() - started)
    return min(times)


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
