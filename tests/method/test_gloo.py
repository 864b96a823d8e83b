"""Two ranks, each with part of the batch, together do what one process does with all of it."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing import assert_close

from compactionrl.method import (
    NORMALISATIONS,
    Layout,
    estimate,
    policy_loss,
    token_logprobs,
    token_weights,
    weight_total,
)

from . import brute

# By rollout, the lengths of its segments. Rank 0 holds the first two rollouts: many more segments than rank 1, fewer tokens.
ROLLOUTS = [[3, 1, 2, 1], [2, 2, 0], [40], [7, 1]]
SPLIT, DIM, VOCABULARY = 2, 4, 9


def batch() -> dict[str, Tensor]:
    n, generator = sum(map(sum, ROLLOUTS)), torch.Generator().manual_seed(0)
    normal = {name: torch.randn(*shape, generator=generator, dtype=torch.float64) for name, shape in {
        "hidden": (n, DIM), "behaviour": (n,), "values": (n,), "rewards": (len(ROLLOUTS),)}.items()}  # fmt: skip
    return normal | {"targets": torch.randint(VOCABULARY, (n,), generator=generator)}


def step(layout: Layout, part: dict[str, Tensor], normalisation: str, ranks: bool) -> list[Tensor]:
    """Whitened advantages of this part of the batch; loss and gradient of all of it."""
    total = torch.tensor(weight_total(layout, normalisation))
    if ranks:
        dist.all_reduce(total)
    found = estimate(
        layout, part["values"], part["rewards"], whiten=True, all_reduce=dist.all_reduce if ranks else None
    )
    head = torch.linspace(-1, 1, VOCABULARY * DIM, dtype=torch.float64).view(VOCABULARY, DIM).requires_grad_()
    logprobs, _ = token_logprobs(part["hidden"], head, part["targets"], chunk=8)
    weights = token_weights(layout, normalisation, total=int(total))
    loss = policy_loss(logprobs, part["behaviour"], found.advantages, weights)
    loss.backward()
    results = [loss.detach(), head.grad]
    if ranks:
        for result in results:
            dist.all_reduce(result)
    return [found.advantages, *results]


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    rollouts = (slice(0, SPLIT), slice(SPLIT, None))[rank]
    before = sum(map(sum, ROLLOUTS[:SPLIT]))
    tokens = (slice(0, before), slice(before, None))[rank]
    layout = brute.from_lengths(ROLLOUTS[rollouts])
    part = {name: x[rollouts if name == "rewards" else tokens] for name, x in batch().items()}
    torch.save({name: step(layout, part, name, ranks=True) for name in NORMALISATIONS}, Path(folder) / f"rank{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.timeout(120)
def test_two_ranks_equal_one_process(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(work, args=(str(tmp_path),), nprocs=2)
    ranks = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2)]
    for normalisation in NORMALISATIONS:
        advantages, *expected = step(brute.from_lengths(ROLLOUTS), batch(), normalisation, ranks=False)
        found = [rank[normalisation] for rank in ranks]
        assert_close(torch.cat([advantages for advantages, *_ in found]), advantages, rtol=1e-12, atol=1e-14)
        for _, *results in found:
            assert_close(results, expected, rtol=1e-11, atol=1e-13)
