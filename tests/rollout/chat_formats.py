"""Chat formats over real tokenizers, stand-ins, and a tokenizer in which every word is one token."""

from __future__ import annotations

import pytest
from rollout_stubs import chat_format
from stand_in_tokenizers import glm_stand_in
from transformers import AutoTokenizer

from compactionrl.rollout.chat import ChatFormat

WORD_PER_TOKEN = {
    "qwen3, words": chat_format(),
    "qwen3.5, words": chat_format("qwen3.5"),
    "glm-4.5, words": chat_format("glm-4.5"),
}
REAL = ["qwen3", "qwen3, no thinking", "llama-3", "chatml, SmolLM2", "glm-4.5, stand-in", "glm-5, stand-in"]


@pytest.fixture(scope="session", params=[*WORD_PER_TOKEN, *REAL])
def chat(request: pytest.FixtureRequest) -> ChatFormat:
    """Every chat format that is promised to be exact."""
    name, _, variant = request.param.partition(", ")
    if request.param in WORD_PER_TOKEN:
        return WORD_PER_TOKEN[request.param]
    if variant == "stand-in":
        return ChatFormat(glm_stand_in(), name)
    if variant == "SmolLM2":
        return request.getfixturevalue("smollm2_chat")
    if name == "llama-3":
        return ChatFormat(request.getfixturevalue("llama3_tokenizer"), name)
    options = {"enable_thinking": False} if variant == "no thinking" else {}
    return ChatFormat(request.getfixturevalue("qwen3_tokenizer"), name, options)


@pytest.fixture(scope="session")
def qwen3_chat(qwen3_tokenizer: object) -> ChatFormat:
    return ChatFormat(qwen3_tokenizer, "qwen3")


@pytest.fixture(scope="session")
def smollm2_chat(smollm2: object) -> ChatFormat:
    return ChatFormat(AutoTokenizer.from_pretrained(smollm2), "chatml")
