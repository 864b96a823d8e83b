"""Request bodies: JSON objects of bounded size, read in bounded time."""

from __future__ import annotations

import asyncio
import json
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.requests import Request

from compactionrl.serving.errors import ApiError

READ_SECONDS = 60.0
"""Most seconds until a whole body is there."""


class Body(BaseModel):
    """Fields of a request; numbers are no strings. Unknown fields are ignored, as OpenAI's clients expect."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, frozen=True)


Fields = TypeVar("Fields", bound=Body)


async def read_object(request: Request, limit: int) -> dict[str, Any]:
    """The JSON object in the body, of at most `limit` bytes; an empty body is an empty object."""
    content, length = bytearray(), 0
    try:
        async with asyncio.timeout(READ_SECONDS):
            async for chunk in request.stream():
                length += len(chunk)
                if length <= limit:  # the rest is read all the same: a client that is still sending reads no reply
                    content += chunk
    except TimeoutError:
        raise ApiError(408, f"the request body took longer than {READ_SECONDS:g} s") from None
    if length > limit:
        raise ApiError(413, f"the request body is longer than {limit} bytes")
    if not content.strip():
        return {}
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise ApiError(415, "the body must be JSON, with the header Content-Type: application/json")
    try:
        parsed = json.loads(content, parse_constant=refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the request body is no valid JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise ApiError(400, "the request body must be a JSON object")
    return parsed


def refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"JSON has no {name}")


def parse(kind: type[Fields], body: dict[str, Any]) -> Fields:
    """Raises ApiError that names the first field at fault."""
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))[:100]
        raise ApiError(400, f"{where}: {first['msg']}" if where else first["msg"], where or None) from None
