"""The ledger of a rollout: Rollout > Window > Segment, tokens in and tokens out.

A *window* is what the model saw between two compactions: one contiguous, append-only sequence of context tokens, sampled
tokens, observations and, at its end, the summary request and the sampled summary. A *segment* is the set of tokens that
the policy sampled in one role, acting or summarising (paper E10). A window holds one or two segments and is trained in
one forward pass. Sampled ids and log-probabilities are kept as the sampler returned them: nothing is ever decoded and
encoded again.

A hand-off (`rollout.handoff`) writes three texts: the summary and, behind it, the answers are the summary segment of the
closing window; the questions, asked in between, that of a window of their own, which comes next.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from compactionrl.samplers.protocol import Reported

Kind = Literal["execution", "summary"]
End = Literal["submitted", "turns", "budget", "time", "error"]
ENDS: tuple[End, ...] = ("submitted", "turns", "budget", "time", "error")
CONTEXT = -1
"""`Window.segment_ids` of a token that the policy did not sample in this window."""


@dataclass
class Segment:
    """Tokens that the policy sampled in one role within one window.

    `index` counts segments over the whole rollout, from 0. `excluded` says why the segment is not trained; None: it is.
    """

    kind: Kind
    index: int
    excluded: str | None = None

    @property
    def trainable(self) -> bool:
        return self.excluded is None


@dataclass
class Attempt:
    """A summary that was not accepted: kept beside its window, never trained, never in any context."""

    token_ids: list[int]
    logprobs: list[float]
    reason: str
    reported: Reported | None = None


@dataclass
class Turn:
    """A half-open span [start, end) of a window. `role`: system, user, tool (context) or assistant (sampled)."""

    role: str
    start: int
    end: int
    note: str = ""
    """What is special: "task", "summary request", "summary", "resume", "tail", "placeholder", "clipped"; "" otherwise.

    Of a hand-off, also "questions request", "summary questions", "answers request", "summary answers", "not executed".
    """
    reported: Reported | None = None
    """Of a sampled turn: what the server counted that wrote it, if it takes and returns text."""


@dataclass
class Window:
    """One token sequence. All four lists have the same length T.

    `segment_ids[t]` is the rollout-wide index of the segment that sampled token t, or CONTEXT. `logprobs[t]` and
    `versions[t]` (the policy version that sampled it) are 0.0 and -1 for context tokens.
    """

    token_ids: list[int] = field(default_factory=list)
    segment_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    rejected: list[Attempt] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.token_ids)

    def __repr__(self) -> str:
        return f"<Window of {len(self)} tokens, {len(self.turns)} turns>"

    @property
    def used(self) -> int:
        """|h|: its tokens; where ids are pieces of a text, what the server counted last, and every id behind that."""
        for turn in reversed(self.turns):
            if turn.reported:
                return turn.reported.context + len(self) - turn.end
        return len(self)

    @property
    def aside(self) -> bool:
        """Whether nobody acts in it: a hand-off's questions are asked there."""
        return any(turn.note == "questions request" for turn in self.turns)

    def append_context(self, ids: list[int], role: str, note: str = "") -> None:
        start = len(self)
        self.token_ids += ids
        self.segment_ids += [CONTEXT] * len(ids)
        self.logprobs += [0.0] * len(ids)
        self.versions += [-1] * len(ids)
        self.turns.append(Turn(role, start, len(self), note))

    def append_sampled(
        self,
        ids: list[int],
        logprobs: list[float],
        versions: list[int],
        segment: Segment,
        note: str = "",
        reported: Reported | None = None,
    ) -> None:
        if not len(ids) == len(logprobs) == len(versions):
            raise ValueError(
                f"{len(ids)} sampled ids, {len(logprobs)} logprobs, {len(versions)} versions: must be equal"
            )
        if segment not in self.segments:
            self.segments.append(segment)
        start = len(self)
        self.token_ids += ids
        self.segment_ids += [segment.index] * len(ids)
        self.logprobs += logprobs
        self.versions += versions
        self.turns.append(Turn("assistant", start, len(self), note, reported))

    def count(self, segment: Segment) -> int:
        """Tokens that `segment` sampled."""
        return self.segment_ids.count(segment.index)


@dataclass
class Rollout:
    """One attempt at one task: a chain of windows with a single terminal reward (paper (R))."""

    id: str
    task_id: str
    windows: list[Window] = field(default_factory=list)
    reward: float = 0.0
    end: End = "error"
    error: str | None = None
    retryable: bool = True
    """Whether another try could end better than with this `error`."""
    approximate: bool = False
    """Whether token ids are pieces of a text, and counts of them estimates (`rollout.text_chat`)."""
    details: dict[str, Any] = field(default_factory=dict)
    turns: int = 0
    tool_calls: int = 0
    cut_responses: int = 0
    thinking_tokens: int = 0
    """Of the responses, summaries not counted; their thinking's text as tokens."""
    environment_seconds: float = 0.0
    sampler_seconds: float = 0.0

    def __repr__(self) -> str:
        """One line: an event loop in debug mode and a failed test print what tasks return."""
        size = f"{len(self.windows)} windows of {sum(map(len, self.windows))} tokens"
        return f"<Rollout {self.id}: {self.end}, reward {self.reward:g}, {size}>"

    @property
    def segments(self) -> list[Segment]:
        return [segment for window in self.windows for segment in window.segments]

    @property
    def compactions(self) -> int:
        closed = [window for window in self.windows if not window.aside]
        return sum(segment.kind == "summary" for window in closed for segment in window.segments)

    def exclude(self, reason: str, kind: Kind | None = None) -> None:
        """Take all segments (of one kind) out of training; the first reason recorded for a segment stays."""
        for segment in self.segments:
            if segment.excluded is None and kind in (None, segment.kind):
                segment.excluded = reason

    def token_counts(self) -> dict[str, int]:
        """`sampled` = `trained` + every `excluded: <reason>` + every `rejected: <reason>` (invariant 1)."""
        counts = {"sampled": 0, "trained": 0}
        for window in self.windows:
            for segment in window.segments:
                n = window.count(segment)
                key = "trained" if segment.trainable else f"excluded: {segment.excluded}"
                counts[key] = counts.get(key, 0) + n
                counts["sampled"] += n
            for attempt in window.rejected:
                key = f"rejected: {attempt.reason}"
                counts[key] = counts.get(key, 0) + len(attempt.token_ids)
                counts["sampled"] += len(attempt.token_ids)
        return counts
