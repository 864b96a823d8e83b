"""Runs of stock Terminus-2 (Harbor's agent) as ledgers, so that they can be looked at and trained on.

Terminus-2 talks text. What it keeps are token ids that the server reported: the prompt and the completion of every turn of the
main conversation, and behind them, in `rollout_details[1:]`, three requests for each hand-off: a summary, questions about it by
someone who knows nothing else, and answers. Nothing says where in the conversation a hand-off was made. It is found again: the
new context is the first that holds the prompt of the questions.

    rollout_details[0]        turn 0 | turn 1 | turn 2 |           | turn 3 | turn 4
    rollout_details[1:4]                               | S0 Q0 A0  |
    windows                   execution + S0 A0                | Q0 | execution

Any other prompt that does not begin with what was sampled before it is a drift (text that was encoded otherwise than it had been
sampled, thinking that a template took out): it opens a window of its own, and what was sampled before stays where it was.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise, takewhile
from pathlib import Path
from typing import Any

from compactionrl.rollout.ledger import End, Kind, Rollout, Segment, Window

AGENT = "terminus-2"
PARTS = ("summary", "questions", "answers")
"""The requests of a hand-off, in order."""
REQUESTS = tuple(f"{part} request" for part in PARTS)
NOTES = ("summary", "summary questions", "summary answers")
"""The notes of what is asked and sampled then, as a hand-off of ours has them."""
NO_LOGPROBS = "no log-probabilities recorded"


class ImportRefused(ValueError):
    """Details from which no true ledger can be made. Says what does not add up."""


@dataclass(frozen=True)
class Request:
    """One request as the server saw it: the ids it read, those it sampled, their log-probabilities if it told them."""

    prompt: list[int]
    completion: list[int]
    logprobs: list[float] | None


def import_trial(folder: Path, *, version: int = 0) -> Rollout:
    """The ledger of a trial of Terminus-2 with `collect_rollout_details`, from Harbor's folder of it (`result.json`).

    The reward is the verifier's "reward", or its only one. A trial without one, or that an exception other than the agent's
    time limit ended, has broken down: it ends with `error` and is not trained. Raises ImportRefused.
    """
    path = folder / "result.json"
    try:
        result = json.loads(path.read_text())
    except (OSError, ValueError) as wrong:
        raise ImportRefused(f"{path} is no result of a trial: {wrong}") from None
    name = (result.get("agent_info") or {}).get("name")
    if name != AGENT:
        raise ImportRefused(f"{path}: the agent was {name!r}; only the details of {AGENT!r} are understood")
    if result.get("step_results"):
        raise ImportRefused(f"{path}: a task of several steps has several conversations, which are not told apart")
    agent = result.get("agent_result") or {}
    end, reward, error = verdict(result)
    rollout = import_details(
        agent.get("rollout_details") or [],
        rollout_id=result["trial_name"],
        task_id=result["task_name"],
        reward=reward,
        end=end,
        hand_offs=(agent.get("metadata") or {}).get("summarization_count"),
        version=version,
    )
    rollout.error = error
    return rollout


def verdict(result: Mapping[str, Any]) -> tuple[End, float, str | None]:
    """How a trial ended, its reward, and what broke."""
    exception = result.get("exception_info") or {}
    kind = exception.get("exception_type")
    rewards = (result.get("verifier_result") or {}).get("rewards") or {}
    reward = rewards.get("reward", next(iter(rewards.values())) if len(rewards) == 1 else math.nan)
    if kind not in (None, "AgentTimeoutError"):
        return "error", 0.0, f"{kind}: {exception.get('exception_message')}"
    if not math.isfinite(reward):
        return "error", 0.0, f"the verifier gave no reward: {rewards}"
    return "time" if kind else "submitted", float(reward), None


def import_details(
    details: Sequence[Mapping[str, Any]],
    *,
    rollout_id: str,
    task_id: str,
    reward: float = 0.0,
    end: End = "submitted",
    hand_offs: int | None = None,
    version: int = 0,
) -> Rollout:
    """The ledger of one run of Terminus-2. `version`: of the policy that sampled; `hand_offs`: `summarization_count`, if known.

    A completion that is not among the details (one that was cut is not recorded) is part of the next prompt: context, never
    trained, and counted in `details["unrecorded responses"]`. Segments without log-probabilities are not trained. Raises
    ImportRefused where lists or counts disagree: a turn without ids, a hand-off that failed or was interrupted.
    """
    turns, groups = read(details, hand_offs)
    requests = [*turns, *chain.from_iterable(groups)]
    rollout = Rollout(rollout_id, task_id, reward=reward, end=end, turns=len(turns), tool_calls=len(turns))
    ledger = _Ledger(rollout, requests, version)
    ledger.open(turns[0], "task")
    waiting = list(groups)
    for before, request in pairwise(turns):
        if waiting and ledger.took_over(waiting[0], before, request):
            ledger.hand_off(waiting.pop(0))
            ledger.open(request, "resume")
        elif ledger.goes_on(request):
            ledger.extend(request, before)
        else:
            ledger.open(request, "fork", before)
    if waiting:
        raise ImportRefused(
            f"{len(groups)} hand-offs were sampled, but only {len(groups) - len(waiting)} of the conversation's contexts begin "
            "with one: one was interrupted, or failed behind its last request"
        )
    rollout.details |= {
        "harness": AGENT,
        "hand-offs": len(groups),
        "forks": ledger.forks,
        "unrecorded responses": ledger.unrecorded,
    }
    if end == "error":
        rollout.exclude("error")
    return rollout


def read(
    details: Sequence[Mapping[str, Any]], hand_offs: int | None = None
) -> tuple[list[Request], list[list[Request]]]:
    """The turns of the main conversation, and the three requests of each hand-off."""
    if not details:
        raise ImportRefused("there are no rollout details: run Terminus-2 with collect_rollout_details=true")
    turns, *rest = [read_requests(f"rollout_details[{index}]", detail) for index, detail in enumerate(details)]
    for index, part in enumerate(rest, 1):
        if len(part) > 1:
            raise ImportRefused(f"rollout_details[{index}] has {len(part)} turns: a request of a hand-off has one")
    if len(rest) % len(PARTS):
        raise ImportRefused(
            f"{len(rest)} requests of hand-offs, three for each: one was interrupted, or one of its requests failed or has no ids"
        )
    others = [part[0] for part in rest]
    groups = [others[i : i + len(PARTS)] for i in range(0, len(others), len(PARTS))]
    if hand_offs is not None and hand_offs != len(groups):
        raise ImportRefused(
            f"summarization_count is {hand_offs}, but there are the requests of {len(groups)} hand-offs: some failed, and "
            "the agent went on with a context that is not recorded"
        )
    return turns, groups


def read_requests(name: str, detail: Mapping[str, Any]) -> list[Request]:
    """The requests of one detail. Raises ImportRefused if its lists are not of the same turns."""
    prompts, completions = detail.get("prompt_token_ids") or [], detail.get("completion_token_ids") or []
    logprobs = detail.get("logprobs")
    counts = {"prompt_token_ids": len(prompts), "completion_token_ids": len(completions)}
    counts |= {"logprobs": len(logprobs)} if logprobs else {}
    if not prompts or len(set(counts.values())) > 1:
        raise ImportRefused(
            f"{name}: {counts}: a turn without ids shifts the others, so which belong together is not known"
        )
    found = [
        Request(list(prompt), list(completion), list(logprobs[turn]) if logprobs else None)
        for turn, (prompt, completion) in enumerate(zip(prompts, completions, strict=True))
    ]
    for turn, request in enumerate(found):
        if not request.prompt or not request.completion:
            raise ImportRefused(f"{name}, turn {turn}: no ids in its prompt or its completion")
        given = request.logprobs
        if given is not None and len(given) != len(request.completion):
            raise ImportRefused(f"{name}, turn {turn}: {len(request.completion)} ids, {len(given)} log-probabilities")
        if given is not None and not all(isinstance(each, float | int) and each > -math.inf for each in given):
            raise ImportRefused(f"{name}, turn {turn}: a log-probability that is no finite number")
    return found


class _Ledger:
    """A rollout that grows. `requests`: all there are; what their prompts share at both ends is the chat template's."""

    def __init__(self, rollout: Rollout, requests: Sequence[Request], version: int) -> None:
        self.rollout, self.version = rollout, version
        self.beginning = shared([request.prompt for request in requests])
        self.end = shared([request.prompt[::-1] for request in requests])[::-1]
        self.opening = opening(self.end, {request.completion[-1] for request in requests})
        self.window, self.segment = Window(), Segment("execution", -1)
        """Those that grow."""
        self.made = self.forks = self.unrecorded = 0

    def goes_on(self, request: Request) -> bool:
        """Whether the prompt is the window and more."""
        n = len(self.window)
        return len(request.prompt) > n and request.prompt[:n] == self.window.token_ids

    def took_over(self, group: Sequence[Request], before: Request, request: Request) -> bool:
        """Whether the prompt is the context after the hand-off `group`: the first that holds the prompt of its questions."""
        questions = group[PARTS.index("questions")].prompt
        asked = questions[len(self.beginning) : len(questions) - len(self.end)]
        return bool(asked) and holds(request.prompt, asked) and not holds(before.prompt, asked)

    def open(self, request: Request, note: str, before: Request | None = None) -> None:
        """A window that begins with the whole prompt."""
        self.forks += note == "fork"
        self._missed(request, before, questions=note == "resume")
        self._begin(request, note)
        self._sample(request, self._new("execution", request))

    def extend(self, request: Request, before: Request) -> None:
        self._go_on(request, "unrecorded response" if self._missed(request, before) else "")
        self._sample(request, self.segment)

    def _missed(self, request: Request, before: Request | None, questions: bool = False) -> int:
        """Count the agent's turns that the prompt has opened since `before` and that are not recorded."""
        known = occurrences(before.prompt, self.opening) if before else int(questions)
        missed = max(occurrences(request.prompt, self.opening) - known - 1, 0)
        self.unrecorded += missed
        return missed

    def hand_off(self, group: Sequence[Request]) -> None:
        """Summary and answers are one segment, which ends the window that they close, if their prompts begin with it."""
        summary, questions, answers = group
        if self.goes_on(summary):
            self._go_on(summary, REQUESTS[0])
        else:
            self._begin(summary, REQUESTS[0])
        self._sample(summary, self._new("summary", summary), NOTES[0])
        closing, segment = self.window, self.segment
        self._begin(questions, REQUESTS[1])
        self._sample(questions, self._new("summary", questions), NOTES[1])
        self.window = closing
        if self.goes_on(answers) and (answers.logprobs is None) == (summary.logprobs is None):
            self._go_on(answers, REQUESTS[2])
        else:
            self._begin(answers, REQUESTS[2])
            segment = self._new("summary", answers)
        self._sample(answers, segment, NOTES[2])

    def _begin(self, request: Request, note: str) -> None:
        self.window = Window()
        self.window.append_context(request.prompt, "user", note)
        self.rollout.windows.append(self.window)

    def _go_on(self, request: Request, note: str) -> None:
        self.window.append_context(request.prompt[len(self.window) :], "user", note)

    def _new(self, kind: Kind, request: Request) -> Segment:
        self.segment = Segment(kind, self.made, NO_LOGPROBS if request.logprobs is None else None)
        self.made += 1
        return self.segment

    def _sample(self, request: Request, segment: Segment, note: str = "") -> None:
        n = len(request.completion)
        self.window.append_sampled(request.completion, request.logprobs or [0.0] * n, [self.version] * n, segment, note)


def shared(sequences: Iterable[Sequence[int]]) -> list[int]:
    """The ids with which all begin."""
    columns = zip(*sequences, strict=False)
    return [column[0] for column in takewhile(lambda column: len(set(column)) == 1, columns)]


def opening(end: list[int], stops: Collection[int]) -> list[int]:
    """How the agent's turn begins, given how every prompt ends: behind the stop token that closes the user's, if one does."""
    return list(takewhile(lambda token: token not in stops, reversed(end)))[::-1]


def holds(ids: Sequence[int], part: Sequence[int]) -> bool:
    return occurrences(ids, part) > 0


def occurrences(ids: Sequence[int], part: Sequence[int]) -> int:
    """How often `part` stands in `ids`, without overlap; an empty one never does."""
    packed, needle = array("q", ids), array("q", part).tobytes()
    size, found, start = packed.itemsize, 0, 0
    text = packed.tobytes()
    while needle and (start := text.find(needle, start)) >= 0:
        aligned = start % size == 0
        found += aligned
        start += len(needle) if aligned else 1
    return found


__all__ = ["ImportRefused", "Request", "import_details", "import_trial"]
