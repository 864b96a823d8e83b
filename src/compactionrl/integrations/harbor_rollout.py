"""What Harbor's results hold of a rollout: one `RolloutDetail` for every segment, in time order, and what else is worth a look.

Ids are those that the server returned: nothing is encoded again. A detail's lists have an entry for each turn that its segment
sampled; `prompt_token_ids` is all that the server read for it. `extra` says of each turn of which kind its segment is (execution
or summary), the segment's number, and its own number in the rollout. Rejected summaries are counted, but not among the details.
"""

from __future__ import annotations

from typing import Any

from compactionrl.evaluation.usage import sampled_turns, usage
from compactionrl.rollout.ledger import Rollout


def rollout_details(rollout: Rollout) -> list[dict[str, Any]]:
    """The segments; none of a rollout whose tokens are not known, since its endpoint takes and returns text."""
    if rollout.approximate:
        return []
    sampled = [
        (window.segment_ids[turn.start], kind, window, turn)
        for window in rollout.windows
        for kind, turn in sampled_turns(window)
    ]
    details: dict[int, dict[str, Any]] = {}
    for number, (index, kind, window, turn) in enumerate(sorted(sampled, key=lambda each: each[0])):
        detail = details.setdefault(index, empty())
        detail["prompt_token_ids"].append(window.token_ids[: turn.start])
        detail["completion_token_ids"].append(window.token_ids[turn.start : turn.end])
        detail["logprobs"].append(window.logprobs[turn.start : turn.end])
        for key, value in {"kind": kind, "segment": index, "turn": number}.items():
            detail["extra"][key].append(value)
    return list(details.values())


def empty() -> dict[str, Any]:
    lists: dict[str, Any] = {"prompt_token_ids": [], "completion_token_ids": [], "logprobs": []}
    return {**lists, "extra": {"kind": [], "segment": [], "turn": []}}


def metadata(rollout: Rollout) -> dict[str, Any]:
    """How it went. The reward is not in it: Harbor's verifier decides that later."""
    return {
        "end": rollout.end,
        "error": rollout.error,
        "turns": rollout.turns,
        "windows": len(rollout.windows),
        "compactions": rollout.compactions,
        "rejected_summaries": sum(len(window.rejected) for window in rollout.windows),
        "exact_tokens": not rollout.approximate,
        "environment_seconds": rollout.environment_seconds,
        "sampler_seconds": rollout.sampler_seconds,
        "details": rollout.details,
    }


def tokens(rollout: Rollout) -> tuple[int, int]:
    """All that was read and all that was sampled, rejected summaries included; as the server counted, where it takes text."""
    spent = usage(rollout).values()
    return sum(each.prompt for each in spent), sum(each.sampled for each in spent)


__all__ = ["metadata", "rollout_details", "tokens"]
