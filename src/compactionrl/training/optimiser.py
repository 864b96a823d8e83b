"""Adam with a gradient clip and a guard against updates that are not finite."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor, nn

from compactionrl.config import TrainConfig

STATE = ("step", "exp_avg", "exp_avg_sq")
"""What Adam keeps for each parameter."""


class TrainingError(RuntimeError):
    """Training cannot go on. The message says what to do."""


class Optimiser:
    """One model's updates. `bad` counts the updates skipped in a row because loss or gradient was not finite."""

    def __init__(self, name: Literal["policy", "critic"], model: nn.Module, config: TrainConfig) -> None:
        self.name = name
        self.parameters = {key: p for key, p in model.named_parameters() if p.requires_grad}
        lr = config.policy_lr if name == "policy" else config.critic_lr
        self.adam = torch.optim.Adam(self.parameters.values(), lr=lr)
        self.max_grad_norm = config.max_grad_norm
        self.max_bad_updates = config.max_bad_updates
        self.bad = 0

    def update(self, losses: Iterable[Tensor]) -> dict[str, float]:
        """One update on the sum of `losses`, which are made, and differentiated, one at a time.

        A loss or a gradient that is not finite leaves weights and optimiser untouched. Raises TrainingError when
        that happens `max_bad_updates` times in a row.
        """
        self.adam.zero_grad()
        total = 0.0
        for loss in losses:
            loss.backward()
            total += float(loss.detach())
        norm = float(nn.utils.clip_grad_norm_(self.parameters.values(), self.max_grad_norm))
        finite = math.isfinite(total) and math.isfinite(norm)
        if finite:
            self.adam.step()
        self.adam.zero_grad()
        self.bad = 0 if finite else self.bad + 1
        if self.bad >= self.max_bad_updates:
            raise TrainingError(
                f"{self.bad} {self.name} updates in a row were not finite (loss {total}, gradient norm {norm}): look at the "
                f"latest rollout files; the last checkpoint is untouched: start a new run, with its policy folder as "
                f"model.path if it is good, and a lower train.{self.name}_lr"
            )
        skipped = {f"{self.name}/skipped": float(not finite)}
        return skipped | ({f"{self.name}/loss": total, f"{self.name}/grad_norm": norm} if finite else {})

    def tensors(self) -> dict[str, Tensor]:
        """Adam's state, "<parameter>.<name>" to tensor; empty before the first update."""
        states = ((key, self.adam.state.get(p, {})) for key, p in self.parameters.items())
        return {f"{key}.{name}": state[name] for key, state in states for name in STATE if name in state}

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Take over what `tensors` gave. Raises ValueError for another model's state."""
        state = {}
        for number, (key, p) in enumerate(self.parameters.items()):
            if f"{key}.step" in tensors:
                state[number] = {name: tensors.pop(f"{key}.{name}") for name in STATE}
                if state[number]["exp_avg"].shape != p.shape:
                    raise ValueError(f"the {self.name}'s optimiser state of {key} belongs to another model")
        if tensors:
            raise ValueError(f"the {self.name}'s optimiser state has unknown parameters: {sorted(tensors)}")
        self.adam.load_state_dict(self.adam.state_dict() | {"state": state})
