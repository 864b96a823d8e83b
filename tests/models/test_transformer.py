"""Forward and gradients against `transformers`, one window at a time and packed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hf_reference import VARIANTS, reference
from hypothesis import given, settings
from hypothesis import strategies as st

from compactionrl.models import ModelConfig, Transformer, load_policy
from compactionrl.models.packing import PackedAttention

CONFIG = ModelConfig("Qwen3ForCausalLM", 61, 32, 48, 2, 4, 2, 8)
IDS = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6])
LENGTHS = [5, 40, 1, 37, 12, 40, 3, 90]


@pytest.fixture(params=VARIANTS)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[torch.nn.Module, Transformer]:
    hf = reference(**VARIANTS[request.param])
    hf.save_pretrained(tmp_path)
    return hf, load_policy(tmp_path)


def windows(lengths: list[int]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(61, (length,), generator=generator) for length in lengths]


def test_state_dict_is_hugging_faces(pair) -> None:
    hf, ours = pair
    theirs = hf.state_dict()
    assert ours.state_dict().keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.state_dict().items())


def test_logits_of_one_window(pair) -> None:
    hf, ours = pair
    (ids,) = windows([200])
    logits = ours(ids, [200]) @ ours.head_weight.T
    torch.testing.assert_close(logits, hf(ids[None]).logits[0], rtol=1e-5, atol=1e-5)


def test_packed_windows_equal_each_window_alone(pair) -> None:
    hf, ours = pair
    parts = windows(LENGTHS)
    logits = ours(torch.cat(parts), LENGTHS) @ ours.head_weight.T
    alone = torch.cat([hf(ids[None]).logits[0] for ids in parts])
    torch.testing.assert_close(logits, alone, rtol=1e-5, atol=1e-5)


def test_gradients_equal_hugging_faces(pair) -> None:
    hf, ours = pair
    parts = windows(LENGTHS)
    weights = torch.randn(sum(LENGTHS), 61, generator=torch.Generator().manual_seed(2))
    logits = torch.cat([hf(ids[None]).logits[0] for ids in parts])
    (logits.log_softmax(-1) * weights).sum().backward()
    ((ours(torch.cat(parts), LENGTHS) @ ours.head_weight.T).log_softmax(-1) * weights).sum().backward()
    theirs = dict(hf.named_parameters())
    scale = max(parameter.grad.abs().max() for parameter in theirs.values())
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, theirs[name].grad, rtol=1e-5, atol=float(1e-5 * scale), msg=name)


def test_bfloat16_keeps_exact_rope_angles() -> None:
    model = Transformer(CONFIG).to(torch.bfloat16)
    assert model(torch.tensor([1, 2, 3]), [3]).dtype == torch.bfloat16
    assert torch.equal(model.model.inverse_frequencies, CONFIG.inverse_frequencies())


@pytest.mark.parametrize(("lengths", "message"), [([3, 4], "sum to 7"), ([8, 0], "positive"), ([], "sum to 0")])
def test_lengths_must_cover_the_tokens(lengths: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Transformer(CONFIG)(torch.zeros(8, dtype=torch.long), lengths)


def test_positions_restart_with_every_window() -> None:
    assert PackedAttention.over(6, [2, 1, 3]).positions.tolist() == [0, 1, 0, 0, 1, 2]


@given(st.lists(st.integers(1, 30), min_size=1, max_size=12), st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=20)
def test_order_of_windows_does_not_matter(lengths: list[int], random) -> None:
    torch.manual_seed(0)
    model = Transformer(CONFIG)
    parts = windows(lengths)
    order = list(range(len(lengths)))
    random.shuffle(order)
    hidden = model(torch.cat(parts), lengths).split(lengths)
    shuffled_lengths = [lengths[i] for i in order]
    shuffled = model(torch.cat([parts[i] for i in order]), shuffled_lengths).split(shuffled_lengths)
    for place, i in enumerate(order):
        torch.testing.assert_close(shuffled[place], hidden[i], rtol=1e-5, atol=1e-5)


def test_checkpointed_gradients_are_the_same_and_keep_less() -> None:
    """Bit for bit; what is kept is counted as storage that autograd holds until the backward pass."""

    def run(checkpointing: bool) -> tuple[int, list[torch.Tensor]]:
        torch.manual_seed(0)
        model = Transformer(CONFIG)
        model.checkpoint_gradients(checkpointing)
        parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
        kept: dict[int, int] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in parameters:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            hidden = model(torch.cat(windows(LENGTHS)), LENGTHS)
        forward = sum(kept.values())
        hidden.sin().sum().backward()
        return forward, [p.grad for p in model.model.parameters()]

    (all_kept, expected), (few_kept, found) = run(False), run(True)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert few_kept < all_kept / 4


def test_the_sampler_and_frozen_trunks_are_not_checkpointed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Transformer(CONFIG)
    model.checkpoint_gradients(True)
    monkeypatch.setattr("compactionrl.models.transformer.checkpoint", lambda *_, **__: pytest.fail("checkpointed"))
    for no_gradients in (torch.no_grad(), torch.inference_mode()):
        with no_gradients:
            model(IDS, [8])
