"""What trainer and sampler need of a causal language model, whoever computes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal, NamedTuple, Protocol

from torch import Tensor, nn


class Sizes(Protocol):
    """A policy's configuration, as far as others read it; the names are Hugging Face's."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def max_position_embeddings(self) -> int: ...


class Chunk(NamedTuple):
    """`length` new tokens of `row`, of which `start` tokens are kept."""

    row: int
    start: int
    length: int


class Cache(Protocol):
    """What a policy remembers of the rows that it is sampled from. Who owns a row, and what it holds, is for the caller."""

    @property
    def cuttable(self) -> bool:
        """Whether a chunk may start before the end of what its row holds; if not, only there or at 0."""
        ...

    def forward(self, token_ids: Tensor, chunks: Sequence[Chunk]) -> Tensor:
        """Hidden states [N, hidden_size] of the chunks' tokens [N], laid end to end: single tokens first, by row.

        A chunk sees its row up to its own end; what the row held from `start` on is forgotten. `start` 0 begins it anew.
        """
        ...


class Backbone(nn.Module):
    """A language model below its head: what Hugging Face calls the base model."""

    def packed(self, token_ids: Tensor, lengths: Sequence[int]) -> Tensor:
        """Hidden states [N, hidden_size] of windows laid end to end; see `Policy.forward`."""
        raise NotImplementedError

    def checkpoint_gradients(self, on: bool) -> None:
        """Whether the backward pass computes each block's activations again instead of keeping them."""
        raise NotImplementedError


class Policy(nn.Module):
    """A causal language model without its loss: hidden states out, the head's weight beside them."""

    implementation: ClassVar[Literal["packed", "transformers"]]
    config: Sizes
    model: Backbone

    @property
    def head_weight(self) -> Tensor:
        """[vocab_size, hidden_size]: logits are `hidden @ head_weight.T`."""
        raise NotImplementedError

    def cache(self, max_rows: int, max_tokens: int) -> Cache:
        """Room to sample `max_rows` sequences of at most `max_tokens` tokens."""
        raise NotImplementedError

    def forward(self, token_ids: Tensor, lengths: Sequence[int]) -> Tensor:
        """Hidden states after the final norm [N, hidden_size] of packed windows.

        `token_ids` [N] holds the windows end to end, `lengths` their token counts (sum N). Positions restart with every
        window, and attention is causal and never leaves it.
        """
        return self.model.packed(token_ids, lengths)

    def checkpoint_gradients(self, on: bool) -> None:
        """See `Backbone.checkpoint_gradients`."""
        self.model.checkpoint_gradients(on)
