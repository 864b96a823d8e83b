"""Policy and critic, always as a pair from the same base: new ones, stored ones, whatever of them is trained.

| trained                | in memory                                            | in a checkpoint                                |
|------------------------|------------------------------------------------------|------------------------------------------------|
| all weights            | two models                                           | policy/ and critic/, whole models              |
| adapters (`[lora]`)    | one frozen base, and adapters for each               | policy/ and critic/, peft's adapter folders    |
| the critic's head only | its trunk besides, unless it is 'shared' or the      | policy/ as above, value_head.safetensors       |
|                        | frozen base of an adapted policy                     |                                                |
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from compactionrl.config import Config, ConfigError
from compactionrl.models import Critic, Policy, load_critic, load_policy, save_critic, save_policy
from compactionrl.models.critic import VALUE_HEAD
from compactionrl.models.lora import ADAPTER_CONFIG, add_adapters, is_adapted, load_adapters, save_adapters, share
from compactionrl.models.tensors import save_tensors

Pair = tuple[Policy, Critic | None]
Options = dict[str, Any]
"""Of `load_policy`."""


def new_pair(config: Config, base: Path, device: torch.device | str) -> Pair:
    """The beginning: policy and critic from `base`. Raises ConfigError if that holds none that can be trained."""
    if (base / ADAPTER_CONFIG).is_file():
        raise ConfigError(f"model.path: {base} holds adapters; make an ordinary model of it first: compactionrl merge")
    try:
        return build_pair(config, base, device)
    except ConfigError:
        raise
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: no policy can be loaded from {base}: {error}") from error


def build_pair(config: Config, base: Path, device: torch.device | str, stored: Path | None = None) -> Pair:
    """The pair that `save_pair` wrote to `stored`; without that, a new one. `base`: where the run began."""
    c = config.model
    options = {"dtype": getattr(torch, c.dtype), "device": device, "implementation": c.implementation}
    build = adapted_pair if config.lora.rank else whole_pair
    policy, critic = build(config, options, base, stored)
    if critic is not None and critic.trunk != "own" and stored is not None:
        critic.score.load_state_dict(load_file(stored / VALUE_HEAD))
    for model in (policy, critic):
        if model is not None:
            model.checkpoint_gradients(config.train.gradient_checkpointing)
    return policy, critic


def whole_pair(config: Config, options: Options, base: Path, stored: Path | None) -> Pair:
    """All weights are trained: two models, but for a critic that reads the policy's hidden states."""
    policy = load_policy(stored / "policy" if stored else base, **options)
    trunk = config.train.critic_trunk
    if config.train.estimator == "group":
        return policy, None
    if trunk == "own" and stored:
        return policy, load_critic(stored / "critic", dtype=options["dtype"], device=options["device"])
    return policy, Critic(policy if trunk == "shared" else load_policy(base, **options), trunk)


def adapted_pair(config: Config, options: Options, base: Path, stored: Path | None) -> Pair:
    """Adapters are trained: one frozen base in memory, for policy and critic."""
    policy, critic = load_policy(base, **options), None
    if config.train.estimator != "group":
        trunk = config.train.critic_trunk
        critic = Critic(policy if trunk == "shared" else share(policy), trunk)
    for name, model in {"policy": policy, "critic": critic}.items():
        if model is None or (model is critic and critic.trunk != "own"):
            continue
        if stored:
            load_adapters(model, stored / name)
        else:
            add_adapters(model, config.lora, seed=config.run.seed)
    return policy, critic


def save_pair(policy: Policy, critic: Critic | None, folder: Path, base: Path) -> None:
    """Write what is trained of both into `folder`. An adapter folder names `base` as what it belongs on."""
    if is_adapted(policy):
        save_adapters(policy, folder / "policy", base)
    else:
        save_policy(policy, folder / "policy")
    if critic is None:
        return
    if critic.trunk != "own":
        save_tensors(critic.score.state_dict(), folder / VALUE_HEAD)
    elif is_adapted(critic):
        save_adapters(critic, folder / "critic", base)
    else:
        save_critic(critic, folder / "critic")
