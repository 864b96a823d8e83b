"""A dense decoder, Qwen3 or Llama, over packed windows or a key-value cache.

Why a class of our own: the trainer runs many windows of different lengths as one packed row, and the sampler owns every
row of its key-value cache (extend, cut back, reset). The classes of `transformers` offer neither on CPU at this speed.
Parameter names and shapes are Hugging Face's, so checkpoints are exchanged with no conversion, and the tests hold
outputs and gradients to those of `transformers`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from compactionrl.models.config import ModelConfig
from compactionrl.models.kv_cache import KVCache
from compactionrl.models.packing import PackedAttention
from compactionrl.models.policy import Backbone, Policy

Attention = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, query [N, heads, head_dim], key and value [N, kv_heads, head_dim]) -> [N, heads, head_dim]."""


class Rotation(NamedTuple):
    """Cosines and sines of the RoPE angles, each [N, 1, head_dim / 2]."""

    cos: Tensor
    sin: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """Rotate x [N, heads, head_dim]; dimension i pairs with i + head_dim / 2."""
        first, second = x.chunk(2, dim=-1)
        return torch.cat(
            (
                torch.addcmul(first * self.cos, second, self.sin, value=-1),
                torch.addcmul(second * self.cos, first, self.sin),
            ),
            dim=-1,
        )


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class SelfAttention(nn.Module):
    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        query_size = config.num_attention_heads * config.head_dim
        key_size = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query_size, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, key_size, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, key_size, bias=config.attention_bias)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=config.attention_bias)
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.qk_norm = config.qk_norm

    def forward(self, x: Tensor, rotate: Rotation, attention: Attention) -> Tensor:
        query, key, value = (
            projection(x).unflatten(-1, (-1, self.head_dim)) for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.qk_norm:
            query, key = self.q_norm(query), self.k_norm(key)
        return self.o_proj(attention(self.layer, rotate(query), rotate(key), value).flatten(-2))


class MLP(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.self_attn = SelfAttention(config, layer)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, rotate: Rotation, attention: Attention) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotate, attention)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(Backbone):
    """Embedding, blocks and final norm."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.checkpointing = False
        # No buffer: `.to(bfloat16)` would round it.
        self.inverse_frequencies = config.inverse_frequencies()

    def forward(self, token_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Hidden states [N, hidden_size] of tokens [N] at `positions` [N]; `attention` says what each one sees."""
        x = self.embed_tokens(token_ids)
        rotate = self.rotation(positions, x.dtype)
        for block in self.layers:
            if self.checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, rotate, attention, use_reentrant=False, preserve_rng_state=False)
            else:
                x = block(x, rotate, attention)
        return self.norm(x)

    def checkpoint_gradients(self, on: bool) -> None:
        self.checkpointing = on

    def rotation(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        self.inverse_frequencies = self.inverse_frequencies.to(positions.device)
        angles = (positions[:, None].float() * self.inverse_frequencies)[:, None]
        return Rotation(angles.cos().to(dtype), angles.sin().to(dtype))

    def packed(self, token_ids: Tensor, lengths: Sequence[int]) -> Tensor:
        attention = PackedAttention.over(token_ids.shape[0], lengths)
        return self(token_ids, attention.positions.to(token_ids.device), attention)


class Transformer(Policy):
    implementation: ClassVar[Literal["packed"]] = "packed"
    config: ModelConfig
    model: Decoder

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.apply(self._initialise)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def _initialise(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=self.config.initializer_range)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    @property
    def head_weight(self) -> Tensor:
        return self.lm_head.weight

    def cache(self, max_rows: int, max_tokens: int) -> KVCache:
        return KVCache(self.model, max_rows, max_tokens)
