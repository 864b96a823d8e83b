"""Configuration archaeology: what was in force on a day, from layered files, tickets that changed them, and renamed settings.

To be carried over: which line each asked-for setting comes from, its older names, and the tickets that moved it so far.
"""

from __future__ import annotations

from dataclasses import dataclass

from compactionrl.environments.logbook import Draws
from compactionrl.terminal_tasks.task import Draft
from compactionrl.terminal_tasks.words import PEOPLE, among, date, numbers

SIZES = {"easy": (3, 2, 6, 18, 1, 3), "medium": (5, 3, 9, 42, 3, 6), "hard": (8, 4, 12, 90, 5, 10)}
"""Services, regions, settings, tickets, renamed settings, questions."""

SERVICES = ("billing", "booking", "catalog", "dispatch", "freight", "ledger", "pilotage", "tariff")
REGIONS = ("north", "south", "east", "west")
SETTINGS = (
    "pool_size", "queue_limit", "retry_delay", "page_rows", "cache_slots", "idle_seconds", "batch_rows", "lease_seconds",
    "max_uploads", "poll_millis", "shard_count", "trace_rate",
)  # fmt: skip
OLD = (
    "max_conn",
    "backlog",
    "wait_again",
    "rows_shown",
    "keep_slots",
    "sleep_after",
    "chunk",
    "holdfast",
    "files_cap",
    "tick",
)
LAST_DAY = 330
Line = tuple[str, str, str]
"""File, section, setting (by its newest name): where a value stands."""

README = """\
# Configuration

The value of a setting for a service in a region is looked for in this order; the first place that has it wins:

1. `config/services/SERVICE.ini`, section `[REGION]`
2. `config/services/SERVICE.ini`, section `[all]`
3. `config/regions/REGION.ini`, section `[all]`
4. `config/base.ini`, section `[all]`

The files lie here as they were on the first of January. Since then they were changed by the tickets in `changes/`,
and by nothing else. A ticket counts from the day on which it was *carried out*; tickets that were refused or are
still open change nothing. At most one ticket was carried out on a day. To set a line that is not there adds it.
Rolling a ticket back gives the line of that ticket the value that it had just before that ticket was carried out,
or removes it if there was none.

Some settings got another name; `notices/` tells which and when. It is the same setting, files and tickets use the
name of their day, and values stay.
"""


@dataclass(frozen=True)
class Ticket:
    """`action`: "set", "delete" or "roll back" (then `undone` is the number of the ticket that is rolled back)."""

    number: int
    day: int
    status: str
    action: str
    line: Line
    value: int = 0
    undone: int = 0


def make(grade: str, draws: Draws) -> Draft:
    writers = (_Writer(draws, *SIZES[grade]) for _ in range(1000))
    return next(writer for writer in writers if writer.worthwhile()).draft()


