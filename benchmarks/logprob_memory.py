"""Peak memory of log-probabilities and their gradients over a vocabulary of 151,936, hidden size 256, float32.

Each run is a process of its own: its peak resident memory above what it held with the inputs and their gradients in
place. Naive is log_softmax over all tokens, without entropies; ours includes entropies and their gradients.
`python benchmarks/logprob_memory.py` prints JSON: `logprob_memory_vs_naive` is naive over ours at 2,048 tokens,
`logprob_memory_8k_vs_2k` is ours at 8,192 tokens over ours at 2,048.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

VOCABULARY, HIDDEN = 151_936, 256
FEW, MANY = 2048, 8192


def measure(repeats: int, vocabulary: int = VOCABULARY) -> dict[str, dict[str, Any]]:
    """Medians and ranges over `repeats` of the two ratios; `*_mb` are the median peaks."""
    runs = [("naive", FEW), ("ours", FEW), ("ours", MANY)]
    peaks = [[_in_new_process(how, tokens, vocabulary) for how, tokens in runs] for _ in range(repeats)]
    naive, few, many = (statistics.median(column) for column in zip(*peaks, strict=True))
    return {
        "logprob_memory_vs_naive": _summary([p[0] / p[1] for p in peaks]) | {"naive_mb": naive, "ours_mb": few},
        "logprob_memory_8k_vs_2k": _summary([p[2] / p[1] for p in peaks]) | {"ours_8k_mb": many, "ours_2k_mb": few},
    }


def _summary(ratios: list[float]) -> dict[str, Any]:
    return {"median": statistics.median(ratios), "spread": [min(ratios), max(ratios)]}


def _in_new_process(how: str, tokens: int, vocabulary: int) -> float:
    command = [sys.executable, __file__, "--run", how, str(tokens), "--vocabulary", str(vocabulary)]
    return float(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def _peak_of_one_run(how: str, tokens: int, vocabulary: int) -> float:
    """Megabytes above the inputs and their gradients, which every way of computing needs."""
    import torch

    import compactionrl.method  # noqa: F401  (not to be part of the peak)

    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, HIDDEN, generator=generator).requires_grad_()
    head = torch.randn(vocabulary, HIDDEN, generator=generator).mul_(HIDDEN**-0.5).requires_grad_()
    targets = torch.randint(vocabulary, (tokens,), generator=generator)
    hidden.grad, head.grad = (torch.full_like(x, 1e-9) for x in (hidden, head))
    before = _peak_mb()
    differentiate(how, hidden, head, targets)
    return _peak_mb() - before


def differentiate(how: str, hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    """Log-probabilities [n]. Gradients of their mean, with ours plus a hundredth of the mean entropy, go to the inputs."""
    from compactionrl.method import token_logprobs

    if how == "ours":
        logprobs, entropy = token_logprobs(hidden, head, targets)
        (logprobs.mean() + 0.01 * entropy.mean()).backward()
    else:
        logprobs = (hidden @ head.t()).log_softmax(1).gather(1, targets[:, None]).squeeze(1)
        logprobs.mean().backward()
    return logprobs.detach()


def _peak_mb() -> float:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY)
    parser.add_argument("--run", nargs=2, metavar=("HOW", "TOKENS"), help="one run in this process: naive or ours")
    options = parser.parse_args()
    if options.run:
        print(_peak_of_one_run(options.run[0], int(options.run[1]), options.vocabulary))
    else:
        print(json.dumps(measure(options.repeats, options.vocabulary), indent=2))


if __name__ == "__main__":
    main()
