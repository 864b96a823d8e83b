"""A rollout in Harbor's Agent Trajectory Interchange Format (ATIF 1.8), for its viewer and for whoever reads trajectories.

A response is an `agent` step with what the environment answered. At a compaction come the request, the summary as a step of the
agent's, a `system` step whose `context_management` says that what is above is replaced, and the new context. What all but the
agent said is shown as the model read it, its chat format's marks included.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from compactionrl.environments.protocol import Response
from compactionrl.evaluation.usage import total, turn_tokens, usage
from compactionrl.rollout.chat import ChatFormat
from compactionrl.rollout.ledger import CONTEXT, Rollout, Turn, Window

VERSION = "ATIF-v1.8"
REPLACED = {
    "source": "system",
    "message": "The context was replaced.",
    "extra": {"context_management": {"type": "compaction", "boundary": "replace"}},
}
ANSWERS = ("", "placeholder", "not executed")
"""Notes of turns that answer a response."""
COPIED = ("tail", "clipped")
"""Notes of turns that an earlier window holds, too."""
SOURCES = {"system": "system", "assistant": "agent"}
"""Of a turn's role; every other is the user's."""

Step = dict[str, Any]


def trajectory(
    rollout: Rollout, chat: ChatFormat, *, agent: dict[str, Any], tools: list[Any] | None = None
) -> dict[str, Any]:
    """The whole rollout as JSON. `agent`: name, version and model_name, as the format wants them."""
    steps = [
        step for number, window in enumerate(rollout.windows) for step in window_steps(window, number, chat, tools)
    ]
    spent = total(usage(rollout).values())
    return {
        "schema_version": VERSION,
        "session_id": rollout.id,
        "agent": agent | ({"tool_definitions": tools} if tools else {}),
        "steps": [{"step_id": number, **step} for number, step in enumerate(steps, 1)],
        "final_metrics": {
            "total_prompt_tokens": spent.prompt,
            "total_completion_tokens": spent.sampled,
            "total_steps": len(steps),
        },
    }


def window_steps(window: Window, number: int, chat: ChatFormat, tools: list[Any] | None) -> list[Step]:
    """The steps of the rollout's window `number`."""
    steps = [dict(REPLACED)] if number and not window.aside else []
    for turn, opening in zip(window.turns, openings(window), strict=True):
        ids = window.token_ids[turn.start : turn.end]
        if window.segment_ids[turn.start : turn.start + 1] not in ([], [CONTEXT]):
            steps.append(agent_step(chat.parse(opening, ids, False, tools), turn))
        elif turn.note in ANSWERS:
            observe(steps[-1], turn, chat.decode(ids))
        else:
            steps.append(message_step(turn, chat.decode(ids), copied=turn.note in COPIED))
    return steps


def openings(window: Window) -> Iterator[list[int]]:
    """What stands right before each turn: the turn before it."""
    yield []
    for turn in window.turns[:-1]:
        yield window.token_ids[turn.start : turn.end]


def agent_step(response: Response, turn: Turn) -> Step:
    step: Step = {
        "source": "agent",
        "message": response.text,
        "llm_call_count": 1,
        "metrics": {
            "prompt_tokens": turn.reported.prompt if turn.reported else turn.start,
            "completion_tokens": turn_tokens(turn),
        },
    }
    if response.thinking:
        step["reasoning_content"] = response.thinking
    if response.calls:
        step["tool_calls"] = [
            {"tool_call_id": call.id, "function_name": call.name, "arguments": call.arguments}
            for call in response.calls
        ]
    if turn.note:
        step["extra"] = {"turn": turn.note}
    return step


def observe(step: Step, turn: Turn, text: str) -> None:
    """Add an answer to the agent's step that it answers."""
    results = step.setdefault("observation", {"results": []})["results"]
    calls: Sequence[Any] = step.get("tool_calls", []) if turn.role == "tool" else []
    of = {"source_call_id": calls[len(results)]["tool_call_id"]} if len(results) < len(calls) else {}
    results.append({**of, "content": text})


def message_step(turn: Turn, text: str, *, copied: bool) -> Step:
    step: Step = {"source": SOURCES.get(turn.role, "user"), "message": text, "extra": {"turn": turn.note}}
    return step | ({"is_copied_context": True} if copied else {})


__all__ = ["trajectory"]
