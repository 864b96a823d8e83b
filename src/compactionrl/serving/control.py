"""Routes of vLLM's development mode, with which training pauses a server and gives it new weights."""

from __future__ import annotations

from typing import Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from compactionrl.serving.bodies import Body, parse
from compactionrl.serving.engine import MODES, Engine
from compactionrl.serving.errors import ApiError
from compactionrl.serving.replies import json_reply
from compactionrl.serving.weights import Weights

METHODS = {"load_pushed_weights": ["folder", "version"], "pushed_weights_version": []}
"""What `integrations.vllm_worker.PushedWeights` gives to vLLM, and the names of its arguments."""


class Procedure(Body):  # type: ignore[no-redef]  # pydantic's plugin means its own **kwargs
    method: str
    args: list[str] = Field([], max_length=8)
    kwargs: dict[str, str] = Field(default_factory=dict)


async def pause(engine: Engine, request: Request) -> Response:
    mode: Any = request.query_params.get("mode", "abort")
    if mode not in MODES:
        raise ApiError(400, f"mode must be one of {', '.join(MODES)}", "mode")
    await engine.pause(mode)
    return json_reply({"status": "paused"})


async def resume(engine: Engine) -> Response:
    engine.resume()
    return json_reply({"status": "resumed"})


async def call(weights: Weights, body: dict[str, Any]) -> Response:
    """POST /collective_rpc: one of METHODS, with the arguments in order or by name."""
    procedure = parse(Procedure, body)
    names = METHODS.get(procedure.method)
    if names is None:
        raise ApiError(
            400, f"there is no method {procedure.method[:100]!r} here: choose {' or '.join(METHODS)}", "method"
        )
    given = dict(zip(names, procedure.args, strict=False)) | procedure.kwargs
    if len(procedure.args) + len(procedure.kwargs) != len(names) or given.keys() != set(names):
        raise ApiError(400, f"{procedure.method} takes ({', '.join(names)})", "args")
    version = await weights.load(**given) if names else weights.version
    return json_reply({"results": [version]})
