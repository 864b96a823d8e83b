"""The small tokenizer: lossless, one token a word, and Qwen3's chat format to the token."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from renderers.configs import Qwen3RendererConfig
from renderers.qwen3 import Qwen3Renderer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from compactionrl.environments.notes import NOTES_PROMPTS, NotesTasks
from compactionrl.training.tokenizer import CONTROL_TOKENS, MARKUP_TOKENS, build_tokenizer

TASKS = NotesTasks()
TEXTS = [*TASKS.texts, *NOTES_PROMPTS.values()]
TOKENIZER = build_tokenizer(TEXTS)

PIECES = [
    *CONTROL_TOKENS,
    *MARKUP_TOKENS,
    "user\n",
    "system\n",
    "assistant\n",
    " next",
    "next",
    "cup3",
    "\n",
    " ",
    "é",
    "\u2028",
]
texts = st.text() | st.lists(st.sampled_from(PIECES) | st.text(max_size=3)).map("".join)


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


@settings(max_examples=300, deadline=None)
@given(text=texts)
def test_every_text_round_trips(text: str) -> None:
    assert TOKENIZER.decode(encode(text)) == text


def test_every_byte_has_a_token() -> None:
    text = "\x00\x7f é中\U0001f600\udb40".encode(errors="ignore").decode()
    assert len(encode(text)) == len(text.encode())


@pytest.mark.parametrize(
    "tasks",
    [
        TASKS,
        NotesTasks(mode="chain", style="pairs", updates=2, notes=(8, 9)),
        NotesTasks(facts=12, values=3, notes=(20, 21)),
    ],
)
def test_every_word_of_the_tasks_is_one_token(tasks: NotesTasks) -> None:
    tokenizer = build_tokenizer([*tasks.texts, *NOTES_PROMPTS.values()])
    task = tasks.task("heldout", 3)
    summary = NOTES_PROMPTS["resume_template"].format(summary="found " + " ".join(task.answer))
    said = [task.system, task.prompt, *task.commands, *task.notes, "answer " + " ".join(task.answer), summary]
    said += ["end", "unknown", "missing", *NOTES_PROMPTS.values()]
    for text in said:
        words = [*text.replace("{summary}", "").split(), *(f" {word}" for word in text.split() if word != "{summary}")]
        for word in words:
            assert len(tokenizer.encode(word, add_special_tokens=False)) == 1, word
        if "{" not in text:
            assert len(tokenizer.encode(text, add_special_tokens=False)) == len(text.split())
    assert len(tokenizer) <= 512


def test_the_vocabulary_is_bytes_words_roles_and_special_tokens() -> None:
    tokenizer = build_tokenizer(["tea for two, two", "x tea"])
    words = ["tea", "for", "two", ",", "x"]  # "," and "x" alone are bytes already
    assert len(tokenizer) == 256 + 2 * len(words) - 2 + 3 + 9
    assert tokenizer.tokenize("tea,two") == ["tea", ",", "two"]
    assert tokenizer.convert_tokens_to_ids(list(CONTROL_TOKENS + MARKUP_TOKENS)) == list(range(267, 276))


def test_special_tokens_are_those_of_qwen3() -> None:
    for token in CONTROL_TOKENS + MARKUP_TOKENS:
        assert encode(token) == [TOKENIZER.convert_tokens_to_ids(token)]
    assert TOKENIZER.decode(encode("<think>a</think><|im_end|>"), skip_special_tokens=True) == "<think>a</think>"
    assert (TOKENIZER.eos_token, TOKENIZER.pad_token, TOKENIZER.unk_token) == ("<|im_end|>", "<|endoftext|>", None)


def test_a_turn_costs_seven_tokens_of_scaffold() -> None:
    renderer = Qwen3Renderer(TOKENIZER, Qwen3RendererConfig(enable_thinking=True, thinking_retention="all"))
    opening = renderer.render_ids([{"role": "user", "content": "begin"}], add_generation_prompt=True)
    assert TOKENIZER.batch_decode([[i] for i in opening]) == [
        *("<|im_start|>", "user\n", "begin", "<|im_end|>", "\n", "<|im_start|>", "assistant\n")
    ]
    response = encode("next<|im_end|>")
    bridged = renderer.bridge_to_next_turn(opening, response, [{"role": "user", "content": "note cup3"}])
    assert bridged is not None
    added = bridged.token_ids[len(opening) + len(response) :]
    assert TOKENIZER.batch_decode([[i] for i in added]) == [
        *("\n", "<|im_start|>", "user\n", "note", " cup3", "<|im_end|>", "\n", "<|im_start|>", "assistant\n")
    ]


contents = st.lists(
    st.sampled_from(
        ["next", " cup3", "\n", "<think>", "</think>", "<tool_response>", "</tool_response>", "user\n", " ", "é"]
    )
).map("".join)
turns = st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": contents})
conversations = st.tuples(
    st.lists(st.fixed_dictionaries({"role": st.just("system"), "content": contents}), max_size=1), st.lists(turns)
).map(lambda parts: [*parts[0], *parts[1]])


@settings(max_examples=300, deadline=None)
@given(messages=conversations.filter(len), generate=st.booleans(), reasoning=st.none() | contents)
def test_the_chat_template_is_the_renderer(
    messages: list[dict[str, str]], generate: bool, reasoning: str | None
) -> None:
    if reasoning is not None and messages[-1]["role"] == "assistant":
        messages[-1] = {**messages[-1], "reasoning_content": reasoning}
    renderer = Qwen3Renderer(TOKENIZER, Qwen3RendererConfig(enable_thinking=True))
    rendered = TOKENIZER.apply_chat_template(messages, tokenize=False, add_generation_prompt=generate)
    ids = renderer.render_ids(messages, add_generation_prompt=generate)
    assert TOKENIZER.decode(ids) == rendered
    assert encode(rendered) == ids


@pytest.mark.parametrize("message", [{"role": "tool", "content": "x"}, {"role": "critic", "content": "x"}])
def test_the_chat_template_refuses_what_it_cannot_render(message: dict[str, str]) -> None:
    with pytest.raises(Exception, match="has no role"):
        TOKENIZER.apply_chat_template([message], tokenize=False)
    with pytest.raises(Exception, match="has no tools"):
        TOKENIZER.apply_chat_template([{"role": "user", "content": "x"}], tools=[{"type": "function"}], tokenize=False)


@pytest.mark.parametrize("beside_a_model", [False, True])
def test_a_saved_tokenizer_loads_unchanged(tmp_path: Path, beside_a_model: bool) -> None:
    if beside_a_model:
        (tmp_path / "config.json").write_text('{"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}')
    TOKENIZER.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert isinstance(loaded, PreTrainedTokenizerFast)
    assert loaded.get_vocab() == TOKENIZER.get_vocab()
    messages = [{"role": "system", "content": TASKS.system}, {"role": "user", "content": "note cup3 <think> naïve\n"}]
    for text in (TASKS.system, "superuser\n x <|im_end|>\n\nuser\n", " ".join(TEXTS)):
        assert loaded.encode(text) == TOKENIZER.encode(text)
    assert loaded.apply_chat_template(messages) == TOKENIZER.apply_chat_template(messages)
    assert (loaded.eos_token_id, loaded.pad_token_id) == (TOKENIZER.eos_token_id, TOKENIZER.pad_token_id)
