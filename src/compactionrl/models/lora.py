"""Low-rank adapters (Hu et al. 2021) through `peft`: a policy or critic of which only a few small matrices are trained.

A linear layer W of the base gets W + (alpha / rank) B A, with A random and B zero: the adapted model begins as the base,
exactly. The base is frozen, so one copy of it in memory serves policy and critic (`share`). On disk, adapters are
peft's own folders, which `peft.PeftModel.from_pretrained` loads on top of the base.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from compactionrl.config import ConfigError, LoraConfig
from compactionrl.models.critic import Critic
from compactionrl.models.tensors import save_tensors

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
NAME = ".default"
"""peft's name of the only set of adapters."""
PREFIX = "base_model.model."
"""Before every parameter's name in peft's files."""

Model = TypeVar("Model", bound=nn.Module)


def is_adapted(model: nn.Module) -> bool:
    return hasattr(model, "peft_config")


def share(model: Model) -> Model:
    """A second model over the very same parameters. What is then added to either is not part of the other."""
    memo: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, memo)


def linear_layers(model: nn.Module) -> list[str]:
    """The names, such as "q_proj", of the linear layers in the blocks of a policy or critic."""
    decoder = model.get_submodule("model")
    paths = [path.split(".") for path, module in decoder.named_modules() if isinstance(module, nn.Linear)]
    return sorted({path[-1] for path in paths if any(part.isdecimal() for part in path)})


def add_adapters(model: nn.Module, config: LoraConfig, *, seed: int = 0) -> None:
    """Adapt a policy or critic, in place: its base is frozen, its adapters (and a critic's value head) are trained.

    Raises ConfigError for an unknown layer in `config.targets`, and for a model without linear layers.
    """
    from peft import LoraConfig as Adapters
    from peft import TaskType

    known = linear_layers(model)
    if not known:
        raise ConfigError("lora: this model has no linear layers to adapt; train it whole, with lora.rank = 0")
    if unknown := sorted(set(config.targets) - set(known)):
        raise ConfigError(
            f"lora.targets: this model has no linear layer {', '.join(unknown)}; it has {', '.join(known)}"
        )
    critic = isinstance(model, Critic)
    torch.manual_seed(seed)
    inject(
        model,
        Adapters(
            task_type=TaskType.TOKEN_CLS if critic else TaskType.CAUSAL_LM,
            r=config.rank,
            lora_alpha=config.alpha,  # type: ignore[arg-type]
            target_modules=config.targets or known,
            modules_to_save=["score"] if critic else None,
        ),
    )


def inject(model: nn.Module, adapters: Any) -> None:
    """Put adapters of peft's configuration into `model`."""
    from peft import inject_adapter_in_model

    in_place = copy.copy(adapters)
    in_place.modules_to_save = None  # the value head stays what it is: ours to train and to store
    inject_adapter_in_model(in_place, model)
    model.peft_config = {"default": adapters}  # type: ignore[assignment]
    if isinstance(model, Critic):
        model.score.requires_grad_(True)


def save_adapters(model: nn.Module, folder: Path, base: Path) -> None:
    """Write an adapter folder of peft, for the model in `base`; a critic's value head is in it. The folder is created."""
    folder.mkdir(parents=True, exist_ok=True)
    trained = ((name, p) for name, p in model.named_parameters() if p.requires_grad)
    tensors = {PREFIX + name.replace(NAME, ""): p.detach().cpu().contiguous() for name, p in trained}
    save_tensors(tensors, folder / ADAPTER_WEIGHTS)
    adapters: Any = copy.copy(model.peft_config["default"])  # type: ignore[index]
    adapters.base_model_name_or_path = str(base.absolute())
    adapters.save_pretrained(folder)


def load_adapters(model: Model, folder: Path) -> Model:
    """Adapt a base, in place, with what `save_adapters` or peft wrote. Raises ValueError if it does not belong to it."""
    from peft import LoraConfig as Adapters

    adapters = Adapters.from_pretrained(str(folder))
    refuse_unsupported(folder, adapters)
    adapters.inference_mode = False  # to be trained
    inject(model, adapters)
    tensors = {}
    for name, tensor in load_file(folder / ADAPTER_WEIGHTS).items():
        path, _, kind = name.removeprefix(PREFIX).rpartition(".")
        tensors[f"{path}{NAME if '.lora_' in name else ''}.{kind}"] = tensor
    expected = {name for name, p in model.named_parameters() if p.requires_grad}
    if expected != tensors.keys():
        raise ValueError(f"{folder}: these adapters belong to another model: {sorted(expected ^ tensors.keys())[:4]}")
    try:
        model.load_state_dict(tensors, strict=False)
    except RuntimeError as error:
        raise ValueError(f"{folder}: these adapters belong to another model: {error}") from error
    return model


def refuse_unsupported(folder: Path, adapters: Any) -> None:
    """Raise ValueError for variants of LoRA that `merged_state` would compute differently."""
    plain = {"use_dora": False, "bias": "none", "lora_bias": False, "target_parameters": None}
    wrong = [name for name, value in plain.items() if getattr(adapters, name, value) != value]
    if adapters.peft_type != "LORA" or wrong:
        raise ValueError(f"{folder}: only plain LoRA adapters are supported; {', '.join(wrong) or adapters.peft_type}")


def load_adapted(folder: Path, load: Callable[[Path], Model]) -> Model:
    """The model in an adapter folder: its base, by `load`, and the adapters. Raises ValueError if the base is not there."""
    base = Path(json.loads((folder / ADAPTER_CONFIG).read_text()).get("base_model_name_or_path") or "")
    if not (base / "config.json").is_file():
        raise ValueError(
            f"{folder / ADAPTER_CONFIG}: base_model_name_or_path {str(base)!r} is no model folder here: "
            "put the base there, or enter where it is now"
        )
    return load_adapters(load(base), folder)


def merged_state(model: nn.Module) -> dict[str, Tensor]:
    """The state dict of the ordinary model that computes the same: adapters, if there are any, added to the weights."""
    state = model.state_dict()
    if not is_adapted(model):
        return state
    from peft.tuners.lora import LoraLayer

    state = {name.replace(".base_layer", ""): tensor for name, tensor in state.items() if ".lora_" not in name}
    for name, layer in model.named_modules():
        if isinstance(layer, LoraLayer):
            state[f"{name}.weight"] = merged_weight(layer)
    return state


@torch.no_grad()
def merged_weight(layer: Any) -> Tensor:
    """W + (alpha / rank) B A, summed in float32 or wider, rounded once."""
    weight, name = layer.base_layer.weight, NAME[1:]
    precision = torch.promote_types(weight.dtype, torch.float32)
    a, b = (factor[name].weight.to(precision) for factor in (layer.lora_A, layer.lora_B))
    return (weight.to(precision) + layer.scaling[name] * (b @ a)).to(weight.dtype)
