"""The shape of a decoder, as Hugging Face's `config.json` gives it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

MODEL_TYPES = {"Qwen3ForCausalLM": "qwen3", "LlamaForCausalLM": "llama"}
ROPE_TYPES = ("default", "llama3")


class UnsupportedModel(ValueError):
    """A model that this package's own decoder would compute differently."""


@dataclass(frozen=True)
class ModelConfig:
    """A dense Qwen3 or Llama decoder; the field names are Hugging Face's.

    `architecture` decides about query-key normalisation (Qwen3 has it, Llama has not). `rope` holds `rope_type` and
    `rope_theta`, for `llama3` also its four scaling factors. `source` is the `config.json` that this was read from:
    what is not modelled here (token ids of begin and end, ...) is written back untouched.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int = 32768
    rms_norm_eps: float = 1e-6
    rope: Mapping[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10_000.0})
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    initializer_range: float = 0.02
    source: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.architecture not in MODEL_TYPES:
            raise ValueError(f"architecture {self.architecture!r} is not supported; use {' or '.join(MODEL_TYPES)}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"{self.num_attention_heads} attention heads do not divide among {self.num_key_value_heads} key-value heads"
            )
        rope_type = self.rope.get("rope_type")
        if rope_type not in ROPE_TYPES:
            raise UnsupportedModel(f"rope type {rope_type!r} is not supported; use {' or '.join(ROPE_TYPES)}")
        if self.mlp_bias and not self.has_mlp_bias_option:
            raise ValueError("Qwen3 has no mlp_bias")

    @property
    def qk_norm(self) -> bool:
        return self.architecture == "Qwen3ForCausalLM"

    @property
    def has_mlp_bias_option(self) -> bool:
        return self.architecture == "LlamaForCausalLM"

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Read a parsed `config.json`; raises UnsupportedModel for what this decoder would compute differently."""
        architecture = _architecture(config)
        _refuse_unsupported(config)
        heads = config["num_attention_heads"]
        optional = {
            name: config[name]
            for name in ("rms_norm_eps", "tie_word_embeddings", "attention_bias", "mlp_bias", "initializer_range")
            if name in config and (name != "mlp_bias" or architecture == "LlamaForCausalLM")
        }
        return cls(
            architecture=architecture,
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_hidden_layers=config["num_hidden_layers"],
            num_attention_heads=heads,
            num_key_value_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or _default_head_dim(config, architecture),
            max_position_embeddings=config["max_position_embeddings"],
            rope=_rope(config),
            source=dict(config),
            **optional,
        )

    def to_hf(self, architecture: str | None = None) -> dict[str, Any]:
        """The `config.json` of this model, for `architecture` (default: its own)."""
        config = dict(self.source) | {
            "architectures": [architecture or self.architecture],
            "model_type": MODEL_TYPES[self.architecture],
            "hidden_act": "silu",
            "rope_parameters": dict(self.rope),
        }
        names = [
            "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings",
            "attention_bias", "initializer_range",
        ]  # fmt: skip
        if self.has_mlp_bias_option:
            names.append("mlp_bias")
        return config | {name: getattr(self, name) for name in names}

    def inverse_frequencies(self) -> torch.Tensor:
        """RoPE angles per position [head_dim / 2], fp32; `llama3` stretches the long wavelengths (Llama 3.1)."""
        exponent = torch.arange(0, self.head_dim, 2, dtype=torch.float32) / self.head_dim
        frequencies = 1.0 / (self.rope["rope_theta"] ** exponent)
        if self.rope["rope_type"] == "default":
            return frequencies
        factor, low, high = (self.rope[name] for name in ("factor", "low_freq_factor", "high_freq_factor"))
        wavelength = 2 * math.pi / frequencies
        smooth = (self.rope["original_max_position_embeddings"] / wavelength - low) / (high - low)
        smooth = smooth.clamp(0.0, 1.0)
        return (1 - smooth) * frequencies / factor + smooth * frequencies


def _architecture(config: Mapping[str, Any]) -> str:
    """The causal language model's architecture, also when the folder holds a token classifier (a critic)."""
    names = config.get("architectures") or []
    causal = [name.replace("ForTokenClassification", "ForCausalLM") for name in names]
    if len(causal) != 1 or causal[0] not in MODEL_TYPES:
        raise UnsupportedModel(f"config.json says architectures = {names}; supported: {', '.join(MODEL_TYPES)}")
    return causal[0]


def _default_head_dim(config: Mapping[str, Any], architecture: str) -> int:
    # Qwen3 does not derive its head size from the hidden size, Llama does.
    return 128 if architecture == "Qwen3ForCausalLM" else config["hidden_size"] // config["num_attention_heads"]


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """One dict from transformers 5's `rope_parameters` or the older `rope_theta` and `rope_scaling`."""
    rope = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    rope["rope_type"] = rope.get("rope_type") or rope.pop("type", None) or "default"
    rope.setdefault("rope_theta", config.get("rope_theta", 10_000.0))
    if rope["rope_type"] == "llama3":
        rope.setdefault("original_max_position_embeddings", config["max_position_embeddings"])
    return rope


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    checks = {
        "hidden_act": config.get("hidden_act", "silu") != "silu",
        "use_sliding_window": bool(config.get("use_sliding_window")),
        "layer_types": any(kind != "full_attention" for kind in config.get("layer_types") or []),
        "quantization_config": config.get("quantization_config") is not None,
        "partial_rotary_factor": (rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1) != 1,
    }
    for name, unsupported in checks.items():
        if unsupported:
            raise UnsupportedModel(
                f"config.json sets {name} = {config.get(name, rope.get(name))!r}, which is not supported"
            )
