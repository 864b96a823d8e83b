"""The architectures of GLM-4.5, GLM-4.7-Flash and GLM-5 in miniature, and Qwen3: all that they have, random weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    Glm4MoeLiteConfig,
    Glm4MoeLiteForCausalLM,
    GlmMoeDsaConfig,
    GlmMoeDsaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 512, "initializer_range": 0.1, "pad_token_id": None, "bos_token_id": None,
    "eos_token_id": None,
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}  # fmt: skip
DENSE_FIRST: dict[str, Any] = {"mlp_layer_types": ["dense", "sparse"]}
INDEXER: dict[str, Any] = {
    "index_topk": 24,
    "index_head_dim": 16,
    "index_n_heads": 16,
    "indexer_types": ["full", "shared"],
}
"""Windows longer than 24 tokens are attended to in part, by what the first layer's indexer picks. With few heads its scores,
sums of what ReLU leaves, are often exactly zero, and which of two equal ones is picked depends on the window's length."""


def glm4_moe(vocabulary: int) -> PreTrainedModel:
    """GLM-4.5: half of each head rotated, query-key norm, the first layer dense."""
    options: dict[str, Any] = {
        "num_key_value_heads": 2,
        "head_dim": 16,
        "first_k_dense_replace": 1,
        "use_qk_norm": True,
        "num_mtp_layers": 0,
    }
    return Glm4MoeForCausalLM(Glm4MoeConfig(vocab_size=vocabulary, **SIZES, **EXPERTS, **options))


def glm4_moe_lite(vocabulary: int) -> PreTrainedModel:
    """GLM-4.7-Flash: multi-head latent attention."""
    return Glm4MoeLiteForCausalLM(Glm4MoeLiteConfig(vocab_size=vocabulary, **SIZES, **EXPERTS, **LATENT, **DENSE_FIRST))


def glm_moe_dsa(vocabulary: int) -> PreTrainedModel:
    """GLM-5: latent attention to what an indexer, shared by layers, picks."""
    options = {**SIZES, **EXPERTS, **LATENT, **DENSE_FIRST, **INDEXER}
    return GlmMoeDsaForCausalLM(GlmMoeDsaConfig(vocab_size=vocabulary, **options))


def qwen3(vocabulary: int) -> PreTrainedModel:
    options: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": True}
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=vocabulary, **SIZES, **options))


ARCHITECTURES: dict[str, Callable[[int], PreTrainedModel]] = {
    "glm4_moe": glm4_moe,
    "glm4_moe_lite": glm4_moe_lite,
    "glm_moe_dsa": glm_moe_dsa,
    "qwen3": qwen3,
}


def make_model(architecture: str, vocabulary: int, folder: Path) -> PreTrainedModel:
    """Write a model folder. Every parameter is away from its initial value, so that no term can hide."""
    torch.manual_seed(0)
    return save_model(ARCHITECTURES[architecture](vocabulary), folder)


def save_model(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(folder)
    return model.eval()
