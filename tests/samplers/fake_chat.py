"""An OpenAI-style chat endpoint over real HTTP: as strict about what it is sent as the strictest, with faults on demand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fake_servers import FakeServer
from strict_endpoint import mistakes

Answer = Callable[[dict[str, Any]], dict[str, Any]]
"""Gets the request's body, returns the completion."""


def completion(message: Any, finish: str | None = "stop", usage: Any = None) -> dict[str, Any]:
    if isinstance(message, str):
        message = {"role": "assistant", "content": message}
    reply = {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "choices": [{"index": 0, "message": message, "finish_reason": finish}],
    }
    return reply | ({"usage": usage} if usage is not None else {})


def usage(prompt: int, completed: int, **details: int) -> dict[str, Any]:
    found: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completed,
        "total_tokens": prompt + completed,
    }
    return found | ({"completion_tokens_details": details} if details else {})


def tool_call(arguments: Any = "{}", name: Any = "run", id: Any = "call_a") -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


class FakeChat(FakeServer):
    """`answer_with`: its replies. `rejects`: parameter -> what it says to a request that has it."""

    route = "/v1/chat/completions"

    def __init__(
        self,
        answer_with: Answer | str = "hello",
        *,
        rejects: dict[str, str] | None = None,
        lists: bool = True,
        limit: int | None = None,
        **options: Any,
    ) -> None:
        self.answer_with: Answer = answer_with if callable(answer_with) else lambda _: completion(answer_with)
        self.rejects, self.lists, self.limit = rejects or {}, lists, limit
        super().__init__(**options)

    @property
    def bodies(self) -> list[dict[str, Any]]:
        """The requests but for probes."""
        return [body for body in self.samples if body["messages"][0]["content"] != "Say hello."]

    def answer(self, method: str, path: str, query: dict[str, list[str]], body: dict[str, Any]) -> tuple[int, Any]:
        if (method, path) == ("GET", "/v1/models") and self.lists:
            return 200, {
                "data": [
                    {"id": name} | ({"max_model_len": self.context} if self.limit is None else {})
                    for name in self.names
                ]
            }
        if (method, path) != ("POST", self.route):
            return 404, {"error": {"message": "no such route"}}
        if body.get("model") not in self.names:
            return 404, {
                "error": {"message": f"The model `{body.get('model')}` does not exist", "code": "model_not_found"}
            }
        for name, words in self.rejects.items():
            if name in body or any(name in message for message in body["messages"]):
                return 400, {"error": {"message": words, "type": "invalid_request_error", "param": name}}
        wrong = mistakes(body)
        if wrong:
            return 400, {"error": {"message": f"invalid messages: {wrong}"}}
        size = sum(len(message["content"]) for message in body["messages"]) // 4
        if self.limit is not None and size + (body.get("max_tokens") or 0) > self.limit:
            words = f"This model's maximum context length is {self.limit} tokens. However, you requested {size} tokens."
            return 400, {"error": {"message": words, "code": "context_length_exceeded"}}
        return 200, self.answer_with(body)
