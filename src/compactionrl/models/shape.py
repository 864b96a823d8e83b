"""The sizes of a stored model, without loading it: its `config.json` and its tensors' shapes."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from compactionrl.models.tensors import tensor_shapes

FLOAT32 = 4
"""Bytes."""


@dataclass(frozen=True)
class Shape:
    """`config`: of the text model, as Hugging Face names things. `tensors`: the shape of every stored one."""

    config: dict[str, Any]
    tensors: dict[str, tuple[int, ...]]

    @classmethod
    def read(cls, folder: Path) -> Shape:
        """Of the model in `folder`. Raises FileNotFoundError if it has no weights, ValueError for an unknown architecture."""
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False).get_text_config()
        if not (tensors := tensor_shapes(folder)):
            raise FileNotFoundError(f"{folder} has no safetensors: only those are loaded, never pickles")
        common = {
            name: getattr(config, their) for name, their in config.attribute_map.items() if hasattr(config, their)
        }
        return cls(common | config.to_dict(), tensors)

    @property
    def parameters(self) -> int:
        return sum(map(prod, self.tensors.values()))

    @property
    def head(self) -> int:
        """Parameters of a language-model head that is not the embedding; a critic has none."""
        return prod(self.tensors.get("lm_head.weight", (0,)))

    @property
    def hidden(self) -> int:
        return self.config["hidden_size"]

    @property
    def vocabulary(self) -> int:
        return self.config["vocab_size"]

    @property
    def layers(self) -> int:
        return self.config["num_hidden_layers"]

    @property
    def heads(self) -> int:
        """Of the queries; what has no attention counts as one as wide as the model."""
        return self.config.get("num_attention_heads") or 1

    @property
    def query(self) -> int:
        """Width of all query heads of a token together."""
        return self.heads * self.head_dim

    @property
    def key(self) -> int:
        """Width of all key heads together; the values' is taken to be the same."""
        return (self.config.get("num_key_value_heads") or self.heads) * self.head_dim

    @property
    def head_dim(self) -> int:
        return self.config.get("head_dim") or self.hidden // self.heads

    @property
    def mlp(self) -> int:
        """Width of a token's way through the MLP, that of its experts together where there are some."""
        c = self.config
        experts = (c.get("num_experts_per_tok") or 0) + (c.get("n_shared_experts") or 0)
        return max(c.get("intermediate_size") or 4 * self.hidden, experts * (c.get("moe_intermediate_size") or 0))

    def adapters(self, rank: int, targets: list[str]) -> int:
        """Parameters of low-rank adapters on the linear layers [out, in] of that name in the blocks; none named: on all."""
        total = 0
        for name, shape in self.tensors.items():
            *path, layer, kind = name.split(".")
            inside = (
                any(part.isdecimal() for part in path) and "experts" not in path
            )  # those are stacked, not linear layers
            linear = kind == "weight" and len(shape) == 2 and inside
            if linear and (not targets or layer in targets):
                total += rank * sum(shape)
        return total

    def cache(self, rows: int, tokens: int, size: int) -> int:
        """Bytes of the keys and values of so many rows, in elements of `size` bytes."""
        return rows * tokens * self.layers * 2 * self.key * size

    def activations(self, tokens: int, size: int, *, recomputed: bool = False, frozen: bool = False) -> int:
        """Bytes of an update of `tokens` tokens beside weights and their gradients, in elements of `size` bytes.

        An estimate, of our own decoder. Kept for the backward pass, per token and block: six vectors around the two norms;
        query, key, value, and the attention's result twice; with QK-norm query and key before it and within; four vectors of
        the MLP's width. What a norm reads is kept in float32; `frozen`: what its weight is multiplied with is not kept.
        `recomputed`: of all blocks only the input, of one all. Then the gradients within one block, about a vector for each
        of the MLP's and of the norms', and three vectors around the last norm.
        """
        normed = self.query + self.key if any("q_norm" in name for name in self.tensors) else 0
        block = 6 * self.hidden + 3 * self.query + 2 * self.key + 2 * normed + 4 * self.mlp
        block -= (2 * self.hidden + normed) * frozen
        block = size * block + max(FLOAT32 - size, 0) * (2 * self.hidden + normed)
        kept = self.layers * self.hidden * size + block if recomputed else self.layers * block
        return tokens * (kept + (4 * self.mlp + 7 * self.hidden) * size)
