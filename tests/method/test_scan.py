import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from compactionrl.method import reverse_scan
from compactionrl.method.scan import BLOCK, TILE


def sequential(x: torch.Tensor, decay: torch.Tensor) -> torch.Tensor:
    y, found = 0.0, []
    for a, d in zip(reversed(x.tolist()), reversed(decay.tolist()), strict=True):
        y = a + d * y
        found.append(y)
    return torch.tensor(found[::-1], dtype=torch.float64)


@given(
    st.integers(0, 3) | st.integers(BLOCK - 2, BLOCK + 2) | st.integers(BLOCK**2 - 1, BLOCK**2 + 66),
    st.integers(0, 999),
)
@settings(max_examples=40, deadline=None)
def test_equals_a_loop(n: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, generator=generator, dtype=torch.float64)
    decay = torch.rand(n, generator=generator, dtype=torch.float64).round(decimals=1)  # with zeros and ones
    assert_close(reverse_scan(x, decay), sequential(x, decay), rtol=1e-12, atol=1e-12)


def test_across_tiles() -> None:
    n = TILE + 5
    x, decay = torch.ones(n, dtype=torch.float64), torch.full((n,), 1 - 1e-6, dtype=torch.float64)
    assert_close(reverse_scan(x, decay), sequential(x, decay), rtol=1e-11, atol=0)


def test_64k_tokens_at_09_in_float32() -> None:
    x = torch.randn(65_536, generator=torch.Generator().manual_seed(0))
    decay = torch.full_like(x, 0.9)
    assert_close(reverse_scan(x, decay).double(), sequential(x, decay), rtol=1e-5, atol=1e-5)


def test_leaves_its_arguments_alone() -> None:
    x, decay = torch.rand(200), torch.rand(200)
    kept = x.clone(), decay.clone()
    reverse_scan(x, decay)
    assert torch.equal(x, kept[0])
    assert torch.equal(decay, kept[1])
