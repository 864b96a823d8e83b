"""The critic (paper (V)): a decoder with a scalar head at every position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from compactionrl.models.policy import Policy

VALUE_HEAD = "value_head.safetensors"
"""The file of a value head that is stored apart from its decoder."""

Trunk = Literal["own", "frozen", "shared"]


class Critic(nn.Module):
    """A value head on the decoder of `policy`.

    `trunk` says whose that decoder is. 'own': the critic takes it over (the same modules, no copy; the language-model
    head is dropped) and trains it. 'frozen': it takes it over, but only the value head is trained. 'shared': it stays the
    policy's, is no part of this module, and is read as it is at the time.

    The value head starts at zero, so the first advantages are the plain returns. It is called `score`, as in Hugging
    Face's token classifiers with one label, which is what a saved critic is, and is at least float32: in bfloat16 a value
    would have two digits.
    """

    def __init__(self, policy: Policy, trunk: Trunk = "own") -> None:
        super().__init__()
        self.config = policy.config
        self.trunk = trunk
        if trunk == "shared":
            object.__setattr__(self, "model", policy.model)  # unknown to nn.Module: no parameter of the critic
        else:
            self.model = policy.model
        if trunk == "frozen":
            self.model.requires_grad_(False)
        weight = next(policy.model.parameters())
        precision = torch.promote_types(weight.dtype, torch.float32)
        self.score = nn.Linear(policy.config.hidden_size, 1, device=weight.device, dtype=precision)
        nn.init.zeros_(self.score.weight)
        nn.init.zeros_(self.score.bias)

    def forward(self, token_ids: Tensor, lengths: Sequence[int]) -> Tensor:
        """Values [N] of packed windows, shaped as in `Policy.forward`.

        Value t has seen the tokens up to and including t, so V(x_i) is found at the position before token i.
        """
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.trunk == "own"):
            hidden = self.model.packed(token_ids, lengths)
        return self.score(hidden.to(self.score.weight.dtype)).squeeze(-1)

    def checkpoint_gradients(self, on: bool) -> None:
        """See `Backbone.checkpoint_gradients`."""
        self.model.checkpoint_gradients(on)
