"""Any causal language model of `transformers`, in the shape that trainer and sampler need: slower, but of any architecture.

What is trained is what `transformers` itself gives a gradient: experts and routers of a mixture of experts, but not the
indexer of sparse attention, which it runs without gradients. An auxiliary loss that balances experts is not added: the loss
is the one of `method.losses`, and buffers such as the routers' correction bias stay as they are.

A discontinuous choice (the experts of a token, the keys of sparse attention) may fall otherwise where two scores are equal
to rounding: then even two plain forwards over different lengths differ, and so do sampler and trainer.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from transformers import AutoModel, AutoModelForCausalLM, DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import logging

from compactionrl.models.critic import VALUE_HEAD, Critic
from compactionrl.models.lora import merged_state
from compactionrl.models.packing import check_lengths
from compactionrl.models.policy import Backbone, Cache, Chunk, Policy
from compactionrl.models.tensors import save_tensors

PADDING = 0.25
"""Most of a batch that is padding: measured as faster than any window alone, and than all in one batch."""
ENLARGED = 100.0
"""Factor of the hidden states that probe a head: what bends or shifts logits shows there."""
ROUNDING = 1e-4
"""Most that float32 rounds, of the largest value: 30 layers of SmolLM2 leave 4e-6; Mamba, computed otherwise, differs by 4e-3."""


@dataclass(frozen=True)
class HuggingFaceSizes:
    vocab_size: int
    hidden_size: int
    max_position_embeddings: int
    """`sys.maxsize` where the architecture has no limit; fewer than it says where rotary angles switch on the way."""

    @classmethod
    def of(cls, model: PreTrainedModel) -> HuggingFaceSizes:
        config = model.config.get_text_config()
        positions = getattr(config, "max_position_embeddings", None)
        return cls(config.vocab_size, config.hidden_size, min([positions or sys.maxsize, *switches(config)]))


def switches(config: PreTrainedConfig) -> list[int]:
    """Lengths beyond which even a window's first tokens are rotated by other angles: not as a cache has rotated them."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope, *(kind for kind in rope.values() if isinstance(kind, dict))]  # some have one per type of layer
    return [kind["original_max_position_embeddings"] for kind in kinds if kind.get("rope_type") == "longrope"]


class HuggingFaceBackbone(Backbone):
    """A base model of `transformers`; parameters have the names that they have there."""

    base: PreTrainedModel

    def __init__(self, base: PreTrainedModel) -> None:
        super().__init__()
        adopt(self, base)
        object.__setattr__(self, "base", base)

    def packed(self, token_ids: Tensor, lengths: Sequence[int]) -> Tensor:
        """See `Policy.forward`. Windows of similar length are a batch, padded at the end: causality hides that from them."""
        check_lengths(token_ids.shape[0], lengths)
        windows = token_ids.split(list(lengths))
        hidden: dict[int, Tensor] = {}
        for batch in similar(lengths):
            padded = pad_sequence([windows[i] for i in batch], batch_first=True)
            states = self.base(input_ids=padded, use_cache=False).last_hidden_state.flatten(0, 1)
            sizes = [lengths[i] for i in batch]
            # Gathered at once: the gradient of slices would fill the whole batch for each window.
            real = [torch.arange(size) + row * padded.shape[1] for row, size in enumerate(sizes)]
            hidden |= zip(batch, states[torch.cat(real).to(states.device)].split(sizes), strict=True)
        return torch.cat([hidden[i] for i in range(len(windows))])

    def checkpoint_gradients(self, on: bool) -> None:
        """See `Backbone.checkpoint_gradients`. Raises ValueError for an architecture that cannot.

        The library's own switch needs training mode, in which dropout would make sampler and trainer differ.
        """
        blocks = [module for module in self.modules() if isinstance(module, GradientCheckpointingLayer)]
        if on and not blocks:
            raise ValueError(
                f"{type(self.base).__name__} has no blocks that could be computed again: "
                "set train.gradient_checkpointing = false"
            )
        for block in blocks:
            vars(block).pop("forward", None)
            if on:
                block.forward = partial(recomputed, block)


class HuggingFacePolicy(Policy):
    """A model of `transformers`, with or without its head; parameters have the names that they have there."""

    implementation: ClassVar[Literal["transformers"]] = "transformers"
    language_model: PreTrainedModel
    model: HuggingFaceBackbone

    def __init__(self, language_model: PreTrainedModel) -> None:
        super().__init__()
        adopt(self, language_model)
        object.__setattr__(self, "language_model", language_model)
        object.__setattr__(self, "model", HuggingFaceBackbone(language_model.base_model))  # type: ignore[arg-type]
        self.config = HuggingFaceSizes.of(language_model)

    @property
    def head_weight(self) -> Tensor:
        return self.language_model.get_output_embeddings().weight

    def cache(self, max_rows: int, max_tokens: int) -> Cache:
        return RowCaches(self.model.base)


