"""Adapters: the base at first, ours and peft's folders alike, one base in memory for two models."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import torch
from hf_reference import VARIANTS, reference
from peft import LoraConfig as TheirConfig
from peft import PeftModel, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from compactionrl.config import ConfigError, LoraConfig
from compactionrl.models import Critic, Transformer, load_policy, save_policy
from compactionrl.models.lora import (
    add_adapters,
    is_adapted,
    linear_layers,
    load_adapters,
    merged_state,
    save_adapters,
    share,
)
from compactionrl.samplers.local import LocalSampler

IDS = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6])
LORA = LoraConfig(rank=4, alpha=6.0)
ALL = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]


@pytest.fixture(params=["qwen3 tied", "llama untied"])
def base(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    reference(**VARIANTS[request.param]).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def logits(model: Transformer) -> torch.Tensor:
    return model(IDS, [8]) @ model.head_weight.T


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def disturb(model: nn.Module) -> None:
    """Move everything that is trained away from its initial value."""
    torch.manual_seed(7)
    with torch.no_grad():
        for p in trained(model).values():
            p.add_(torch.randn_like(p) * 0.3)


def test_it_begins_as_the_base_exactly_and_only_adapters_are_trained(base: Path) -> None:
    policy = load_policy(base)
    expected = logits(policy)
    assert linear_layers(policy) == ALL
    add_adapters(policy, LORA)
    assert torch.equal(logits(policy), expected)
    # Per block: q and o 32 x 32, k and v 32 x 16, three of 32 x 48; rank 4.
    sizes = 2 * 4 * (2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 48))
    assert sum(p.numel() for p in trained(policy).values()) == sizes
    assert all(".lora_" in name for name in trained(policy))
    (logits(policy).log_softmax(-1)[:, 5]).sum().backward()
    assert all(p.grad is None for p in policy.parameters() if not p.requires_grad)
    assert all(p.grad.abs().sum() > 0 for name, p in trained(policy).items() if "lora_B" in name)


def test_seeded_and_only_where_asked(base: Path) -> None:
    first, second, other = (load_policy(base) for _ in range(3))
    for model, seed in ((first, 1), (second, 1), (other, 2)):
        add_adapters(model, LoraConfig(rank=2, targets=["q_proj", "v_proj"]), seed=seed)
    assert {name.split(".")[4] for name in trained(first)} == {"q_proj", "v_proj"}
    pairs = [(p, trained(second)[name], trained(other)[name]) for name, p in trained(first).items() if "lora_A" in name]
    assert all(torch.equal(a, b) and not torch.equal(a, c) for a, b, c in pairs)
    with pytest.raises(ConfigError, match=r"lora\.targets: .*no linear layer c_attn; it has down_proj"):
        add_adapters(load_policy(base), LoraConfig(rank=2, targets=["c_attn"]))


def test_peft_loads_what_we_save(base: Path, tmp_path: Path) -> None:
    policy = load_policy(base)
    add_adapters(policy, LORA)
    disturb(policy)
    save_adapters(policy, tmp_path / "adapters", base)
    assert {path.name for path in (tmp_path / "adapters").iterdir()} >= {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapters")
    torch.testing.assert_close(logits(policy), theirs(IDS[None]).logits[0], rtol=1e-5, atol=1e-5)
    again = load_policy(tmp_path / "adapters")
    assert torch.equal(logits(again), logits(policy))
    assert not torch.allclose(logits(again), logits(load_policy(base)), atol=0.1)


def test_we_load_what_peft_saves(base: Path, tmp_path: Path) -> None:
    config = TheirConfig(r=3, lora_alpha=9, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    theirs = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    disturb(theirs)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = load_policy(tmp_path / "theirs")
    torch.testing.assert_close(logits(ours), theirs(IDS[None]).logits[0], rtol=1e-5, atol=1e-5)


def test_merged_weights_are_an_ordinary_model(base: Path, tmp_path: Path) -> None:
    policy = load_policy(base)
    assert merged_state(policy).keys() == policy.state_dict().keys()
    names = policy.state_dict().keys()
    add_adapters(policy, LORA)
    disturb(policy)
    assert merged_state(policy).keys() == names
    save_policy(policy, tmp_path / "merged")
    merged = load_policy(tmp_path / "merged")
    assert not is_adapted(merged)
    torch.testing.assert_close(logits(merged), logits(policy), rtol=1e-5, atol=1e-5)
    hf = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(hf(IDS[None]).logits[0], logits(policy), rtol=1e-5, atol=1e-5)


def test_merging_rounds_once(tmp_path: Path) -> None:
    """A delta of 3/1024 on a weight of 1: half a step of bfloat16 (1/128 above 1) is 4/1024, so it stays 1; 5/1024 does not."""
    reference("llama").save_pretrained(tmp_path)
    policy = load_policy(tmp_path, dtype=torch.bfloat16)
    add_adapters(policy, LoraConfig(rank=1, alpha=1.0, targets=["q_proj"]))
    layer = policy.get_submodule("model.layers.0.self_attn.q_proj")
    with torch.no_grad():
        layer.base_layer.weight.fill_(1.0)  # type: ignore[union-attr]
        layer.lora_A["default"].weight.fill_(1.0)  # type: ignore[index,union-attr]
        layer.lora_B["default"].weight.fill_(3 / 1024)  # type: ignore[index,union-attr]
        layer.lora_B["default"].weight[0] = 5 / 1024  # type: ignore[index,union-attr]
    weight = merged_state(policy)["model.layers.0.self_attn.q_proj.weight"]
    assert weight.dtype == torch.bfloat16
    assert weight[1:].unique().tolist() == [1.0]
    assert weight[0].unique().tolist() == [1 + 1 / 128]


def test_two_models_on_one_base(base: Path) -> None:
    """Policy and critic have the base's tensors in common and nothing else."""
    policy = load_policy(base)
    critic = Critic(share(policy))
    add_adapters(policy, LORA, seed=1)
    add_adapters(critic, LORA, seed=1)
    before = logits(policy)
    disturb(critic)
    assert torch.equal(logits(policy), before)
    owners = [{p.data_ptr() for p in model.model.parameters()} for model in (policy, critic)]
    frozen = [{p.data_ptr() for p in model.model.parameters() if not p.requires_grad} for model in (policy, critic)]
    assert frozen[0] == frozen[1] == owners[0] & owners[1]
    assert {name for name in trained(critic) if "lora" not in name} == {"score.weight", "score.bias"}


