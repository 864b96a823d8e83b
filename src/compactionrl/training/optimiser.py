"""Adam with a gradient clip and a guard against updates that are not finite; in float32, whatever the model computes in.

A bfloat16 weight keeps 8 bits: it would swallow an update below 1/256 of itself, and so would a bfloat16 sum of the
gradients of many micro-batches. Such a parameter has a *master* copy in float32, on which gradients are summed, clipped
and applied by Adam; the model gets the master, rounded. A float32 or float64 parameter is its own master.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from compactionrl.config import TrainConfig

STATE = ("step", "exp_avg", "exp_avg_sq")
"""What Adam keeps for each parameter."""
MASTER = "master"


class TrainingError(RuntimeError):
    """Training cannot go on. The message says what to do."""


class Optimiser:
    """One model's updates. `bad` counts the updates skipped in a row because loss or gradient was not finite."""

    def __init__(self, name: Literal["policy", "critic"], model: nn.Module, config: TrainConfig) -> None:
        self.name = name
        self.parameters = {key: p for key, p in model.named_parameters() if p.requires_grad}
        lr = config.policy_lr if name == "policy" else config.critic_lr
        self.masters = {key: master(p) for key, p in self.parameters.items()}
        self.rounded = [(p, self.masters[key]) for key, p in self.parameters.items() if p is not self.masters[key]]
        for p, wide in self.rounded:
            p.register_post_accumulate_grad_hook(partial(move_gradient, wide))
        self.adam = torch.optim.Adam(self.masters.values(), lr=lr)
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
        norm = float(nn.utils.clip_grad_norm_(self.masters.values(), self.max_grad_norm))
        finite = math.isfinite(total) and math.isfinite(norm)
        if finite:
            self.adam.step()
            self.write_back()
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

    @torch.no_grad()
    def write_back(self) -> None:
        """Give the model its masters, rounded."""
        for p, wide in self.rounded:
            p.copy_(wide)

    def tensors(self) -> dict[str, Tensor]:
        """Adam's state and the masters, "<parameter>.<name>" to tensor; empty before the first update.

        (Until then a master holds its parameter's value, exactly.)
        """
        found: dict[str, Tensor] = {}
        for key, wide in self.masters.items():
            if state := self.adam.state.get(wide):
                found |= {f"{key}.{name}": state[name] for name in STATE}
                if wide is not self.parameters[key]:
                    found[f"{key}.{MASTER}"] = wide.detach()
        return found

    @torch.no_grad()
    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Take over what `tensors` gave. Raises ValueError for another model's state."""
        state = {}
        for number, (key, wide) in enumerate(self.masters.items()):
            if f"{key}.step" not in tensors:
                continue
            state[number] = {name: tensors.pop(f"{key}.{name}") for name in STATE}
            if state[number]["exp_avg"].shape != wide.shape:
                raise ValueError(f"the {self.name}'s optimiser state of {key} belongs to another model")
            if wide is not self.parameters[key]:
                if f"{key}.{MASTER}" not in tensors:
                    raise ValueError(
                        f"the {self.name}'s optimiser state has no {MASTER} of {key}: was model.dtype changed?"
                    )
                wide.copy_(tensors.pop(f"{key}.{MASTER}"))
        if tensors:
            raise ValueError(f"the {self.name}'s optimiser state has unknown parameters: {sorted(tensors)}")
        self.adam.load_state_dict(self.adam.state_dict() | {"state": state})
        self.write_back()


def master(p: nn.Parameter) -> Tensor:
    """The tensor that Adam updates for `p`: a float32 copy, or `p` itself where that is not narrower."""
    if torch.promote_types(p.dtype, torch.float32) == p.dtype:
        return p
    return p.detach().float().requires_grad_()


def move_gradient(wide: Tensor, p: Tensor) -> None:
    """Add the gradient of one micro-batch to the master's, and free it."""
    assert p.grad is not None
    if wide.grad is None:
        wide.grad = p.grad.float()
    else:
        wide.grad += p.grad
    p.grad = None
