"""Witnesses: who arrived when, slept where and came from which town follows from many statements of one relation each.

To be carried over: everything that is known so far about everybody, and which statements were withdrawn.
"""

from __future__ import annotations

from collections.abc import Callable

from compactionrl.environments.logbook import Draws
from compactionrl.terminal_tasks.task import Draft
from compactionrl.terminal_tasks.words import PEOPLE, TOWNS, among, numbers

SIZES = {"easy": (4, 4, 4), "medium": (6, 5, 9), "hard": (8, 7, 18)}
"""Guests, properties of each (the name is one), statements that are false."""

PROPERTIES = (
    ("name", "{}", PEOPLE),
    ("room", "the guest of the {} room", ("amber", "blue", "crimson", "green", "grey", "ivory", "purple", "silver", "white")),
    ("town", "the guest from {}", TOWNS),
    ("instrument", "the guest who played the {}", ("cello", "fiddle", "flute", "harp", "horn", "lute", "oboe", "viola")),
    ("drink", "the guest who drank {}", ("ale", "brandy", "cider", "cocoa", "coffee", "mead", "milk", "punch", "tea")),
    ("trunk", "the guest with the {} trunk", ("birch", "brass", "cane", "cork", "iron", "leather", "oak", "pine", "wicker")),
    ("book", "the guest who read the {}", ("almanac", "ballads", "fables", "gazette", "hymnal", "novel", "psalter", "sagas")),
)  # fmt: skip
ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")
SAME = (
    "{first} and {second} are one and the same.",
    "{first} is nobody else than {second}.",
    "Whoever speaks of {first} speaks of {second}.",
)
LATER = (
    "{first} arrived {places} before {second}.",
    "{second} arrived {places} after {first}.",
    "Had {second} come {places} earlier, {first} would have met a double.",
    "In the guest book you find {second} {places} below {first}.",
)
GOSSIP = (
    "{first} and {second} are said to be of the same opinion.",
    "I could not tell whether {first} arrived before {second}.",
    "{first} sat at the table after {second} did.",
    "Nobody at the inn likes {first} more than {second}.",
)
README = """\
# The inn

`statements/NNN.txt` are what the witnesses said, each with one fact about the guests among other talk.
`memos/NN.txt` are the inspector's. A statement that was withdrawn is false; if the withdrawal was cancelled, it is
true after all. All other statements are true. No two guests share a property, and no two arrived together.
"""

Node = tuple[int, int]
"""A property and a guest, by the guest's place of arrival: 0 came first."""


def make(grade: str, draws: Draws) -> Draft:
    guests, properties, false = SIZES[grade]
    asked = PROPERTIES[:properties]
    values = [draws.sample(choices, guests) for _, _, choices in asked]
    """By property, then by place of arrival."""

    def told(node: Node) -> str:
        return asked[node[0]][1].format(values[node[0]][node[1]])

    def gossip() -> str:
        """About two guests: what is said of one of them alone would sound as if they were two."""
        (p, q), (a, b) = (draws.between(0, properties - 1) for _ in "12"), draws.sample(range(guests), 2)
        return capital(draws.choice(GOSSIP).format(first=told((p, a)), second=told((q, b))))

    def statement(fact: str) -> str:
        return among(draws, draws.sample([fact, gossip(), gossip()]), draws.between(8, 12))

    true = [_fact(draws, told(a), told(b), b[1] - a[1]) for a, b in _tree(draws, properties, guests)]
    anchor = (draws.between(0, properties - 1), draws.between(0, guests - 1))
    true.append(capital(f"{told(anchor)} was the {ORDINALS[anchor[1]]} to arrive."))
    lies = [_lie(draws, told, properties, guests) for _ in range(false)]
    statements = draws.sample([*((text, True) for text in true), *((text, False) for text in lies)])
    ids = sorted(numbers(draws, len(statements), 1, 3 * len(statements)))
    named = [(number, *statement) for number, statement in zip(ids, statements, strict=True)]
    names = [name for name, _, _ in asked[1:]]
    return Draft(
        instruction=instruction(names, sorted(values[0])),
        files={
            "README.md": README,
            **{f"statements/{number:03}.txt": statement(text) for number, text, _ in named},
            **_memos(draws, [n for n, _, is_true in named if is_true], [n for n, _, is_true in named if not is_true]),
        },
        expected={
            values[0][place]: ", ".join([str(place + 1), *(values[p][place] for p in range(1, properties))])
            for place in range(guests)
        },
        solve="witnesses",
    )


def _tree(draws: Draws, properties: int, guests: int) -> list[tuple[Node, Node]]:
    """Pairs that join all nodes, each only once: every one of them is needed, and together they are enough."""
    nodes = draws.sample([(p, g) for p in range(properties) for g in range(guests)])
    pairs = [(node, draws.choice(nodes[:n])) for n, node in enumerate(nodes) if n]
    return draws.sample([draws.sample(pair) for pair in pairs])  # type: ignore[misc]


def _fact(draws: Draws, first: str, second: str, later: int) -> str:
    """`later`: how many places the second one arrived after the first."""
    if later < 0:
        first, second, later = second, first, -later
    places = f"{later} places" if later > 1 else "one place"
    return capital(draws.choice(LATER if later else SAME).format(first=first, second=second, places=places))


def _lie(draws: Draws, told: Callable[[Node], str], properties: int, guests: int) -> str:
    a, b = draws.sample([(p, g) for p in range(properties) for g in range(guests)], 2)
    wrong = draws.choice([n for n in range(-guests + 1, guests) if n != b[1] - a[1] and (n or a[0] != b[0])])
    return _fact(draws, told(a), told(b), wrong)


def capital(text: str) -> str:
    return text[0].upper() + text[1:]


def _memos(draws: Draws, true: list[int], false: list[int]) -> dict[str, str]:
    """Withdrawals of what is false, withdrawals of what is true with their cancellation, in any order."""
    mistaken = draws.sample(true, len(false) // 2)
    notes = [f"Statement {number:03} was withdrawn." for number in [*false, *mistaken]]
    notes += [f"The withdrawal of statement {number:03} was cancelled: it stands." for number in mistaken]
    return {f"memos/{n:02}.txt": among(draws, [note], 7) for n, note in enumerate(draws.sample(notes), 1)}


def instruction(properties: list[str], names: list[str]) -> str:
    asked = "\n".join(f"{name}: PLACE, {', '.join(each.upper() for each in properties)}" for name in names)
    return f"""\
# Who was at the inn?

{len(names)} guests arrived at an inn one after another. What is known about them stands in the files under `/app`;
`/app/README.md` says how they are to be read. Find out for each guest the place of arrival (1 for the first) and
these: {", ".join(properties)}.

Write `/app/answer.txt` with these lines filled in, such as `{names[0]}: 2, amber, ...`, and no other line. A line
counts if all of it is right.

```
{asked}
```
"""
