"""The critic (paper (V)): a decoder of its own with a scalar head at every position."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from compactionrl.models.transformer import Transformer


class Critic(nn.Module):
    """Takes over `trunk`'s decoder (the same modules, no copy) and drops its language-model head.

    The value head starts at zero, so the first advantages are the plain returns. It is called `score`, as in Hugging
    Face's token classifiers with one label, which is what a saved critic is.
    """

    def __init__(self, trunk: Transformer) -> None:
        super().__init__()
        self.config = trunk.config
        self.model = trunk.model
        weight = trunk.head_weight
        self.score = nn.Linear(trunk.config.hidden_size, 1, device=weight.device, dtype=weight.dtype)
        nn.init.zeros_(self.score.weight)
        nn.init.zeros_(self.score.bias)

    def forward(self, token_ids: Tensor, lengths: Sequence[int]) -> Tensor:
        """Values [N] of packed windows, shaped as in `Transformer.forward`.

        Value t has seen the tokens up to and including t, so V(x_i) is found at the position before token i.
        """
        return self.score(self.model.packed(token_ids, lengths)).squeeze(-1)