class _Writer:
    def __init__(
        self, draws: Draws, services: int, regions: int, settings: int, tickets: int, renamed: int, questions: int
    ) -> None:
        self.draws = draws
        self.services, self.regions = draws.sample(SERVICES, services), draws.sample(REGIONS, regions)
        self.settings = draws.sample(SETTINGS, settings)
        days = draws.sample(range(20, LAST_DAY), renamed)
        self.renamed = dict(
            zip(draws.sample(self.settings, renamed), zip(draws.sample(OLD, renamed), days, strict=True), strict=True)
        )
        """Setting -> its older name, and the day from which the new one counts."""
        self.values = iter(numbers(draws, 3000, 100, 9999))
        self.asked = self._questions(questions)
        self.initial = self._initial()
        self.tickets = self._tickets(tickets)
        self.until = LAST_DAY - 40

    def _questions(self, count: int) -> list[tuple[str, str, str]]:
        """Service, region, setting: the renamed settings come first."""
        draws = self.draws
        settings = [*self.renamed, *draws.sample([each for each in self.settings if each not in self.renamed])]
        return [
            (draws.choice(self.services), draws.choice(self.regions), settings[n % len(settings)]) for n in range(count)
        ]

    def _initial(self) -> dict[Line, int]:
        lines = {("config/base.ini", "all", setting): next(self.values) for setting in self.settings}
        outer = [(f"config/regions/{region}.ini", "all") for region in self.regions]
        inner = [(f"config/services/{each}.ini", part) for each in self.services for part in ("all", *self.regions)]
        for file, section in (*outer, *inner):
            for setting in self.draws.sample(self.settings, len(self.settings) // 2):
                lines[file, section, setting] = next(self.values)
        return lines

    def _tickets(self, count: int) -> list[Ticket]:
        """By day. Every question's innermost lines are changed, and some lines that nobody asks for."""
        draws = self.draws
        days = sorted(draws.sample(range(5, LAST_DAY + 20), count))
        ids = [400 + 3 * n + draws.between(0, 2) for n in range(count)]
        # Tickets are carried out in another order than they were written in.
        order = [ids[n] for _, n in sorted((n + draws.between(0, count // 2), n) for n in range(count))]
        lines, before, done, made = dict(self.initial), dict[int, int | None](), list[Ticket](), list[Ticket]()
        for position, (day, number) in enumerate(zip(days, order, strict=True)):
            status = "done" if draws.random() < 0.65 else draws.choice(("refused", "open"))
            ticket = self._ticket(number, day, status, lines, done, position)
            made.append(ticket)
            if status == "done":
                apply(ticket, lines, before)
                done.append(ticket)
        return made

    def _ticket(
        self, number: int, day: int, status: str, lines: dict[Line, int], done: list[Ticket], position: int
    ) -> Ticket:
        draws, chance = self.draws, self.draws.random()
        question = self.asked[position % len(self.asked)]
        if chance > 0.85:
            question = draws.choice(self.services), draws.choice(self.regions), draws.choice(self.settings)
        places = layers(*question)
        first = next(n for n, line in enumerate(places) if line in lines)
        undoable = [each for each in done if each.line in places[: first + 1] and each.action != "roll back"]
        if chance < 0.25 and undoable:
            return Ticket(number, day, status, "roll back", undoable[-1].line, undone=undoable[-1].number)
        if chance < 0.45 and first < 3:
            return Ticket(number, day, status, "delete", places[first])
        # Mostly where it counts now, or before that.
        places = places[: first + 1] if draws.random() < 0.8 else places
        return Ticket(number, day, status, "set", draws.choice(places), next(self.values))

    def answers(self, tickets: list[Ticket]) -> dict[Line, int]:
        """Question -> what is in force after these tickets."""
        lines, before = dict(self.initial), dict[int, int | None]()
        for ticket in tickets:
            apply(ticket, lines, before)
        return {question: answer(question, lines) for question in self.asked}

    def right(self) -> dict[Line, int]:
        """At the end of the day that is asked for."""
        return self.answers([each for each in self.tickets if each.status == "done" and each.day <= self.until])

    def worthwhile(self) -> bool:
        """Whether no answer stands in the files as they are, and each way to misread the tickets spoils some answers."""
        right = self.right()
        wrong = [
            [each for each in self.tickets if each.day <= self.until],
            [each for each in self.tickets if each.status == "done"],
            [each for each in self.tickets if each.status == "done" and each.day <= self.until and not each.undone],
        ]
        if any(value == answer(question, self.initial) for question, value in right.items()):
            return False
        spoiled = [sum(right[q] != value for q, value in self.answers(tickets).items()) for tickets in wrong]
        return min(spoiled) > len(self.asked) // 5

    def draft(self) -> Draft:
        expected = {" ".join(question): str(value) for question, value in self.right().items()}
        return Draft(
            instruction=instruction(list(expected), self.until),
            files={"README.md": README, **self._config(), **self._changes(), **self._notices()},
            expected=expected,
            solve="config_archaeology",
        )

    def _name(self, setting: str, day: int) -> str:
        old, since = self.renamed.get(setting, ("", 0))
        return old if day < since else setting

    def _config(self) -> dict[str, str]:
        sections: dict[str, dict[str, list[str]]] = {}
        for (file, section, setting), value in self.initial.items():
            entry = f"{self._name(setting, 0)} = {value}"
            sections.setdefault(file, {}).setdefault(section, []).append(entry)
        return {
            file: "\n".join(f"[{section}]\n" + "\n".join(sorted(entries)) + "\n" for section, entries in parts.items())
            for file, parts in sections.items()
        }

    def _changes(self) -> dict[str, str]:
        return {f"changes/CHG-{ticket.number:04}.txt": self._text(ticket) for ticket in self.tickets}

    def _text(self, ticket: Ticket) -> str:
        draws, (file, section, setting) = self.draws, ticket.line
        name = self._name(setting, ticket.day)
        person, day, undone = draws.choice(PEOPLE), date(ticket.day), f"CHG-{ticket.undone:04}"
        wishes = {
            "set": (
                f"Set `{name}` to {ticket.value} in section [{section}] of `{file}`.",
                f"In `{file}`, section [{section}], the right value of `{name}` would be {ticket.value}.",
            ),
            "delete": (
                f"Delete `{name}` from section [{section}] of `{file}`.",
                f"In `{file}`, section [{section}] should do without `{name}`.",
            ),
            "roll back": (f"Roll {undone} back.", f"We want to have things as they were before {undone}."),
        }[ticket.action]
        ends = {
            "done": (f"Carried out by {person} on {day}.", f"{person} did so on {day}."),
            "refused": (f"Refused by {person} on {day}.", f"{person} would not hear of it on {day}."),
            "open": (f"Open since {day}, until {person} has decided.", f"{person} was asked about it on {day}."),
        }[ticket.status]
        first = f"CHG-{ticket.number:04}, asked for by {draws.choice(PEOPLE)}.\n"
        return first + among(draws, [draws.choice(wishes), draws.choice(ends)], draws.between(7, 12))

    def _notices(self) -> dict[str, str]:
        """One file per rename and as many without one."""
        draws = self.draws
        told = [
            [f"From {date(day)} on the setting `{old}` is called `{setting}`."]
            for setting, (old, day) in self.renamed.items()
        ]
        notices = draws.sample([*told, *([] for _ in told)])
        return {f"notices/{n:02}.txt": among(draws, notice, 10) for n, notice in enumerate(notices, 1)}


def layers(service: str, region: str, setting: str) -> list[Line]:
    """Where a value is looked for, in order."""
    own = f"config/services/{service}.ini"
    return [
        (own, region, setting),
        (own, "all", setting),
        (f"config/regions/{region}.ini", "all", setting),
        ("config/base.ini", "all", setting),
    ]


def apply(ticket: Ticket, lines: dict[Line, int], before: dict[int, int | None]) -> None:
    """Carry a ticket out. `before`: ticket -> the value that its line had just before it, if any."""
    before[ticket.number] = lines.get(ticket.line)
    value = before[ticket.undone] if ticket.action == "roll back" else ticket.value
    if ticket.action == "delete" or value is None:
        lines.pop(ticket.line, None)
    else:
        lines[ticket.line] = value


def answer(question: Line, lines: dict[Line, int]) -> int:
    return next(lines[line] for line in layers(*question) if line in lines)


def instruction(names: list[str], until: int) -> str:
    asked = "\n".join(f"{name}: VALUE" for name in names)
    return f"""\
# Which value was it?

Tell which values were in force at the end of {date(until)}. `/app/README.md` says how the files under `/app` are to
be read: the configuration of the first of January, the tickets that changed it since, and the notices.

Write `/app/answer.txt`: these lines (service, region, setting by its newest name) with the value in place of VALUE,
and no other line.

```
{asked}
```
"""
