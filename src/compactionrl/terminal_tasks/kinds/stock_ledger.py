"""Stock ledger: what lies where at the end, from day books with moves, later corrections and units that change.

To be carried over: the stock of every good that is asked for, what a last holds when, and entries that may be corrected.
"""

from __future__ import annotations

from dataclasses import dataclass

from compactionrl.environments.logbook import Draws
from compactionrl.terminal_tasks.task import Draft
from compactionrl.terminal_tasks.words import GOODS, PEOPLE, TOWNS, among

SIZES = {"easy": (12, 3, 3, 2, 3, 4), "medium": (18, 5, 5, 3, 6, 6), "hard": (32, 7, 8, 4, 12, 10)}
"""Days, entries of a day, goods, warehouses, changes of what a unit holds, questions."""

WAREHOUSES = ("north shed", "south shed", "old tower", "brick hall")
CARRIED = ("{amount} were carried from the {source} to the {target}.", "the {target} got {amount} from the {source}.")
LEFT = ("{amount} left the {source} for {town}.", "the {source} gave {amount} to a ship for {town}.")
CAME = ("{amount} came into the {target} from {town}.", "the {target} took {amount} in, sent from {town}.")
CORRECTIONS = ("the number in entry {number} should be {count}.", "what entry {number} tells has to read {count}.")
STRIKES = ("entry {number} is struck out.", "entry {number} must be forgotten.")
README = """\
# The day books

`opening.txt` is the stock on the morning of day 1. `days/day-NN.txt` are the day books: numbered entries among what
else happened. `letters/NN.txt` say among other things how many crates a last holds: it depends on the good and on
the day. An entry in lasts counts with what a last of that good held on the day of the entry, also if the entry is
corrected later.

A later entry can correct the number of an earlier one (its unit stays), or strike an earlier one out: then it
counts as if it had never been written.
"""


@dataclass
class Entry:
    """`count`: as it is right, in `lasts` or in crates. `source`, `target`: a warehouse, or "" for the world outside."""

    number: int
    day: int
    good: str
    source: str
    target: str
    count: int
    lasts: bool
    struck: bool = False


def make(grade: str, draws: Draws) -> Draft:
    return _Writer(draws, *SIZES[grade]).draft()


class _Writer:
    def __init__(
        self, draws: Draws, days: int, entries: int, goods: int, warehouses: int, changes: int, questions: int
    ) -> None:
        self.draws, self.days, self.per_day = draws, days, entries
        self.goods, self.warehouses = draws.sample(GOODS, goods), draws.sample(WAREHOUSES, warehouses)
        places = [(good, warehouse) for good in self.goods for warehouse in self.warehouses]
        self.asked = draws.sample(places, questions)
        self.opening = {place: draws.between(2000, 9000) for place in places}
        self.holds = {(good, 1): draws.between(8, 40) for good in self.goods}
        """Good and day -> crates of a last from that day on."""
        for n in range(changes):
            self.holds[self.goods[n % goods], draws.between(2, days)] = draws.between(8, 40)
        self.entries: list[Entry] = []
        self.books = {day: self._day(day) for day in range(1, days + 1)}

    def _day(self, day: int) -> list[str]:
        """The sentences of one day's entries. A correction is an entry with a number of its own."""
        sentences = []
        for n in range(self.per_day):
            number = (day - 1) * self.per_day + n + 1
            earlier = [each for each in self.entries if each.day < day and not each.struck]
            chance = self.draws.random()
            if earlier and chance < 0.3:
                text = self._amend(self.draws.choice(earlier[-4 * self.per_day :]), strike=chance < 0.08)
            else:
                text = self._move(number, day)
            sentences.append(f"Entry {number}: {text}")
        return sentences

    def _amend(self, entry: Entry, strike: bool) -> str:
        if strike:
            entry.struck = True
            return self.draws.choice(STRIKES).format(number=entry.number)
        entry.count = self.draws.choice([n for n in range(2, 60) if n != entry.count])
        return self.draws.choice(CORRECTIONS).format(number=entry.number, count=entry.count)

    def _move(self, number: int, day: int) -> str:
        draws = self.draws
        # Two of three entries are about a place that is asked for.
        good, warehouse = draws.choice(self.asked if draws.random() < 0.66 else list(self.opening))
        other = draws.choice([each for each in self.warehouses if each != warehouse])
        source, target = draws.choice([("", warehouse), (warehouse, ""), (warehouse, other), (other, warehouse)])
        entry = Entry(number, day, good, source, target, draws.between(2, 59), lasts=draws.random() < 0.5)
        self.entries.append(entry)
        amount = f"{entry.count} {'lasts' if entry.lasts else 'crates'} of {good}"
        forms = (CARRIED if source else CAME) if target else LEFT
        return draws.choice(forms).format(amount=amount, source=source, target=target, town=draws.choice(TOWNS))

    def _crates(self, entry: Entry) -> int:
        if not entry.lasts:
            return entry.count
        day = max(day for good, day in self.holds if good == entry.good and day <= entry.day)
        return entry.count * self.holds[entry.good, day]

    def _stock(self) -> dict[tuple[str, str], int]:
        stock = dict(self.opening)
        for entry in self.entries:
            if not entry.struck:
                for place, sign in ((entry.source, -1), (entry.target, 1)):
                    if place:
                        stock[entry.good, place] += sign * self._crates(entry)
        return stock

    def draft(self) -> Draft:
        stock = self._stock()
        opening = [f"{good} in the {warehouse}: {crates} crates" for (good, warehouse), crates in self.opening.items()]
        expected = {f"{good} in the {warehouse}": str(stock[good, warehouse]) for good, warehouse in self.asked}
        return Draft(
            instruction=instruction(list(expected)),
            files={
                "README.md": README,
                "opening.txt": "\n".join(opening) + "\n",
                **{f"days/day-{day:02}.txt": self._page(day) for day in self.books},
                **self._letters(),
            },
            expected=expected,
            solve="stock_ledger",
        )

    def _page(self, day: int) -> str:
        head = f"Day {day}. {self.draws.choice(PEOPLE)} keeps the book.\n\n"
        return head + among(self.draws, self.books[day], 4 * self.per_day)

    def _letters(self) -> dict[str, str]:
        told = [
            f"From day {day} on a last of {good} holds {crates} crates." for (good, day), crates in self.holds.items()
        ]
        return {
            f"letters/{n:02}.txt": among(self.draws, [each], 9) for n, each in enumerate(self.draws.sample(told), 1)
        }


def instruction(names: list[str]) -> str:
    asked = "\n".join(f"{name}: CRATES" for name in names)
    return f"""\
# What lies where?

How many crates of some goods lie in some warehouses on the evening of the last day? `/app/README.md` says how the
day books and letters under `/app` are to be read. (A number may be negative: then somebody forgot an entry. Tell it
as it comes out.)

Write `/app/answer.txt`: these lines with the number in place of CRATES, and no other line.

```
{asked}
```
"""
