"""What a run needs, stated before anything is allocated.

A trained parameter takes its weight (4 bytes; in bfloat16 2), Adam's two moments (8), in bfloat16 its master (4), and
during its model's update its gradient (4). Policy and critic are updated one after the other, and neither while rollouts
are sampled, unless train.staleness lets them: of these phases, only the largest counts. What stays allocated in between is
counted throughout.

The sum is what is asked of the allocator. On Linux, the C library's heap keeps holes between tensors of less than 32 MiB: on
CPU a process was measured to hold up to 1.9 times the phase's part besides, and 0.4 GiB of its own; with the same work it is now
less, now more. TIDY in the environment avoids the holes, for about a third more time.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Group
from rich.table import Table

from compactionrl.config import Config, ConfigError, parse_config, put
from compactionrl.evaluation.modes import longest_window, training_contexts
from compactionrl.models.shape import FLOAT32, Shape
from compactionrl.training.sampling import SERVED

CHUNK = 128
"""Tokens whose logits are held at a time; see `token_logprobs`."""
HOLES, PROCESS = 2.0, round(0.4 * 2**30)
TIDY = "MALLOC_MMAP_THRESHOLD_=1048576 MALLOC_TRIM_THRESHOLD_=1048576"
REMEDIES = {
    "train.gradient_checkpointing": True,
    "lora.rank": 16,
    "model.dtype": "bfloat16",
    "train.critic_trunk": "shared",
    "train.micro_batch_tokens": None,
    "sampling.concurrency": None,
}
"""Keys that lower what is needed, and to what; None: to half of what it is."""


@dataclass(frozen=True)
class Memory:
    """Bytes: of what stays allocated, and of each phase."""

    lasting: dict[str, int]
    phases: dict[str, int]

    @property
    def phase(self) -> str:
        """The largest."""
        return max(self.phases, key=lambda name: self.phases[name])

    @property
    def total(self) -> int:
        """The most that is needed at a time."""
        return sum(self.lasting.values()) + self.phases[self.phase]

    @property
    def held(self) -> int:
        """The most that a process on CPU may hold."""
        return self.total + PROCESS + round(HOLES * self.phases[self.phase])


def describe_memory(config: Config, folder: Path, device: torch.device) -> Group:
    """A table of what a run of `config`, which begins with the model in `folder`, needs; a warning if `device` lacks it.

    Raises ConfigError for a folder without weights, or of an architecture that `transformers` does not have.
    """
    try:
        shape = Shape.read(folder)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: {error}") from error
    memory, free = needed(config, shape), free_memory(device)
    table = Table(title="Memory", title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, size in {**memory.lasting, f"at most at a time: {memory.phase}": memory.phases[memory.phase]}.items():
        table.add_row(name, show(size))
    table.add_section()
    table.add_row("needed", show(memory.total), style="bold")
    if device.type == "cpu":
        table.add_row("with the process and holes in its heap, at most", show(memory.held))
    table.add_row(f"free on {device}", "unknown" if free is None else show(free))
    if free is None or memory.total <= free:
        tight = free is not None and device.type == "cpu" and memory.held > free
        return Group(
            table,
            *([f"This is tight. Fewer holes, for a third more time: {TIDY} in the environment."] if tight else []),
        )
    return Group(table, warning(config, shape, memory.total, free))


def warning(config: Config, shape: Shape, total: int, free: int) -> str:
    lines = [
        f"This may not fit: about {show(total)} are needed, {show(free)} are free. What each of these would need instead:"
    ]
    for key, value in REMEDIES.items():
        changed, value = with_key(config, key, value)
        if (size := needed(changed, shape).total) < total:
            lines.append(f"  {key} = {value}: {show(size)}")
    return "\n".join(lines)


def with_key(config: Config, key: str, value: object) -> tuple[Config, object]:
    """`config` with another value of `key` (None: half of what it is), and that value."""
    data = config.model_dump()
    section, name = key.split(".")
    value = max(1, data[section][name] // 2) if value is None else value
    put(data, key, value)
    return parse_config(data), value


def needed(config: Config, shape: Shape) -> Memory:
    """What a run of `config` needs that begins with a model of `shape`."""
    size = 2 if config.model.dtype == "bfloat16" else FLOAT32
    policy, critic = trained(config, shape)
    local = config.sampling.sampler == "local"
    rows, window = config.sampling.concurrency, longest_window(config)
    cache = shape.cache(rows, window, size) if local else 0
    adapted = config.lora.rank > 0
    ahead = config.train.staleness > 0
    copied = ahead and config.sampling.sampler not in SERVED
    lasting = {
        "policy: weights": size * (shape.parameters + policy * adapted),
        "policy: optimiser": optimiser(policy, size),
        "critic: weights": critic_weights(config, shape, critic, size),
        "critic: optimiser": optimiser(critic, size),
        "weights that are sampled from meanwhile": size * policy * copied,
        f"key-value cache of {rows} x {window} tokens": cache,
    }
    tokens = micro_batch_tokens(config)
    recomputed = config.train.gradient_checkpointing
    activations = shape.activations(tokens, size, recomputed=recomputed, frozen=adapted)
    table = shape.hidden * shape.vocabulary * FLOAT32  # the gradient of the head, or of the embedding
    logits = 3 * CHUNK * shape.vocabulary * FLOAT32
    head = 0 if adapted else table
    trunk = activations + head if critic and config.train.critic_trunk == "own" else 0
    # The cache is copied as it grows, at most from half its length.
    sampling = (cache // 4 + 3 * rows * shape.vocabulary * FLOAT32) * local
    phases = {
        f"updating the policy on {tokens} tokens": FLOAT32 * policy + activations + logits + head,
        f"updating the critic on {tokens} tokens": FLOAT32 * critic + trunk,
    }
    if ahead:
        phases = {name: amount + sampling for name, amount in phases.items()}
    else:
        phases["sampling"] = sampling
    return Memory({name: amount for name, amount in lasting.items() if amount}, phases)


def trained(config: Config, shape: Shape) -> tuple[int, int]:
    """Parameters of the policy and of the critic that are trained."""
    policy, trunk = shape.parameters, shape.parameters - shape.head
    if config.lora.rank:
        policy = trunk = shape.adapters(config.lora.rank, config.lora.targets)
    if config.train.estimator == "group":
        return policy, 0
    return policy, shape.hidden + 1 + (trunk if config.train.critic_trunk == "own" else 0)


def critic_weights(config: Config, shape: Shape, critic: int, size: int) -> int:
    """Bytes beside the policy's: with adapters, the base is the policy's."""
    if critic and config.train.critic_trunk != "shared" and not config.lora.rank:
        return size * (shape.parameters - shape.head + shape.hidden + 1)
    return size * critic


def optimiser(parameters: int, size: int) -> int:
    """Adam's moments, and masters of weights that are narrower than float32."""
    return parameters * (2 * FLOAT32 + (FLOAT32 if size < FLOAT32 else 0))


