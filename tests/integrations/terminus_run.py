"""A run of Terminus-2 in miniature: the order of its requests, its hand-offs, what it records and what it forgets to record.

Ids 0 and 1 open and close a turn, 2 and 3 are its roles, 4 begins a conversation. Text is of the letters a, b, c: the ids 10,
11 and 12, or 13 for "ab", which the server's tokenizer always takes, but a policy may sample letter by letter. `(...)` is
thinking, 14 and 15.
"""

from dataclasses import dataclass, field
from typing import Any

OPEN, CLOSE, USER, AGENT, BEGIN = range(5)
LETTERS = {"a": 10, "b": 11, "c": 12, "(": 14, ")": 15}
OPENING = [OPEN, AGENT]


def encode(text: str) -> list[int]:
    ids: list[int] = []
    for letter in text:
        ids.append(LETTERS[letter])
        if ids[-2:] == [10, 11]:
            ids[-2:] = [13]
    return ids


def spelled(text: str) -> list[int]:
    """As no tokenizer would encode it, but a policy may sample it."""
    return [LETTERS[letter] for letter in text]


@dataclass
class Run:
    """`details` is what Harbor would have; `requests` what truly happened, in time order: (part, prompt, completion)."""

    task: str
    thinks: bool = False
    """Whether the template begins with a token of its own, and opens a turn with empty thinking that it takes out later."""
    messages: list[tuple[int, str]] = field(default_factory=list)
    requests: list[tuple[str, list[int], list[int]]] = field(default_factory=list)
    main: dict[str, list[Any]] = field(default_factory=lambda: empty())
    others: list[dict[str, Any]] = field(default_factory=list)
    unrecorded: int = 0
    hand_offs: int = 0
    handoff: str = ""

    @property
    def details(self) -> list[dict[str, Any]]:
        return [self.main, *self.others]

    def say(self, observation: str, text: str, *, drift: bool = False, thinking: str = "", cut: bool = False) -> None:
        """One turn of the conversation. `cut`: the server's limit ended it: it is said, but not recorded."""
        prompt, self.handoff = self.handoff or (observation if self.messages else self.task), ""
        sampled = (spelled if drift else encode)(text) + ([] if cut else [CLOSE])
        if thinking:
            sampled = spelled(f"({thinking})") + sampled
        if cut:
            self.unrecorded += 1
        else:
            self._record(self.main, "turn", prompt, self.messages, sampled)
        self.messages += [(USER, prompt), (AGENT, text)]

    def hand_over(self, screen: str, summary: str, questions: str, answers: str, *, unwound: int = 0) -> None:
        """Three requests and a new context; `unwound`: pairs of messages dropped before, as when the context was full."""
        kept = max(len(self.messages) - 2 * unwound, 1)
        self.messages = self.messages[:kept]
        asked = self.task + "aa" + summary + "cc" + screen
        self._other("summary", "bca" + self.task, self.messages, summary)
        self._other("questions", asked, [], questions)
        said = [*self.messages, (USER, "bca" + self.task), (AGENT, summary)]
        self._other("answers", "bcb" + questions, said, answers)
        self.messages = [self.messages[0], (USER, asked), (AGENT, questions)]
        self.handoff = "bcc" + answers
        self.hand_offs += 1

    def _other(self, part: str, prompt: str, messages: list[tuple[int, str]], text: str) -> None:
        detail = empty()
        self._record(detail, part, prompt, messages, [*encode(text), CLOSE])
        self.others.append(detail)

    def _record(
        self, detail: dict[str, list[Any]], part: str, prompt: str, messages: list[tuple[int, str]], sampled: list[int]
    ) -> None:
        ids = [i for role, text in [*messages, (USER, prompt)] for i in (OPEN, role, *encode(text), CLOSE)] + OPENING
        ids = [BEGIN, *ids, *encode("()")] if self.thinks else ids
        logprobs = [-1 / (3 + len(self.requests) + i) for i in range(len(sampled))]
        self.requests.append((part, ids, sampled))
        for key, value in zip(detail, (ids, sampled, logprobs), strict=True):
            detail[key].append(value)


def empty() -> dict[str, list[Any]]:
    return {"prompt_token_ids": [], "completion_token_ids": [], "logprobs": []}
