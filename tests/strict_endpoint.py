"""What the strictest of OpenAI-style endpoints, and of the chat templates behind them, do not take."""

from __future__ import annotations

import json
import re
from typing import Any

CALL_NAME = re.compile(r"[a-zA-Z0-9_.:/-]{1,64}")
KEYS = {"role", "content", "tool_calls", "tool_call_id", "reasoning_content"}


def mistakes(body: dict[str, Any]) -> str:
    """The first thing that is wrong with a request; "" if nothing is."""
    json.dumps(body).encode("ascii")
    waiting: list[str] = []
    before = ""
    for number, message in enumerate(body["messages"]):
        role = message["role"]
        if not isinstance(message["content"], str):
            return "content must be a string"
        if (role == "tool") != bool(waiting):
            return f"message {number}: calls {waiting} are not answered right behind them"
        if role == "tool":
            if message["tool_call_id"] not in waiting:
                return f"message {number} answers no call"
            waiting.remove(message["tool_call_id"])
        elif role == "assistant":
            if before not in ("user", "tool"):
                return f"message {number}: two turns of the assistant"
            calls = message.get("tool_calls", [])
            if "tool_calls" in message and not calls:
                return "tool_calls is empty"
            for call in calls:
                if not CALL_NAME.fullmatch(call["function"]["name"]) or not call["id"]:
                    return f"message {number}: bad name or id"
                if not isinstance(json.loads(call["function"]["arguments"]), dict):
                    return f"message {number}: arguments are no object"
            waiting = [call["id"] for call in calls]
            if len(set(waiting)) < len(waiting):
                return "calls with one id"
        elif role == before == "user":
            return f"message {number}: turns must alternate"
        unknown = set(message) - KEYS
        if unknown:
            return f"message {number}: unknown {unknown}"
        before = role
    return "the last turn must be the user's or a tool's" if waiting or before not in ("user", "tool") else ""
