"""The sampler of a run, and the weights that it samples from."""

from __future__ import annotations

import copy

import torch
from torch import nn

from compactionrl import build
from compactionrl.config import Config
from compactionrl.evaluation.modes import longest_window
from compactionrl.models import Policy
from compactionrl.samplers.protocol import Sampler, optional

SERVED = ("vllm", "sglang")
"""Samplers whose weights are elsewhere: they are sent between two updates."""


class Sampling:
    """Keeps a sampler at the latest weights of `policy`, which the learner trains in place.

    With `train.staleness`, rollouts go on while an update changes `policy`. What samples in this process then has a copy of
    all that is trained, renewed between two updates and, since all sampling takes place in the event loop, between two steps of
    the sampler: no token ever sees half of an update.
    """

    def __init__(self, config: Config, policy: Policy) -> None:
        self.config = config
        self.learned = policy
        doubled = config.train.staleness > 0 and config.sampling.sampler not in SERVED
        self.policy = second(policy) if doubled else policy
        self.sampler: Sampler = build.build_sampler(config, self.policy)
        self.version: int | None = None

    async def start(self) -> None:
        """Before the first request. Raises SamplerError for what cannot work."""
        await optional(self.sampler, "start", longest_window(self.config))

    async def close(self) -> None:
        """After the last one."""
        await optional(self.sampler, "close")

    async def current(self, version: int) -> Sampler:
        """The sampler with the present weights, those of `version`; not to be called during an update.

        Without staleness, a local one is new every time: what it cached, and how much room that took, must not differ between
        a resumed run and one that was never stopped.
        """
        if self.config.sampling.sampler == "local" and not self.config.train.staleness:
            self.sampler, self.version = build.build_sampler(self.config, self.policy), None
        if version != self.version:
            copy_trained(self.learned, self.policy)
            await optional(self.sampler, "weights_changed", version)
            self.version = version
        return self.sampler


def second(model: Policy) -> Policy:
    """A model of its own that shares what is not trained, such as the base of adapters."""
    frozen = {id(p): p for p in model.parameters() if not p.requires_grad}
    return copy.deepcopy(model, frozen)


@torch.no_grad()
def copy_trained(source: nn.Module, target: nn.Module) -> None:
    if source is not target:
        for p, q in zip(source.parameters(), target.parameters(), strict=True):
            if p.requires_grad:
                q.copy_(p)
