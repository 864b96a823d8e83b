"""Names, dates and small talk that the kinds share."""

from __future__ import annotations

import textwrap

from compactionrl.environments.logbook import Draws

PEOPLE = (
    "Abel", "Agnes", "Anton", "Astrid", "Berta", "Carel", "Clara", "Dagny", "Edvard", "Elin", "Emil", "Frida",
    "Gustav", "Hedda", "Hugo", "Ida", "Ingrid", "Ivar", "Jonas", "Karin", "Klaus", "Lena", "Linus", "Magda",
    "Mattis", "Mira", "Nils", "Nora", "Oskar", "Petra", "Ragna", "Rolf", "Selma", "Signe", "Solveig", "Sven",
    "Tekla", "Thora", "Ulrik", "Vera",
)  # fmt: skip
TOWNS = (
    "Aldhaven", "Birkwall", "Brekke", "Corvik", "Dunmouth", "Eskdale", "Farholm", "Grimstad", "Hallow", "Ilmar",
    "Jorvik", "Kilrush", "Lindau", "Morwen", "Narvik", "Ostmark", "Porthaven", "Quernby", "Rosholm", "Saltash",
    "Tarbert", "Ulvik", "Varde", "Westray", "Yarrow", "Zeeland", "Ambleside", "Bornholm", "Cressing", "Dragor",
)  # fmt: skip
SHIPS = (
    "Amaranth", "Beryl", "Cormorant", "Delfin", "Evening Star", "Fortuna", "Good Hope", "Heron", "Isolde", "Juno",
    "Kestrel", "Leander", "Marlin", "Northern Star", "Ondine", "Providence", "Quickstep", "Rosalind", "Swift",
    "Tern", "Undaunted", "Valiant", "Wayfarer", "Zephyr", "Adelaide", "Boreas", "Calypso", "Dorothea", "Endeavour",
    "Falcon",
)  # fmt: skip
GOODS = (
    "copper wire", "lamp oil", "oak planks", "salted cod", "raw wool", "pine tar", "hemp rope", "window glass",
    "iron nails", "black pepper", "tin plate", "sail cloth", "rye flour", "bees wax", "roof slate", "cotton yarn",
)  # fmt: skip
MONTHS = (
    "January", "February", "March", "April", "May", "June",
    "July", "August", "September", "October", "November", "December",
)  # fmt: skip
MONTH_DAYS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)

CHATTER = (
    "The wind came round to the {side} before noon and {person} complained about the cold.",
    "{person} found the gate of the {side} yard open again and shut it.",
    "A fog stood over the pier until {hour} and nothing could be seen of the {ship}.",
    "The {ship} lay at anchor all day with a torn sail, to the annoyance of {person}.",
    "{person} asked whether the letters from {town} had come, which they had not.",
    "Two gulls nested under the roof of the {side} shed, and {person} let them be.",
    "The lamp at the end of the mole was lit at {hour}, later than the rules allow.",
    "{person} counted the mooring lines twice and was content the second time.",
    "There was talk of a new road to {town}, as there is every year.",
    "Rain until {hour}, then a pale sun over {town}.",
    "{person} and {other} argued about the price of a ticket to {town} and parted as friends.",
    "The kitchen ran out of tea at {hour}; {person} wrote to {town} for more.",
    "Somebody left a bicycle in front of the {side} door; {person} says it is not hers.",
    "The visitors from {town} were shown around by {person} and stayed until {hour}.",
    "{person} would like it to be noted that the {side} stairs are slippery.",
    "Of the {ship} nothing was heard, although {other} had promised to write.",
)


def chatter(draws: Draws, count: int) -> list[str]:
    """`count` sentences that tell nothing that a task asks for."""
    return [
        draws.choice(CHATTER).format(
            side=draws.choice(("north", "south", "east", "west")),
            person=draws.choice(PEOPLE),
            other=draws.choice(PEOPLE),
            town=draws.choice(TOWNS),
            ship=draws.choice(SHIPS),
            hour=f"{draws.between(5, 21)}:{draws.between(0, 59):02}",
        )
        for _ in range(count)
    ]


def among(draws: Draws, sentences: list[str], count: int) -> str:
    """The sentences in their order among `count` sentences of small talk, as lines of 76 characters at most.

    Sentences go on over line ends: whoever searches lines for words finds halves of what is told.
    """
    said = chatter(draws, count)
    places = sorted(draws.between(0, len(said)) for _ in sentences)
    for place, sentence in reversed(list(zip(places, sentences, strict=True))):
        said.insert(place, sentence)
    return textwrap.fill(" ".join(said), 76, break_long_words=False, break_on_hyphens=False) + "\n"


def date(day: int) -> str:
    """Day 0 is the first of January of a year that is no leap year: "14 March"."""
    for month, length in zip(MONTHS, MONTH_DAYS, strict=True):
        if day < length:
            return f"{day + 1} {month}"
        day -= length
    raise ValueError("A year has 365 days.")


def codes(draws: Draws, count: int, digits: int) -> list[str]:
    """`count` hexadecimal numbers of so many digits, no one twice."""
    found: dict[str, None] = {}
    while len(found) < count:
        found[f"{draws.between(0, 16**digits - 1):0{digits}x}"] = None
    return list(found)


def numbers(draws: Draws, count: int, low: int, high: int) -> list[int]:
    """`count` integers of [low, high], no one twice."""
    return draws.sample(range(low, high + 1), count)