def test_a_critics_adapters_are_peft_s_token_classifier(base: Path, tmp_path: Path) -> None:
    critic = Critic(load_policy(base))
    add_adapters(critic, LORA)
    assert torch.equal(critic(IDS, [5, 3]), torch.zeros(8))
    disturb(critic)
    save_adapters(critic, tmp_path / "critic", base)
    again = load_adapters(Critic(load_policy(base)), tmp_path / "critic")
    assert torch.equal(again(IDS, [5, 3]), critic(IDS, [5, 3]))
    model = AutoModelForTokenClassification.from_pretrained(base, num_labels=1)
    theirs = PeftModel.from_pretrained(model, tmp_path / "critic")
    torch.testing.assert_close(critic(IDS, [8]), theirs(IDS[None]).logits[0, :, 0], rtol=1e-5, atol=1e-5)


def test_the_sampler_draws_from_the_adapted_weights(base: Path) -> None:
    policy = load_policy(base)
    add_adapters(policy, LORA)
    disturb(policy)

    async def sample() -> tuple[list[int], list[float]]:
        sampler = LocalSampler(policy, max_tokens_per_row=64)
        options = {"stop_token_ids": [], "temperature": 1.0, "top_p": 1.0, "seed": 3, "affinity": "a"}
        drawn = await sampler.sample(IDS.tolist(), max_tokens=12, **options)
        return drawn.token_ids, drawn.logprobs

    tokens, logprobs = asyncio.run(sample())
    ids = torch.tensor(IDS.tolist() + tokens)
    expected = (policy(ids, [20]) @ policy.head_weight.T).log_softmax(-1)[7:-1].gather(1, ids[8:, None]).squeeze(1)
    torch.testing.assert_close(torch.tensor(logprobs), expected, rtol=0, atol=1e-5)


def test_adapters_of_another_model_or_kind_are_refused(base: Path, tmp_path: Path) -> None:
    policy = load_policy(base)
    add_adapters(policy, LoraConfig(rank=2, targets=["q_proj"]))
    save_adapters(policy, tmp_path / "adapters", base)
    reference(num_hidden_layers=3).save_pretrained(tmp_path / "deeper")
    with pytest.raises(ValueError, match="belong to another model"):
        load_adapters(load_policy(tmp_path / "deeper"), tmp_path / "adapters")
    reference(hidden_size=64).save_pretrained(tmp_path / "wider")
    with pytest.raises(ValueError, match="belong to another model"):
        load_adapters(load_policy(tmp_path / "wider"), tmp_path / "adapters")
    path = tmp_path / "adapters" / "adapter_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"use_dora": True}))
    with pytest.raises(ValueError, match="only plain LoRA adapters are supported; use_dora"):
        load_policy(tmp_path / "adapters")
    path.write_text(json.dumps(config | {"base_model_name_or_path": str(tmp_path / "gone")}))
    with pytest.raises(ValueError, match="no model folder here: put the base there"):
        load_policy(tmp_path / "adapters")
