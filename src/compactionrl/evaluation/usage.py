"""How many tokens a rollout sent and sampled, request by request, as its ledger tells."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from compactionrl.rollout.ledger import CONTEXT, Kind, Rollout, Turn, Window
from compactionrl.samplers.protocol import Reported


class Usage(NamedTuple):
    """Tokens of some requests. `new`: of the prompts, what no earlier request of the same window held or sampled.

    A server with a prefix cache computes the new ones, and at most those: windows also begin alike.
    """

    requests: int = 0
    prompt: int = 0
    new: int = 0
    sampled: int = 0

    def plus(self, other: Usage) -> Usage:
        return Usage(*(a + b for a, b in zip(self, other, strict=True)))


def usage(rollout: Rollout) -> dict[Kind, Usage]:
    """Of the responses ("execution") and of the summaries, rejected ones too."""
    spent = {"execution": Usage(), "summary": Usage()}
    for window in rollout.windows:
        for kind, request in requests(window):
            spent[kind] = spent[kind].plus(request)
    return spent  # type: ignore[return-value]


def requests(window: Window) -> Iterator[tuple[Kind, Usage]]:
    """Each request of a window, in order. A rejected summary was asked for where the accepted one was, the first of a
    window's summary turns."""
    known, rejected = 0, iter(window.rejected)
    for kind, turn in sampled_turns(window):
        for attempt in rejected if kind == "summary" else ():
            yield kind, request(turn.start, known, len(attempt.token_ids), attempt.reported)
        yield kind, request(turn.start, known, turn.end - turn.start, turn.reported)
        known = turn.reported.context if turn.reported else turn.end


def request(prompt: int, known: int, sampled: int, reported: Reported | None) -> Usage:
    """One request, by the server's count if there is one."""
    if reported:
        prompt, sampled = reported.prompt, reported.completion
    return Usage(1, prompt, max(prompt - known, 0), sampled)


def sampled_turns(window: Window) -> Iterator[tuple[Kind, Turn]]:
    """The responses and summaries of a window, in order."""
    kinds = {segment.index: segment.kind for segment in window.segments}
    for turn in window.turns:
        if turn.end > turn.start and window.segment_ids[turn.start] != CONTEXT:
            yield kinds[window.segment_ids[turn.start]], turn


def turn_tokens(turn: Turn) -> int:
    """Of a sampled turn, by the server's count if there is one."""
    return turn.reported.completion if turn.reported else turn.end - turn.start


def total(spent: Iterable[Usage]) -> Usage:
    result = Usage()
    for each in spent:
        result = result.plus(each)
    return result


def cost(tokens: Mapping[str, Mapping[str, int]], prompt: float, completion: float, *, own: bool) -> float | None:
    """Of the policy's requests, at prices of a million tokens; None without prices. `own`: the summaries are its own."""
    if not prompt and not completion:
        return None
    parts = [tokens["responses"], *([tokens["summaries"]] if own else [])]
    return sum(part["prompt"] * prompt + part["sampled"] * completion for part in parts) / 1e6
