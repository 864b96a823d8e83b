"""What is wrong with a request, as OpenAI and vLLM write it."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.responses import Response

from compactionrl.serving.replies import json_reply

TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    413: "RequestTooLargeError",
    415: "UnsupportedMediaTypeError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}
LONGEST = 500
"""Characters of a message: it may quote the request."""


class ApiError(Exception):
    """A request that gets an error with `status`. `param`: the field at fault."""

    def __init__(
        self, status: int, message: str, param: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.headers = status, param, headers

    def reply(self) -> Response:
        error = {
            "message": str(self)[:LONGEST],
            "type": TYPES.get(self.status, "APIError"),
            "param": self.param,
            "code": self.status,
        }
        return json_reply({"error": error}, self.status, self.headers)
