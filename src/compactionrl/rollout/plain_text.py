"""Text from outside can never open or close a turn.

Tokenizers turn strings that spell a special token, such as `<|im_end|>`, into that token. Observations and summaries are
hostile text, so each such string in them is broken by a mark; the tokenizer below encodes the pieces around a mark one
by one, as plain text, and the mark itself never becomes a token. Text without such strings is encoded as always.
"""

from __future__ import annotations

import re
from typing import Any

MARK = "\ufdd0"
"""A Unicode noncharacter, reserved for internal use; text from outside that holds it gets U+FFFD instead."""


class PlainTextTokenizer:
    """A tokenizer for chat renderers: like the one it wraps, but blind to special tokens broken by `neutralise`."""

    def __init__(self, tokenizer: Any) -> None:
        self.base = tokenizer
        self.name_or_path: str = getattr(tokenizer, "name_or_path", "") or "tokenizer"
        self.unk_token_id: int | None = tokenizer.unk_token_id
        self.eos_token_id: int | None = tokenizer.eos_token_id
        added: dict[str, int] = tokenizer.get_added_vocab()
        self.special_ids = frozenset(added.values())
        names = sorted((re.escape(name) for name in added if len(name) > 1), key=len, reverse=True)
        self._begins_special = re.compile(f"(?=(?:{'|'.join(names)}))(.)", re.DOTALL) if names else None
        self._single = {ord(name): "\ufffd" for name in added if len(name) == 1}

    def neutralise(self, text: str) -> str:
        """Break every string in `text` that would encode to a special token."""
        text = text.replace(MARK, "\ufffd").translate(self._single)
        if self._begins_special is not None:
            text = self._begins_special.sub(rf"\1{MARK}", text)
        if not text.isascii() and self.special_ids.intersection(self.encode(text)):
            # The tokenizer's own normalisation made a special string out of another one: break it everywhere.
            text = MARK.join(text.replace(MARK, ""))
        return text

    def encode(self, text: str, add_special_tokens: bool = False, **_: Any) -> list[int]:
        if MARK not in text:
            return self.base.encode(text, add_special_tokens=False)
        return [i for piece in text.split(MARK) if piece for i in self.base.encode(piece, add_special_tokens=False)]

    def decode(self, token_ids: Any, **options: Any) -> str:
        return self.base.decode(token_ids, **options)

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        return self.base.convert_tokens_to_ids(tokens)
