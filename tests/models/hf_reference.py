"""Small random models of `transformers`, the reference for ours."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
VARIANTS = {
    "qwen3 tied": {"architecture": "qwen3", "tie_word_embeddings": True},
    "qwen3 untied, wide heads, bias": {"architecture": "qwen3", "head_dim": 16, "attention_bias": True},
    "llama untied": {"architecture": "llama"},
    "llama tied, llama3 rope, biases": {
        "architecture": "llama", "tie_word_embeddings": True, "rope_parameters": LLAMA3_ROPE, "attention_bias": True,
        "mlp_bias": True,
    },
    "llama without grouped queries": {"architecture": "llama", "num_key_value_heads": 4},
}  # fmt: skip


def reference(architecture: str = "qwen3", seed: int = 0, **overrides: object) -> PreTrainedModel:
    """A random fp32 model with every parameter away from its initial value, so that no term can hide."""
    shape = {
        "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512, "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
    } | overrides  # fmt: skip
    torch.manual_seed(seed)
    if architecture == "qwen3":
        model: PreTrainedModel = Qwen3ForCausalLM(Qwen3Config(**shape))
    else:
        model = LlamaForCausalLM(LlamaConfig(**shape))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.eval()
