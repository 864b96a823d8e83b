"""Sealed letters: each opens with two words that are to be found in an archive, and says where the next two are to be looked for.

To be carried over: the ships that earlier letters named (later ones ask for them), and the parts of the testament read so far.
"""

from __future__ import annotations

import hashlib
import hmac

from compactionrl.environments.logbook import Draws
from compactionrl.terminal_tasks.task import Draft, script
from compactionrl.terminal_tasks.words import PEOPLE, SHIPS, TOWNS, among, numbers

SIZES = {"easy": (5, 4, 10, 2), "medium": (10, 6, 16, 3), "hard": (16, 9, 24, 4)}
"""Letters, years, ships, hops from what a letter tells to a word that opens the next one."""

SEALS = (
    "anchor", "bell", "crown", "dolphin", "eagle", "fox", "griffin", "harp", "ivy", "key", "lion", "moon", "owl", "rose", "swan",
    "tower",
)  # fmt: skip
CREWS = ("In {year} the {ship} sailed under {other}.", "{other} commanded the {ship} in {year}.")
WINTERS = (
    "In the winter of {year} the {ship} lay at {other}.",
    "{other} had the {ship} in its harbour in the winter of {year}.",
)
ROUNDS = 50_000
README = """\
# The archive

- `crews/YEAR.txt` tells under whom each ship sailed that year.
- `winters/YEAR.txt` tells where each ship lay in the winter of that year.
- `parish/TOWN.txt` tells who was baptised there.
- `letters/SEAL.sealed` are the letters. `python3 unseal.py SEAL FIRST-WORD SECOND-WORD` opens one. (A ship's name
  is one word here, `Good Hope` as well: write it in quotes. Letter case does not matter.)
"""


def make(grade: str, draws: Draws) -> Draft:
    letters, years, ships, hops = SIZES[grade]
    archive = _Archive(draws, years, ships)
    seals = draws.sample(SEALS, letters)
    named = dict(zip(seals, draws.sample(archive.ships, letters) if letters <= ships else [], strict=True))
    parts = draws.sample(range(1, letters + 1))
    words = [f"{draws.choice(TOWNS)}-{number}" for number in numbers(draws, letters, 100, 999)]
    riddles = [
        [archive.riddle({each: named[each] for each in seals[:n]}, hops) for _ in range(2)] for n in range(letters)
    ]
    files = {"README.md": README, "unseal.py": script("unseal"), **archive.files()}
    for n, seal in enumerate(seals):
        sentences = [
            f"Part {parts[n]} of the testament is {words[n]}.",
            f"The ship that this letter names is the {named[seal]}.",
        ]
        if n + 1 < letters:
            (first, _), (second, _) = riddles[n + 1]
            sentences += [
                f"Next open the {seals[n + 1]}.",
                f"Its first word is {first}.",
                f"Its second word is {second}.",
            ]
        else:
            sentences.append("This is the last letter.")
        text = among(draws, sentences, 8)
        files[f"letters/{seal}.sealed"] = seal_letter(text, [word for _, word in riddles[n]], seal)
    return Draft(
        instruction=instruction(seals[0], riddles[0][0][0], riddles[0][1][0], letters),
        files=files,
        expected={f"part {part}": word for part, word in sorted(zip(parts, words, strict=True))},
        solve="sealed_letters",
    )


class _Archive:
    """Who sailed what when, who lay where, who was baptised where."""

    def __init__(self, draws: Draws, years: int, ships: int) -> None:
        self.draws = draws
        self.ships = draws.sample(SHIPS, ships)
        self.years = range(1841, 1841 + years)
        self.towns = draws.sample(TOWNS, ships)
        self.captain = {year: dict(zip(self.ships, draws.sample(PEOPLE, ships), strict=True)) for year in self.years}
        self.port = {year: dict(zip(self.ships, draws.sample(self.towns, ships), strict=True)) for year in self.years}
        self.baptised = {person: draws.choice(self.towns) for person in PEOPLE}

    def riddle(self, named: dict[str, str], hops: int) -> tuple[str, str]:
        """A phrase and the word that it stands for. It starts at a ship of `named` (seal -> ship), if there is one yet."""
        if named:
            seal = self.draws.choice(list(named))
            phrase, kind, word = f"the ship named in the letter under the {seal}", "ship", named[seal]
        else:
            word = self.draws.choice(self.ships)
            phrase, kind = f"the {word}", "ship"
        for _ in range(hops):
            phrase, kind, word = self._hop(phrase, kind, word)
        return phrase, word

    def _hop(self, phrase: str, kind: str, word: str) -> tuple[str, str, str]:
        year = self.draws.choice(self.years)
        if kind == "ship" and self.draws.random() < 0.5:
            return f"the captain in {year} of {phrase}", "person", self.captain[year][word]
        if kind == "ship":
            return f"the port where in the winter of {year} lay {phrase}", "town", self.port[year][word]
        if kind == "town":
            (ship,) = (each for each in self.ships if self.port[year][each] == word)
            return f"the ship that in the winter of {year} lay at {phrase}", "ship", ship
        years = [each for each in self.years if word in self.captain[each].values()]
        if self.draws.random() < 0.5:
            year = self.draws.choice(years)
            (ship,) = (each for each in self.ships if self.captain[year][each] == word)
            return f"the ship that in {year} sailed under {phrase}", "ship", ship
        return f"the town of baptism of {phrase}", "town", self.baptised[word]

    def files(self) -> dict[str, str]:
        found = {}
        for year in self.years:
            crews = [self._either(CREWS, year, ship, person) for ship, person in self.captain[year].items()]
            winters = [self._either(WINTERS, year, ship, town) for ship, town in self.port[year].items()]
            found[f"crews/{year}.txt"] = among(self.draws, self.draws.sample(crews), 20)
            found[f"winters/{year}.txt"] = among(self.draws, self.draws.sample(winters), 20)
        for town in self.towns:
            lines = [f"{person} was baptised here." for person in PEOPLE if self.baptised[person] == town]
            found[f"parish/{town}.txt"] = among(self.draws, lines, 8)
        return found

    def _either(self, forms: tuple[str, str], year: int, ship: str, other: str) -> str:
        return self.draws.choice(forms).format(year=year, ship=ship, other=other)


def seal_letter(text: str, words: list[str], seal: str) -> str:
    """Hexadecimal: a tag of 32 bytes, then the text under a key stream. Trying a pair of words takes a while, on purpose."""
    key = hashlib.pbkdf2_hmac("sha256", "|".join(words).lower().encode(), seal.encode(), ROUNDS)
    plain = text.encode()
    stream = b"".join(hashlib.sha256(key + n.to_bytes(4, "big")).digest() for n in range(len(plain) // 32 + 1))
    sealed = bytes(a ^ b for a, b in zip(plain, stream, strict=False))
    return (hmac.digest(key, sealed, "sha256") + sealed).hex() + "\n"


def instruction(seal: str, first: str, second: str, letters: int) -> str:
    return f"""\
# The testament

A testament was cut into {letters} parts, and each part put into a sealed letter. A letter opens with two words;
each letter tells where the words for the next one are to be found: in the archive under `/app`, which
`/app/README.md` explains. Begin with the letter under the {seal}.

Its first word is {first}.
Its second word is {second}.

Write `/app/answer.txt`, one line for each part, in any order, and no other line:

```
part 1: WORD-AND-NUMBER
...
part {letters}: WORD-AND-NUMBER
```
"""
