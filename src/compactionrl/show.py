"""A rollout a person can read: its windows, what each turn said, what was summarised, and what survived.

All text in a rollout is hostile: it is printed as text, never as markup, and its control characters are made visible.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterator, Sequence

from rich.text import Text

from compactionrl.config import ContextConfig
from compactionrl.rollout.ledger import CONTEXT, Rollout, Turn, Window

Decode = Callable[[Sequence[int]], str]

BAR = 64
"""Characters of a budget bar: the whole of C."""

KINDS = {
    "opening": ("▒", "blue"),
    "tail": ("▒", "cyan"),
    "observed": ("░", "white"),
    "sampled": ("█", "green"),
    "summary": ("█", "magenta"),
}
"""What a token of a window is -> how the bar shows it."""


def show(rollout: Rollout, decode: Decode, context: ContextConfig, *, characters: int = 200) -> Iterator[Text]:
    """Lines of one rollout. `context`: the one it ran under. `characters`: shown of a turn at most; 0: all."""
    yield from head(rollout)
    yield Text.assemble("  ", *((f"{glyph} {kind}  ", colour) for kind, (glyph, colour) in KINDS.items()), "· free")
    for number, window in enumerate(rollout.windows, 1):
        yield Text("")
        yield Text.assemble((f"window {number}", "bold"), f"  {len(window)} of {context.budget} tokens")
        yield Text.assemble("  ", bar(window, context.budget))
        for turn in window.turns:
            yield line(KINDS[kind(turn, window)][1], decode(window.token_ids[turn.start : turn.end]), turn, characters)
        for attempt in window.rejected:
            rejected = Turn("rejected", 0, len(attempt.token_ids), attempt.reason)
            yield line("red", decode(attempt.token_ids), rejected, characters)
        following = [later for later in rollout.windows[number:] if not later.aside]
        if following and not window.aside:
            yield Text(f"  ↳ {survived(window, following[0])}", "yellow")
    yield Text("")
    yield Text.assemble(
        (f"{rollout.end}, reward {rollout.reward:g}", "bold"), f"  {escape(str(rollout.error or ''))}".rstrip()
    )
    for key, value in rollout.details.items():
        yield Text(f"  {escape(str(key))}: {escape(clip(str(value), characters))}", "dim")


def listed(rollout: Rollout) -> Text:
    """One rollout in one line."""
    return Text(
        f"{escape(rollout.id)}  {escape(rollout.task_id)}  {rollout.end}, reward {rollout.reward:g}, {rollout.turns} turns, "
        f"{rollout.compactions} compactions, {sum(map(len, rollout.windows))} tokens"
    )


def head(rollout: Rollout) -> Iterator[Text]:
    yield Text.assemble((escape(rollout.task_id), "bold"), f"  {escape(rollout.id)}")
    yield Text(
        f"  {len(rollout.windows)} windows, {rollout.compactions} compactions, {rollout.turns} turns, "
        f"{rollout.tool_calls} calls, {rollout.cut_responses} cut responses"
    )
    counts = rollout.token_counts()
    parts = " + ".join(f"{count} {key}" for key, count in counts.items() if key != "sampled")
    yield Text(f"  {counts['sampled']} tokens sampled = {escape(parts)}")


def kind(turn: Turn, window: Window) -> str:
    """Which of KINDS a turn is."""
    if window.segment_ids[turn.start : turn.start + 1] != [CONTEXT]:
        return "summary" if turn.note.startswith("summary") else "sampled"
    if turn.note in ("task", "resume"):
        return "opening"
    return "tail" if turn.note in ("tail", "clipped") else "observed"


def bar(window: Window, budget: int) -> Text:
    """How full the window is, one glyph for budget/BAR tokens."""
    made = Text()
    for turn in window.turns:
        glyph, colour = KINDS[kind(turn, window)]
        made.append(glyph * (turn.end * BAR // budget - turn.start * BAR // budget), colour)
    return made.append("·" * (BAR - len(made)), "dim")


def line(colour: str, text: str, turn: Turn, characters: int) -> Text:
    """One turn: who, how many tokens, what it is, what it says."""
    note = f"[{turn.note}] " if turn.note else ""
    head = (f"  {turn.role:>9} {turn.end - turn.start:5d}  ", colour)
    return Text.assemble(head, (escape(note), "italic"), escape(clip(text, characters)))


def survived(window: Window, following: Window) -> str:
    """What the next window still holds of this one."""
    kept = [turn for turn in following.turns if kind(turn, following) == "tail"]
    steps = sum(turn.role == "assistant" for turn in kept)
    summary = sum(turn.end - turn.start for turn in window.turns if kind(turn, window) == "summary")
    tokens = sum(turn.end - turn.start for turn in kept)
    clipped = ", observation clipped" if any(turn.note == "clipped" for turn in kept) else ""
    return f"goes on from a summary of {summary} tokens and the latest {steps} steps ({tokens} tokens{clipped})"


def clip(text: str, characters: int) -> str:
    """The text with its middle cut out, if it is longer than `characters` (0: no limit)."""
    if not characters or len(text) <= characters:
        return text
    half = characters // 2
    return f"{text[:half]} [... {len(text) - 2 * half} characters ...] {text[-half:]}"


def escape(text: str) -> str:
    """Printable text: line breaks as ⏎, every other control, format or surrogate character as its code."""
    return "".join(map(visible, text.replace("\r\n", "\n")))


def visible(character: str) -> str:
    if character == "\n":
        return "⏎"
    hidden = unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
    return f"\\u{ord(character):04x}" if hidden else character