class RowCaches:
    """For each row a cache of the library's own, whatever the architecture keeps there; every row is a forward of its own."""

    def __init__(self, base: PreTrainedModel) -> None:
        self.base = base
        self.name = "cache" if "cache" in inspect.signature(base.forward).parameters else "past_key_values"  # the older
        self.rows: dict[int, tuple[DynamicCache, int]] = {}
        """And the number of tokens that it holds: a recurrent one does not know."""
        self.cuttable = can_be_cut(DynamicCache(config=base.config))

    def forward(self, token_ids: Tensor, chunks: Sequence[Chunk]) -> Tensor:
        """See `Cache.forward`."""
        parts = token_ids.split([chunk.length for chunk in chunks])
        return torch.cat([self._extend(chunk, ids) for chunk, ids in zip(chunks, parts, strict=True)])

    def _extend(self, chunk: Chunk, token_ids: Tensor) -> Tensor:
        if chunk.start == 0:
            self.rows[chunk.row] = DynamicCache(config=self.base.config), 0
        cache, held = self.rows[chunk.row]
        if held > chunk.start:
            cache.crop(chunk.start - held)
        self.rows[chunk.row] = cache, chunk.start + chunk.length
        return self.base(input_ids=token_ids[None], use_cache=True, **{self.name: cache}).last_hidden_state[0]


def adopt(wrapper: nn.Module, module: nn.Module) -> None:
    """Give `wrapper` the very children and parameters of `module`, under the same names, so that checkpoints are the same."""
    for name in ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set"):
        object.__setattr__(wrapper, name, getattr(module, name))


def recomputed(block: nn.Module, *inputs: Any, **options: Any) -> Any:
    """The forward of a block whose activations are not kept."""
    forward = partial(type(block).forward, block)
    if not torch.is_grad_enabled():
        return forward(*inputs, **options)
    return checkpoint(forward, *inputs, use_reentrant=False, preserve_rng_state=False, **options)


def can_be_cut(cache: DynamicCache) -> bool:
    """Whether its last tokens can be taken back: one of sliding windows or recurrent states has forgotten what was before."""
    return getattr(cache, "is_croppable", False) and not any(cache.is_sliding)


def similar(lengths: Sequence[int]) -> list[list[int]]:
    """Indices of windows, longest first, in batches in which all have nearly the length of the longest."""
    batches: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if batches and lengths[i] >= (1 - PADDING) * lengths[batches[-1][0]]:
            batches[-1].append(i)
        else:
            batches.append([i])
    return batches


def load_language_model(folder: Path, dtype: torch.dtype, device: str | torch.device) -> HuggingFacePolicy:
    """The policy in `folder`. Raises ValueError for what is no causal language model, or one that a policy cannot be."""
    model = load_pretrained(AutoModelForCausalLM, folder, dtype)
    policy = HuggingFacePolicy(model).to(device)
    check(policy)
    return policy


def save_language_model(policy: HuggingFacePolicy, folder: Path) -> None:
    save_pretrained(policy.language_model, folder, merged_state(policy))


def load_value_model(folder: Path, dtype: torch.dtype, device: str | torch.device) -> Critic:
    critic = Critic(HuggingFacePolicy(load_pretrained(AutoModel, folder, dtype)))
    critic.score.load_state_dict(load_file(folder / VALUE_HEAD))
    return critic.to(device)


def save_value_model(critic: Critic, folder: Path) -> None:
    """Two things: a base model that `AutoModel.from_pretrained` loads, and the value head."""
    assert isinstance(critic.model, HuggingFaceBackbone)
    state = {name: tensor for name, tensor in merged_state(critic).items() if name.startswith("model.")}
    save_pretrained(critic.model.base, folder, {name.removeprefix("model."): t for name, t in state.items()})
    save_tensors(critic.score.state_dict(), folder / VALUE_HEAD)


