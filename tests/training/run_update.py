"""In a process of its own: how much memory two updates of policy and critic take, beside what the process had before.

Prints measured and stated bytes. Arguments: the base's folder, and a configuration as JSON.
"""

from __future__ import annotations

import json
import random
import resource
import sys
from pathlib import Path

import torch

torch.set_num_threads(1)
from training_fakes import random_ids  # noqa: E402

from compactionrl.config import parse_config  # noqa: E402
from compactionrl.models.shape import Shape  # noqa: E402
from compactionrl.rollout.ledger import Rollout, Segment, Window  # noqa: E402
from compactionrl.training.batch import build_batch  # noqa: E402
from compactionrl.training.learner import Learner  # noqa: E402
from compactionrl.training.memory import needed  # noqa: E402
from compactionrl.training.pair import new_pair  # noqa: E402


def resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def peak() -> int:
    """Of this program: `ru_maxrss` would be that of the process that started it, if that is larger."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def rollout(number: int) -> Rollout:
    """One window of 512 tokens."""
    rng = random.Random(number)
    window = Window()
    window.append_context(random_ids(rng, 312, 312), "user")
    window.append_sampled(random_ids(rng, 200, 200), [-9.0] * 200, [0] * 200, Segment("execution", 0))
    return Rollout(f"r{number}", f"t{number}", [window], end="submitted", reward=float(number % 2))


def main(folder: Path, options: str) -> None:
    config = parse_config(json.loads(options))
    torch.nn.Linear(4, 4)(torch.randn(4, 4)).sum().backward()
    if config.lora.rank:
        import peft  # noqa: F401
    before = resident()
    learner = Learner(*new_pair(config, folder, "cpu"), config.train)
    batch = build_batch([rollout(number) for number in range(config.train.rollouts_per_step)], config.train)
    for _ in range(2):
        learner.update(batch, learner.credit(batch))
    print(json.dumps([peak() - before, needed(config, Shape.read(folder)).total]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
