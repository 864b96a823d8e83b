"""Any causal language model: sampled, trained and stored as our own decoder is. The GLM architectures, and Qwen3."""

from __future__ import annotations

import asyncio
import copy
import json
import random
import resource
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import PeftModel
from tiny_glm import ARCHITECTURES, SIZES, make_model, save_model
from transformers import AutoModel, AutoModelForCausalLM

from compactionrl.config import ConfigError, LoraConfig
from compactionrl.models import Critic, Policy, load_critic, load_policy, save_critic, save_policy
from compactionrl.models.hugging_face import HuggingFacePolicy, similar
from compactionrl.models.lora import add_adapters, save_adapters
from compactionrl.samplers.local import LocalSampler

VOCABULARY = 61
LENGTHS = [1, 50, 39, 44, 3]
IDS = torch.tensor(random.Random(1).choices(range(VOCABULARY), k=sum(LENGTHS)))
every_architecture = pytest.mark.parametrize("architecture", ARCHITECTURES)


def load(folder: Path, **options: Any) -> HuggingFacePolicy:
    policy = load_policy(folder, implementation="transformers", **options)
    assert isinstance(policy, HuggingFacePolicy)
    return policy


def other_model(name: str, folder: Path, **options: Any) -> transformers.PreTrainedModel:
    """A tiny model of another architecture."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name, vocab_size=VOCABULARY, **{**SIZES, **options})
    return save_model(AutoModelForCausalLM.from_config(config), folder)


@every_architecture
def test_windows_and_gradients_are_those_of_transformers(architecture: str, tmp_path: Path) -> None:
    """Every parameter, experts and routers included, gets the gradient that `transformers` gives it, under its own name."""
    hf = make_model(architecture, VOCABULARY, tmp_path)
    policy = load(tmp_path)
    logits = policy(IDS, LENGTHS) @ policy.head_weight.T
    expected = torch.cat([hf(window[None]).logits[0] for window in IDS.split(LENGTHS)])
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    logits.log_softmax(-1)[:, 7].sum().backward()
    expected.log_softmax(-1)[:, 7].sum().backward()
    ours, theirs = (dict(model.named_parameters()) for model in (policy, hf))
    assert ours.keys() == theirs.keys()
    untrained = {name for name, p in theirs.items() if p.grad is None}
    assert untrained == {name for name in theirs if "indexer" in name}
    for name, p in theirs.items():
        if name in untrained:
            assert ours[name].grad is None
        else:
            assert p.grad is not None
            torch.testing.assert_close(ours[name].grad, p.grad, rtol=1e-4, atol=float(1e-5 * p.grad.abs().max()))


def test_batches_hold_every_window_once_and_little_padding() -> None:
    lengths = random.Random(0).choices(range(1, 400), k=50)
    batches = similar(lengths)
    assert sorted(i for batch in batches for i in batch) == list(range(50))
    for batch in batches:
        found = [lengths[i] for i in batch]
        assert min(found) >= 0.75 * max(found)
        assert found[0] == max(found)
    assert len(similar([90] * 6 + [80] * 6)) == 1


def logprobs(policy: Policy, window: list[int], n: int) -> torch.Tensor:
    hidden = policy(torch.tensor(window), [len(window)])[-n - 1 : -1]
    return (hidden @ policy.head_weight.T).log_softmax(-1).gather(-1, torch.tensor(window[-n:])[:, None])[:, 0]


async def play(sampler: LocalSampler, number: int) -> list[tuple[list[int], list[float]]]:
    """A rollout that extends its window, is compacted to a new one with the same beginning, and extends that."""
    draw, record = random.Random(number), []
    window = draw.choices(range(VOCABULARY), k=20 + 5 * number)
    for turn in range(5):
        sampled = await sampler.sample(
            window, max_tokens=6, stop_token_ids=[], temperature=1.0, top_p=1.0, seed=turn, affinity=str(number)
        )
        window = window + sampled.token_ids
        record.append((window, sampled.logprobs))
        kept = window[: 10 + 2 * number] if turn == 2 else window
        window = kept + draw.choices(range(VOCABULARY), k=draw.randint(0, 4))
    return record


def check_sampler(policy: Policy, rows: int, rollouts: int) -> LocalSampler:
    async def run() -> list[list[tuple[list[int], list[float]]]]:
        return await asyncio.gather(*(play(sampler, number) for number in range(rollouts)))

    sampler = LocalSampler(policy, max_rows=rows, max_tokens_per_row=128)
    with torch.no_grad():
        for rollout in asyncio.run(run()):
            for window, sampled in rollout:
                expected = logprobs(policy, window, len(sampled))
                torch.testing.assert_close(torch.tensor(sampled), expected, rtol=0, atol=1e-4)
    return sampler


@every_architecture
def test_sampled_logprobs_are_the_trainers(architecture: str, tmp_path: Path) -> None:
    make_model(architecture, VOCABULARY, tmp_path)
    sampler = check_sampler(load(tmp_path), rows=8, rollouts=8)
    prompts = sum(20 + 5 * number for number in range(8))
    # Beyond the prompts and a few new tokens a turn, nothing is computed twice: also what precedes a cut is kept.
    assert sampler.stats.prefilled_tokens < prompts + 8 * 5 * 5
    check_sampler(load(tmp_path), rows=3, rollouts=4)


OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "sliding windows": ("mistral", {"sliding_window": 16, "num_key_value_heads": 2, "head_dim": 16}),
    "recurrent": (
        "mamba2",
        {"num_heads": 8, "head_dim": 16, "n_groups": 1, "state_size": 16, "max_position_embeddings": None},
    ),
    "learned positions": ("gpt2", {}),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_architectures_are_sampled_as_they_are_trained(kind: str, tmp_path: Path) -> None:
    """Where a cache cannot be cut back, its row starts over: one compaction computes the whole new window."""
    name, options = OTHERS[kind]
    hf = other_model(name, tmp_path, **options)
    policy = load(tmp_path)
    expected = torch.cat([hf(window[None]).logits[0] for window in IDS.split(LENGTHS)])
    torch.testing.assert_close(policy(IDS, LENGTHS) @ policy.head_weight.T, expected, rtol=1e-4, atol=1e-5)
    sampler = check_sampler(policy, rows=4, rollouts=4)
    cuttable = kind == "learned positions"
    assert policy.cache(1, 128).cuttable == cuttable
    assert sampler.stats.reused_tokens > 0
    assert policy.config.max_position_embeddings == (sys.maxsize if kind == "recurrent" else 512)


@every_architecture
def test_policies_and_critics_come_back_bit_for_bit(architecture: str, tmp_path: Path) -> None:
    hf = make_model(architecture, VOCABULARY, tmp_path / "base")
    policy, critic = load(tmp_path / "base"), Critic(load(tmp_path / "base"))
    torch.nn.init.normal_(critic.score.weight)
    torch.nn.init.normal_(critic.score.bias)
    save_policy(policy, tmp_path / "policy")
    save_critic(critic, tmp_path / "critic")
    again = load_critic(tmp_path / "critic")
    assert torch.equal(load(tmp_path / "policy")(IDS, LENGTHS), policy(IDS, LENGTHS))
    assert torch.equal(again(IDS, LENGTHS), critic(IDS, LENGTHS))
    for one, other in ((policy, load(tmp_path / "policy")), (critic, again)):
        theirs = other.state_dict()
        assert theirs.keys() == one.state_dict().keys()
        assert all(torch.equal(tensor, theirs[name]) for name, tensor in one.state_dict().items())
    for auto, folder, expected in ((AutoModelForCausalLM, "policy", hf), (AutoModel, "critic", hf.base_model)):
        state = auto.from_pretrained(tmp_path / folder).state_dict()
        assert all(torch.equal(tensor, state[name]) for name, tensor in expected.state_dict().items())


@every_architecture
def test_recomputed_gradients_are_the_same_and_keep_less(architecture: str, tmp_path: Path) -> None:
    make_model(architecture, VOCABULARY, tmp_path)
    kept, gradients = [], []
    for on in (False, True):
        policy = load(tmp_path)
        policy.checkpoint_gradients(True)
        policy.checkpoint_gradients(on)
        sizes: list[int] = []

        def keep(tensor: torch.Tensor, sizes: list[int] = sizes) -> torch.Tensor:
            sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            hidden = policy(IDS, LENGTHS)
        kept.append(sum(sizes))
        hidden.square().sum().backward()
        gradients.append({name: p.grad for name, p in policy.named_parameters() if p.grad is not None})
    assert kept[1] < kept[0] / 4
    assert gradients[0].keys() == gradients[1].keys()
    assert all(torch.equal(gradient, gradients[1][name]) for name, gradient in gradients[0].items())


def test_a_copy_is_a_model_of_its_own(tmp_path: Path) -> None:
    """Rollouts that run ahead are sampled from one."""
    make_model("glm4_moe", VOCABULARY, tmp_path)
    policy = load(tmp_path)
    policy.checkpoint_gradients(True)
    before, second = policy(IDS, LENGTHS), copy.deepcopy(policy)
    with torch.no_grad():
        for p in policy.parameters():
            p.zero_()
    assert torch.equal(second(IDS, LENGTHS), before)
    assert not policy(IDS, LENGTHS).any()


def test_routers_stay_in_float32(tmp_path: Path) -> None:
    make_model("glm4_moe", VOCABULARY, tmp_path)
    policy = load(tmp_path, dtype=torch.bfloat16)
    narrow = {name: p.dtype for name, p in policy.named_parameters() if p.dtype != torch.float32}
    assert set(narrow.values()) == {torch.bfloat16}
    assert [name for name, _ in policy.named_parameters() if name not in narrow] == ["model.layers.1.mlp.gate.weight"]
    assert policy(IDS, LENGTHS).dtype == torch.bfloat16
    assert Critic(policy).score.weight.dtype == torch.float32


def test_adapters_and_what_they_merge_into(tmp_path: Path) -> None:
    make_model("glm4_moe_lite", VOCABULARY, tmp_path / "base")
    policy = load(tmp_path / "base")
    add_adapters(policy, LoraConfig(rank=2, targets=["o_proj", "q_b_proj"]))
    with torch.no_grad():
        for name, p in policy.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.1)
    hidden = policy(IDS, LENGTHS)
    assert not torch.allclose(hidden, load(tmp_path / "base")(IDS, LENGTHS), atol=1e-3)
    save_adapters(policy, tmp_path / "adapters", tmp_path / "base")
    assert torch.equal(load(tmp_path / "adapters")(IDS, LENGTHS), hidden)
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "adapters")
    logits = torch.cat([theirs(window[None]).logits[0] for window in IDS.split(LENGTHS)])
    torch.testing.assert_close(hidden @ policy.head_weight.T, logits, rtol=1e-4, atol=1e-4)
    save_policy(policy, tmp_path / "merged")
    torch.testing.assert_close(load(tmp_path / "merged")(IDS, LENGTHS), hidden, rtol=1e-4, atol=1e-4)


def test_a_model_without_linear_layers_gets_no_adapters(tmp_path: Path) -> None:
    other_model("gpt2", tmp_path)
    with pytest.raises(ConfigError, match=r"no linear layers.*lora\.rank = 0"):
        add_adapters(load(tmp_path), LoraConfig(rank=2))


def test_auto_takes_our_own_decoder_where_it_can(tmp_path: Path) -> None:
    for architecture in ARCHITECTURES:
        make_model(architecture, VOCABULARY, tmp_path / architecture)
    found = {name: load_policy(tmp_path / name).implementation for name in ARCHITECTURES}
    assert found == {
        "glm4_moe": "transformers",
        "glm4_moe_lite": "transformers",
        "glm_moe_dsa": "transformers",
        "qwen3": "packed",
    }
    with pytest.raises(ValueError, match="Glm4MoeForCausalLM"):
        load_policy(tmp_path / "glm4_moe", implementation="packed")
    ours, theirs = load_policy(tmp_path / "qwen3"), load(tmp_path / "qwen3")
    torch.testing.assert_close(ours(IDS, LENGTHS), theirs(IDS, LENGTHS), rtol=1e-4, atol=1e-4)
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 256}
    change_config(tmp_path / "qwen3", rope_parameters=rope)
    assert load_policy(tmp_path / "qwen3").implementation == "transformers"


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "soft cap": ("gemma2", {"final_logit_softcapping": 30.0, "num_key_value_heads": 2, "head_dim": 16}, "soft cap"),
    "factor": ("granite", {"logits_scaling": 2.0, "num_key_value_heads": 2}, "a factor"),
    "bias": ("phi", {}, "a bias"),
    "a cache that takes one token at a time": ("mamba", {"state_size": 8, "time_step_rank": 8}, "with a cache"),
    "half of an encoder and decoder": (
        "bart",
        {"d_model": 64, "num_hidden_layers": 1, "decoder_layers": 2, "decoder_attention_heads": 4},
        "BartForCausalLM",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_a_policy_cannot_be_is_refused(kind: str, tmp_path: Path) -> None:
    """Logits that are no linear map of the hidden states, and hidden states that are others while sampling."""
    name, options, message = REFUSED[kind]
    other_model(name, tmp_path, **options)
    with pytest.raises(ValueError, match=message):
        load_policy(tmp_path)


NARROW = {
    "factor": ("granite", {"logits_scaling": 1.5, "num_key_value_heads": 2}, "a factor"),
    "a cache that takes one token at a time": (
        "jamba",
        {
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "num_key_value_heads": 2,
        },
        "with a cache",
    ),
    "hidden states in float32": ("mamba2", OTHERS["recurrent"][1], "cannot be computed here in torch.bfloat16"),
}


@pytest.mark.parametrize("kind", NARROW)
def test_it_is_refused_in_bfloat16_too(kind: str, tmp_path: Path) -> None:
    """What is computed otherwise may be less than rounding, of these few tokens: yet of many it is not."""
    name, options, message = NARROW[kind]
    other_model(name, tmp_path, **options)
    with pytest.raises(ValueError, match=message):
        load_policy(tmp_path, dtype=torch.bfloat16)


def test_the_rounding_of_many_layers_is_no_reason_to_refuse(tmp_path: Path) -> None:
    other_model("qwen2", tmp_path, num_hidden_layers=128, num_key_value_heads=2, initializer_range=0.3)
    assert load_policy(tmp_path).implementation == "transformers"


def test_what_was_checked_is_as_it_was_loaded(tmp_path: Path) -> None:
    for architecture in ARCHITECTURES:
        make_model(architecture, VOCABULARY, tmp_path / architecture)
        expected = AutoModelForCausalLM.from_pretrained(tmp_path / architecture, dtype=torch.bfloat16).state_dict()
        state = load(tmp_path / architecture, dtype=torch.bfloat16).state_dict()
        assert state.keys() == expected.keys()
        for name, tensor in expected.items():
            assert state[name].dtype == tensor.dtype
            assert torch.equal(state[name], tensor)


def test_no_window_is_longer_than_where_rotary_angles_switch(tmp_path: Path) -> None:
    """Phi-3's long factors are those of every token of a long window; what a cache holds has been rotated by the short ones."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [3.0] * 8}
    other_model("phi3", tmp_path, rope_parameters=rope, original_max_position_embeddings=96)
    policy = load_policy(tmp_path)
    assert policy.config.max_position_embeddings == 96
    check_sampler(policy, rows=2, rollouts=2)


