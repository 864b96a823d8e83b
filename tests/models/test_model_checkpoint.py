"""Folders that `transformers` wrote and folders that it reads."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest
import torch
from hf_reference import LLAMA3_ROPE, VARIANTS, reference
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from compactionrl.models import Critic, ModelConfig, Transformer, load_critic, load_policy, save_critic, save_policy

CONFIG = ModelConfig("Qwen3ForCausalLM", 61, 32, 48, 2, 4, 2, 8, tie_word_embeddings=True)
IDS = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6])


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("variant", VARIANTS)
def test_round_trip_through_hugging_face(variant: str, tmp_path: Path) -> None:
    hf = reference(**VARIANTS[variant])
    hf.config.eos_token_id = 7
    hf.save_pretrained(tmp_path / "theirs")
    save_policy(load_policy(tmp_path / "theirs"), tmp_path / "ours")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert type(again) is type(hf)
    assert again.config.eos_token_id == 7
    assert torch.equal(again(IDS[None]).logits, hf(IDS[None]).logits)


def test_sharded_folder(tmp_path: Path) -> None:
    hf = reference()
    hf.save_pretrained(tmp_path, max_shard_size="20KB")
    assert not (tmp_path / "model.safetensors").exists()
    ours = load_policy(tmp_path)
    torch.testing.assert_close(ours(IDS, [8]) @ ours.head_weight.T, hf(IDS[None]).logits[0], rtol=1e-5, atol=1e-5)


def test_random_model_is_loadable(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Transformer(CONFIG)
    save_policy(model, tmp_path)
    logits = AutoModelForCausalLM.from_pretrained(tmp_path)(IDS[None]).logits[0]
    torch.testing.assert_close(model(IDS, [8]) @ model.head_weight.T, logits, rtol=1e-5, atol=1e-5)
    assert load_policy(tmp_path).config == CONFIG


def test_older_rope_fields(tmp_path: Path) -> None:
    reference("llama", rope_parameters=LLAMA3_ROPE).save_pretrained(tmp_path)
    new = load_policy(tmp_path)
    old = json.loads((tmp_path / "config.json").read_text())
    rope = dict(old.pop("rope_parameters"))
    old |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    (tmp_path / "config.json").write_text(json.dumps(old))
    assert torch.equal(load_policy(tmp_path)(IDS, [8]), new(IDS, [8]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, "GemmaForCausalLM"),
        ({"architectures": ["Qwen3ForTokenClassification"]}, "TokenClassification"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}}, "yarn"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"num_hidden_layers": 3}, "missing tensors.*layers.2"),
        ({"intermediate_size": 8}, "other shapes than its config.json"),
    ],
)
def test_what_it_cannot_compute_is_refused(changes: dict[str, object], message: str, tmp_path: Path) -> None:
    reference().save_pretrained(tmp_path)
    edit_config(tmp_path, **changes)
    with pytest.raises(ValueError, match=message):
        load_policy(tmp_path, implementation="packed")


def test_a_damaged_folder_is_refused(tmp_path: Path) -> None:
    reference().save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(ValueError, match="weights file is damaged"):
        load_policy(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["vocab_size"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"config.json lacks the entry 'vocab_size'"):
        load_policy(tmp_path)


def test_a_full_disk_is_an_os_error(tmp_path: Path) -> None:
    """Not one of the library's own: who calls tells the user to make room."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match=r"model.safetensors cannot be written"):
            save_policy(Transformer(CONFIG), tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_pickled_weights_are_not_read(tmp_path: Path) -> None:
    hf = reference()
    hf.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(hf.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match="safetensors"):
        load_policy(tmp_path)


@pytest.mark.parametrize("variant", ["qwen3 tied", "llama untied"])
def test_critic_starts_at_zero_and_is_a_token_classifier(variant: str, tmp_path: Path) -> None:
    reference(**VARIANTS[variant]).save_pretrained(tmp_path / "policy")
    critic = Critic(load_policy(tmp_path / "policy"))
    assert torch.equal(critic(IDS, [5, 3]), torch.zeros(8))
    assert not any("lm_head" in name for name, _ in critic.named_parameters())
    torch.nn.init.normal_(critic.score.weight)
    torch.nn.init.normal_(critic.score.bias)
    save_critic(critic, tmp_path / "critic")
    values = critic(IDS, [5, 3])
    assert torch.equal(load_critic(tmp_path / "critic")(IDS, [5, 3]), values)
    hf = AutoModelForTokenClassification.from_pretrained(tmp_path / "critic")
    theirs = torch.cat([hf(IDS[None, :5]).logits[0, :, 0], hf(IDS[None, 5:]).logits[0, :, 0]])
    torch.testing.assert_close(values, theirs, rtol=1e-5, atol=1e-5)


def test_value_sees_its_own_token_and_nothing_later() -> None:
    critic = Critic(Transformer(CONFIG))
    torch.nn.init.normal_(critic.score.weight)
    changed = IDS.clone()
    changed[4] = 60
    before, after = critic(IDS, [8]), critic(changed, [8])
    assert torch.equal(before[:4], after[:4])
    assert not torch.equal(before[4], after[4])


def test_a_policy_is_not_a_critic(tmp_path: Path) -> None:
    reference().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="expected one that ends in ForTokenClassification"):
        load_critic(tmp_path)
