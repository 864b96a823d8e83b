"""The routes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from compactionrl import __version__
from compactionrl.serving import control
from compactionrl.serving.bodies import read_object
from compactionrl.serving.chat_completions import chat
from compactionrl.serving.completions import complete
from compactionrl.serving.errors import ApiError
from compactionrl.serving.guard import Guard
from compactionrl.serving.model import ServedModel
from compactionrl.serving.replies import json_reply
from compactionrl.serving.tokens import detokenize, tokenize
from compactionrl.serving.weights import Weights

LOG = logging.getLogger(__name__)
SESSION_HEADER = "X-Session-ID"

Handler = Callable[[Request], Awaitable[Response]]
Work = Callable[[ServedModel, dict[str, Any], str | None], Awaitable[Response]]


def create_app(model: ServedModel, weights: Weights, key: str = "") -> ASGIApp:
    """`key`: what requests must bring as a bearer token, if it is not empty."""

    def work(function: Work) -> Handler:
        """What takes time ends when its client goes."""

        async def handle(request: Request) -> Response:
            body = await read_object(request, model.body_limit)
            return await unless_disconnected(request, function(model, body, request.headers.get(SESSION_HEADER)))

        return handle

    async def models(_: Request) -> Response:
        card = {
            "id": model.name,
            "object": "model",
            "created": model.created,
            "owned_by": "compactionrl",
            "root": model.name,
            "max_model_len": model.max_length,
        }
        return json_reply({"object": "list", "data": [card]})

    async def health(_: Request) -> Response:
        return Response()

    async def version(_: Request) -> Response:
        return json_reply({"version": __version__})

    async def pause(request: Request) -> Response:
        return await control.pause(model.engine, request)

    async def resume(_: Request) -> Response:
        return await control.resume(model.engine)

    async def is_paused(_: Request) -> Response:
        return json_reply({"is_paused": model.engine.paused})

    async def reset(_: Request) -> Response:
        model.engine.forget()
        return json_reply({"success": True})

    async def call(request: Request) -> Response:
        return await control.call(weights, await read_object(request, model.body_limit))

    gets = {"/health": health, "/version": version, "/v1/models": models, "/is_paused": is_paused}
    posts = {
        "/v1/completions": work(complete),
        "/v1/chat/completions": work(chat),
        "/tokenize": work(tokenize),
        "/detokenize": work(detokenize),
        "/pause": pause,
        "/resume": resume,
        "/reset_prefix_cache": reset,
        "/collective_rpc": call,
    }
    routes = [
        *(Route(path, answered(handler), methods=["GET"]) for path, handler in gets.items()),
        *(Route(path, answered(handler), methods=["POST"]) for path, handler in posts.items()),
    ]
    return Guard(Starlette(routes=routes, exception_handlers={HTTPException: unknown}), key)


def answered(handler: Handler) -> Handler:
    """Every error is an answer, and never a traceback."""

    async def handle(request: Request) -> Response:
        try:
            return await handler(request)
        except ApiError as error:
            return error.reply()
        except ClientDisconnect:
            return Response(status_code=499)  # to nobody
        except Exception:
            LOG.exception("%s failed", request.url.path)
            return ApiError(500, "the server failed in this request; its log says why").reply()

    return handle


async def unknown(request: Request, error: Exception) -> Response:
    """Of a path, or of a method."""
    assert isinstance(error, HTTPException)
    return ApiError(
        error.status_code, f"{request.method} {request.url.path}: {error.detail}", headers=error.headers
    ).reply()


async def unless_disconnected(request: Request, work: Awaitable[Response]) -> Response:
    """What `work` gives; it is cancelled when the client goes, and ClientDisconnect raised."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(disconnection(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def disconnection(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
