"""JSON and server-sent events, whatever characters are in them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from starlette.responses import Response


def encode(content: Any) -> bytes:
    """In ASCII: a model's words may hold halves of surrogate pairs, which UTF-8 has no bytes for."""
    return json.dumps(content, allow_nan=False, separators=(",", ":")).encode("ascii")


def json_reply(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(encode(content), status, headers, "application/json")


def event_reply(events: Iterable[Any]) -> Response:
    """Server-sent events with OpenAI's last one. All is sampled by then, so errors have been reported by the status."""
    content = b"".join(b"data: %s\n\n" % event for event in (*map(encode, events), b"[DONE]"))
    return Response(content, headers={"Cache-Control": "no-cache"}, media_type="text/event-stream")
