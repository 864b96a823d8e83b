"""Stand-ins for tokenizers that cannot be had here: byte-level BPEs of ours that carry a family's special tokens.

Splitting into words, merges across blanks and punctuation, and which special tokens there are, is as in the family; the
vocabulary is not. So a test with a stand-in shows that a format's windows are exact, not that the ids are a real model's.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEXTS = Path(__file__).parents[1] / "src" / "compactionrl"
WORDS = Regex(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

GLM_CONTROL = (
    *("<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>"),
    *("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    *("<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>"),
)
GLM_MARKUP = (
    *("/nothink", "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)


@cache
def glm_stand_in() -> PreTrainedTokenizerFast:
    """For GLM-4.5 and GLM-5."""
    return stand_in(GLM_CONTROL, GLM_MARKUP, end="<|endoftext|>")


def stand_in(control: tuple[str, ...], markup: tuple[str, ...], end: str) -> PreTrainedTokenizerFast:
    """2,000 pieces learned from this package's source; `control` is skipped when special tokens are, `markup` is not."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(WORDS, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=2000, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator((path.read_text() for path in sorted(TEXTS.rglob("*.py"))), trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in markup])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, pad_token=end)
