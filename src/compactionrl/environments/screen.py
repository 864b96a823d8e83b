"""What of a command's output a model is shown: plain text of bounded size."""

from __future__ import annotations

import re

ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)?|[ -/]*[0-~])")
"""Control sequences of terminals (ECMA-48): colours, cursor moves, titles."""
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def plain(text: str) -> str:
    """`text` without escape sequences; every line end is a newline, other control characters and lone surrogates are U+FFFD."""
    text = re.sub(r"\r\n?", "\n", ESCAPES.sub("", text))
    return CONTROLS.sub("\N{REPLACEMENT CHARACTER}", text).encode(errors="surrogatepass").decode(errors="replace")


def clip(text: str, most: int) -> str:
    """`text`, its middle cut out where it has more than `most` bytes of UTF-8: head, a mark that says how many are gone, tail."""
    data = text.encode()
    if len(data) <= most:
        return text
    head, tail = data[: most - most // 2], data[len(data) - most // 2 :]
    mark = f"\n[... {len(data) - most} bytes left out ...]\n"
    return head.decode(errors="ignore") + mark + tail.decode(errors="ignore")