def micro_batch_tokens(config: Config) -> int:
    """Most tokens of a micro-batch: a longer window goes alone, and there are no more than all rollouts have."""
    contexts = training_contexts(config)
    windows = max(context.budget * (context.max_compactions + 1) for context in contexts)
    longest = max(context.budget for context in contexts)
    return min(max(config.train.micro_batch_tokens, longest), config.train.rollouts_per_step * windows)


def free_memory(device: torch.device) -> int | None:
    """Bytes that this process could still take there; None where that cannot be told."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type != "cpu":
        return None
    limits = [available, *control_group()] if (available := available_memory()) else []
    return min(limits, default=None)


def available_memory() -> int | None:
    """Of the machine: Linux says what is available, others how much there is."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        entries = dict(line.split(":") for line in meminfo.read_text().splitlines())
        return int(entries["MemAvailable"].split()[0]) * 1024
    names = ("SC_PHYS_PAGES", "SC_PAGE_SIZE")
    return os.sysconf(names[0]) * os.sysconf(names[1]) if set(names) <= os.sysconf_names.keys() else None


def control_group(root: Path = Path("/sys/fs/cgroup")) -> list[int]:
    """What a container's limit leaves, if there is one."""
    most, used = root / "memory.max", root / "memory.current"
    if not most.exists() or (text := most.read_text().strip()) == "max":
        return []
    return [max(0, int(text) - int(used.read_text()))]


def show(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