def load_pretrained(kind: Any, folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """A model from local safetensors, no tensor of it made up, and no code run that comes with it."""
    config = json.loads((folder / "config.json").read_text())
    if config.get("quantization_config") is not None:
        raise ValueError(f"{folder} holds quantised weights, which cannot be trained: give the original ones")
    if not any(folder.glob("*.safetensors")):
        raise FileNotFoundError(f"{folder} has no safetensors: only those are loaded, never pickles")
    options = {"local_files_only": True, "use_safetensors": True, "trust_remote_code": False, "dtype": dtype}
    try:
        with without_progress_bars():
            model, report = kind.from_pretrained(folder, output_loading_info=True, **options)
    except SafetensorError as error:
        raise ValueError(f"{folder}: a weights file is damaged: {error}") from error
    except (RuntimeError, KeyError) as error:
        raise ValueError(f"{folder}: transformers cannot load it: {error}") from error
    if [type(model).__name__] != config.get("architectures"):
        raise ValueError(f"{folder} holds a {config.get('architectures')}, expected a {type(model).__name__}")
    wrong = {name: sorted(found) for name, found in report.items() if found}
    if wrong:
        raise ValueError(f"{folder}: the weights do not belong to this config.json: {wrong}")
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()  # as it lies in the file, its alignment would decide about the last bit
    return model.eval()


def save_pretrained(model: PreTrainedModel, folder: Path, state: dict[str, Tensor]) -> None:
    """Raises OSError where the disk does not take it."""
    try:
        with without_progress_bars():
            model.save_pretrained(folder, state_dict=state)
    except SafetensorError as error:
        raise OSError(f"{folder} cannot be written: {error}") from error


@contextmanager
def without_progress_bars() -> Iterator[None]:
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


@torch.no_grad()
def check(policy: HuggingFacePolicy) -> None:
    """Hold a model to what a policy promises, on a few tokens. Raises ValueError for one that computes otherwise."""
    name, dtype = type(policy.language_model).__name__, policy.language_model.dtype
    try:
        with in_float32(policy.language_model):
            check_promises(policy)
        for hidden in (policy(probe(policy), [7, 1]), sample(policy, probe(policy))):
            hidden @ policy.head_weight.T
    except ValueError:
        raise
    except Exception as error:  # whatever the code of an architecture raises that is used as it is not meant to be
        raise ValueError(f"{name} cannot be computed here in {dtype}: {type(error).__name__}: {error}") from error


@contextmanager
def in_float32(model: PreTrainedModel) -> Iterator[None]:
    """For a while, with room for it: what a model computes otherwise is less than what bfloat16 rounds."""
    narrow = {t: t.dtype for t in (*model.parameters(), *model.buffers()) if t.dtype in (torch.bfloat16, torch.float16)}
    for tensor in narrow:
        tensor.data = tensor.data.float()
    try:
        yield
    finally:
        for tensor, dtype in narrow.items():
            tensor.data = tensor.data.to(dtype)


def probe(policy: HuggingFacePolicy) -> Tensor:
    return torch.arange(8, device=policy.head_weight.device) % policy.config.vocab_size


def sample(policy: HuggingFacePolicy, ids: Tensor) -> Tensor:
    """Hidden states of the 8 `ids`, computed as when they are sampled."""
    cache, chunks = policy.cache(1, len(ids)), [Chunk(0, 0, 4), Chunk(0, 4, 1), Chunk(0, 5, 3)]
    parts = ids.split([chunk.length for chunk in chunks])
    return torch.cat([cache.forward(part, [chunk]) for part, chunk in zip(parts, chunks, strict=True)])


def check_promises(policy: HuggingFacePolicy) -> None:
    model, sizes = policy.language_model, policy.config
    name, head = type(model).__name__, model.get_output_embeddings()
    if head is None or model.base_model is model:
        raise ValueError(f"{name} has no head that could be told from the model below it")
    if getattr(head, "bias", None) is not None:
        raise ValueError(f"{name} adds a bias to its logits, which is not supported")
    if head.weight.shape != (sizes.vocab_size, sizes.hidden_size):
        raise ValueError(
            f"{name} has a head of shape {list(head.weight.shape)}, expected [vocab_size, hidden_size] = "
            f"[{sizes.vocab_size}, {sizes.hidden_size}]"
        )
    ids = probe(policy)
    hidden = policy(ids, [len(ids)])
    enlarge = head.register_forward_pre_hook(lambda _, inputs: (inputs[0] * ENLARGED,))
    try:
        logits = model(input_ids=ids[None], use_cache=False).logits[0]
    finally:
        enlarge.remove()
    if not close(logits, hidden * ENLARGED @ head.weight.T):
        raise ValueError(
            f"{name} does more to its logits than `hidden @ head_weight.T` (a soft cap, a factor), which is not supported"
        )
    if not close(policy(ids, [5, 3])[:5], hidden[:5]):
        raise ValueError(f"{name} is not causal: its first tokens depend on later ones, or on how windows are batched")
    if not close(sample(policy, ids), hidden):
        raise ValueError(f"{name} computes something else with a cache than without one: it cannot be sampled here")


def close(found: Tensor, expected: Tensor) -> bool:
    return bool((found - expected).abs().max() <= ROUNDING * expected.abs().max())
