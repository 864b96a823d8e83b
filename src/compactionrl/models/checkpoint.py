"""Hugging Face folders in and out: `config.json` and safetensors, never a pickle."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from compactionrl.models.config import ModelConfig, UnsupportedModel
from compactionrl.models.critic import VALUE_HEAD, Critic
from compactionrl.models.lora import ADAPTER_CONFIG, load_adapted, merged_state
from compactionrl.models.policy import Policy
from compactionrl.models.tensors import save_tensors
from compactionrl.models.transformer import Transformer

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
TIED = "lm_head.weight"
"""Not stored where the embedding serves as the head."""

Model = TypeVar("Model", Transformer, Critic)
Implementation = Literal["auto", "packed", "transformers"]


def load_policy(
    folder: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    implementation: Implementation = "auto",
) -> Policy:
    """The policy in `folder`: a causal language model, or peft's adapters for one that is still there.

    'packed' is our own decoder for Qwen3 and Llama, 'transformers' any architecture, slower; 'auto' takes the first that can.
    Raises ValueError for anything else.
    """
    folder = Path(folder)
    if (folder / ADAPTER_CONFIG).is_file():
        load = partial(load_policy, dtype=dtype, device=device, implementation=implementation)
        return load_adapted(folder, load)
    if not _is_packed(folder, implementation):
        from compactionrl.models.hugging_face import load_language_model

        return load_language_model(folder, dtype, device)
    model = Transformer(_read_config(folder, "ForCausalLM"))
    return _load(model, folder, device).to(dtype=dtype)


def save_policy(model: Policy, folder: str | Path) -> None:
    """Write a folder that `AutoModelForCausalLM.from_pretrained` loads, adapters merged. The folder is created."""
    if isinstance(model, Transformer):
        _save(model, Path(folder), model.config.to_hf())
        return
    from compactionrl.models.hugging_face import HuggingFacePolicy, save_language_model

    assert isinstance(model, HuggingFacePolicy)
    save_language_model(model, Path(folder))


def load_critic(
    folder: str | Path, *, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> Critic:
    """The critic that `save_critic` wrote. A new one is made from a policy instead: `Critic(load_policy(folder))`."""
    folder = Path(folder)
    if (folder / VALUE_HEAD).is_file():
        from compactionrl.models.hugging_face import load_value_model

        return load_value_model(folder, dtype, device)
    critic = Critic(Transformer(_read_config(folder, "ForTokenClassification")))
    _load(critic, folder, device).model.to(dtype=dtype)
    critic.score.to(dtype=torch.promote_types(dtype, torch.float32))
    return critic


def save_critic(critic: Critic, folder: str | Path) -> None:
    """Write a folder of `transformers`. The folder is created.

    Of our decoder: what `AutoModelForTokenClassification.from_pretrained` loads, with one label, the value. Of another, for
    which there may be no token classifier: what `AutoModel.from_pretrained` loads, and the value head in a file of its own.
    """
    if not isinstance(critic.config, ModelConfig):
        from compactionrl.models.hugging_face import save_value_model

        save_value_model(critic, Path(folder))
        return
    architecture = critic.config.architecture.replace("ForCausalLM", "ForTokenClassification")
    labels = {"id2label": {"0": "value"}, "label2id": {"value": 0}}
    _save(critic, Path(folder), critic.config.to_hf(architecture) | labels)


def _is_packed(folder: Path, implementation: Implementation) -> bool:
    if implementation != "auto":
        return implementation == "packed"
    try:
        _read_config(folder, "ForCausalLM")
    except UnsupportedModel:
        return False
    return True


def _read_config(folder: Path, suffix: str) -> ModelConfig:
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist: expected a Hugging Face model folder")
    config = json.loads(path.read_text())
    try:
        parsed = ModelConfig.from_hf(config)
    except KeyError as error:
        raise ValueError(f"{path} lacks the entry {error}") from None
    if not config["architectures"][0].endswith(suffix):
        raise ValueError(f"{folder} holds a {config['architectures'][0]}, expected one that ends in {suffix}")
    return parsed


def _load(model: Model, folder: Path, device: str | torch.device) -> Model:
    try:
        result = model.load_state_dict(_read_tensors(folder), strict=False)
    except SafetensorError as error:
        raise ValueError(f"{folder}: a weights file is damaged: {error}") from error
    except RuntimeError as error:
        raise ValueError(f"{folder}: the weights have other shapes than its config.json says: {error}") from error
    tied = _tied(model)
    missing, unexpected = set(result.missing_keys) - tied, set(result.unexpected_keys) - tied
    if missing or unexpected:
        raise ValueError(f"{folder}: missing tensors {sorted(missing)}, unexpected tensors {sorted(unexpected)}")
    return model.to(device=device)


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    if (folder / WEIGHTS).is_file():
        return load_file(folder / WEIGHTS)
    if not (folder / INDEX).is_file():
        raise FileNotFoundError(f"{folder} has no {WEIGHTS} and no {INDEX}: only safetensors are loaded, never pickles")
    shards = sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
    return {name: tensor for shard in shards for name, tensor in load_file(folder / shard).items()}


def _save(model: Transformer | Critic, folder: Path, config: dict[str, object]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    skipped = _tied(model)
    tensors = {name: t.detach().cpu().contiguous() for name, t in merged_state(model).items() if name not in skipped}
    save_tensors(tensors, folder / WEIGHTS)
    config.pop("torch_dtype", None)  # the older name of dtype
    config["dtype"] = str(next(model.parameters()).dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _tied(model: Transformer | Critic) -> set[str]:
    assert isinstance(model.config, ModelConfig)
    return {TIED} if model.config.tie_word_embeddings else set()
