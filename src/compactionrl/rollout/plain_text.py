"""Text from outside can never open or close a turn.

Tokenizers turn strings that spell a special token, such as `<|im_end|>`, into that token. Observations and summaries are
hostile text, so each such string in them is broken by a mark; the tokenizer below encodes the pieces around a mark one
by one, as plain text, and the mark itself never becomes a token. Text without such strings is encoded as always.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

MARK = "\ufdd0"
"""A Unicode noncharacter, reserved for internal use; text from outside that holds it gets U+FFFD instead."""
SHORT = 256
"""Characters of a text up to which its ids are remembered."""


class PlainTextTokenizer:
    """A tokenizer for chat renderers: like the one it wraps, but blind to special tokens broken by `neutralise`."""

    def __init__(self, tokenizer: Any) -> None:
        self.base = tokenizer
        self.name_or_path: str = getattr(tokenizer, "name_or_path", "") or "tokenizer"
        self.unk_token_id: int | None = tokenizer.unk_token_id
        self.eos_token_id: int | None = tokenizer.eos_token_id
        self.chat_template: Any = getattr(tokenizer, "chat_template", None)
        self.special_tokens: dict[str, int] = tokenizer.get_added_vocab()
        added = self.special_tokens
        self.special_ids = frozenset(added.values())
        # Halves of surrogate pairs (file names that are no UTF-8, say) are no text: no tokenizer takes them.
        self._single = dict.fromkeys(
            [*range(0xD800, 0xE000), *(ord(name) for name in added if len(name) == 1)], "\ufffd"
        )
        self._names = sorted((name for name in added if len(name) > 1), key=len, reverse=True)
        self._firsts = {name[0] for name in self._names}
        self._begins_special = re.compile(f"(?=(?:{'|'.join(map(re.escape, self._names))}))(.)", re.DOTALL)
        # Only tokens that are matched behind the tokenizer's normalisation can hide in another string.
        self._can_hide = any(token.normalized for token in tokenizer.added_tokens_decoder.values())
        # A chat format encodes the same few pieces around every message.
        self._encode_short = lru_cache(maxsize=4096)(self._encode_plain)
        self._id_of = lru_cache(maxsize=4096)(tokenizer.convert_tokens_to_ids)

    def neutralise(self, text: str) -> str:
        """Break every string in `text` that would encode to a special token."""
        text = text.replace(MARK, "\ufffd").translate(self._single)
        if any(first in text for first in self._firsts) and any(name in text for name in self._names):
            text = self._begins_special.sub(rf"\1{MARK}", text)
        if self._can_hide and self.special_ids.intersection(self.encode(text)):
            # The tokenizer's own normalisation made a special string out of another one: break it everywhere.
            text = MARK.join(text.replace(MARK, ""))
        return text

    def encode(self, text: str, add_special_tokens: bool = False, **_: Any) -> list[int]:
        if MARK in text:
            return [i for piece in text.split(MARK) if piece for i in self._encode_plain(piece)]
        return [*self._encode_short(text)] if len(text) <= SHORT else self._encode_plain(text)

    def decode(self, token_ids: Any, **options: Any) -> str:
        """The text as it was sampled: some tokenizers would tidy blanks before punctuation away."""
        return self.base.decode(token_ids, **{**options, "clean_up_tokenization_spaces": False})

    def apply_chat_template(self, messages: list[Any], **options: Any) -> str:
        """The tokenizer's chat template as text; broken special tokens stay broken."""
        return self.base.apply_chat_template(messages, tokenize=False, **options)

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        return self._id_of(tokens) if isinstance(tokens, str) else self.base.convert_tokens_to_ids(tokens)

    def _encode_plain(self, text: str) -> list[int]:
        return self.base.encode(text, add_special_tokens=False)