def test_a_model_that_looks_ahead_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model("qwen3", VOCABULARY, tmp_path)
    plain = transformers.Qwen3Model.forward

    def mixed(self: Any, *inputs: Any, **options: Any) -> Any:
        output = plain(self, *inputs, **options)
        output["last_hidden_state"] = output.last_hidden_state + output.last_hidden_state.mean(1, keepdim=True)
        return output

    monkeypatch.setattr(transformers.Qwen3Model, "forward", mixed)
    with pytest.raises(ValueError, match="not causal"):
        load(tmp_path)


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def cut_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:100])


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing layer": (lambda folder: change_config(folder, num_hidden_layers=3), r"layers\.2"),
    "other shapes": (lambda folder: change_config(folder, intermediate_size=8), "cannot load it"),
    "other class": (lambda folder: change_config(folder, architectures=["Glm4MoeModel"]), "expected a Glm4MoeForCausalLM"),
    "unknown type": (lambda folder: change_config(folder, model_type="glm99", architectures=["X"]), "glm99"),
    "code of its own": (
        lambda folder: change_config(folder, model_type="x", auto_map={"AutoConfig": "c.C", "AutoModelForCausalLM": "c.M"}),
        "trust_remote_code",
    ),
    "quantised": (lambda folder: change_config(folder, quantization_config={"bits": 4}), "quantised"),
    "damaged": (cut_weights, "damaged"),
    "pickle": (lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"), "safetensors"),
}  # fmt: skip


@pytest.mark.parametrize("change", BROKEN)
def test_what_cannot_be_loaded_is_refused(change: str, tmp_path: Path) -> None:
    make_model("glm4_moe", VOCABULARY, tmp_path)
    apply, message = BROKEN[change]
    apply(tmp_path)
    with pytest.raises((ValueError, OSError), match=message):
        load_policy(tmp_path)


def test_a_full_disk_is_an_os_error(tmp_path: Path) -> None:
    make_model("glm4_moe", VOCABULARY, tmp_path / "base")
    policy = load(tmp_path / "base")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(OSError, match="cannot be written"):
            save_policy(policy, tmp_path / "full")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("lengths", [[3, 4], [8, 0], []])
def test_lengths_must_cover_the_tokens(lengths: Sequence[int], tmp_path: Path) -> None:
    make_model("qwen3", VOCABULARY, tmp_path)
    with pytest.raises(ValueError, match="length"):
        load(tmp_path)(IDS[:8], lengths)
