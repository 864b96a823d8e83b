"""Joins what the statements that stand relate, then numbers everything from the one guest whose place is told."""

from __future__ import annotations

import re
from pathlib import Path

from prose import prose, sentences

APP = Path("/app")
ORDINALS = ["first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth"]
SHAPES = {
    "room": r"the guest of the (\w+) room",
    "town": r"the guest from (\w+)",
    "instrument": r"the guest who played the (\w+)",
    "drink": r"the guest who drank (\w+)",
    "trunk": r"the guest with the (\w+) trunk",
    "book": r"the guest who read the (\w+)",
    "name": r"(\w+)",
}
FACTS = [
    r"(?P<first>.*) and (?P<second>.*) are one and the same",
    r"(?P<first>.*) is nobody else than (?P<second>.*)",
    r"Whoever speaks of (?P<first>.*) speaks of (?P<second>.*)",
    r"(?P<first>.*) arrived (?P<n>\w+) places? before (?P<second>.*)",
    r"(?P<second>.*) arrived (?P<n>\w+) places? after (?P<first>.*)",
    r"Had (?P<second>.*) come (?P<n>\w+) places? earlier, (?P<first>.*) would have met a double",
    r"In the guest book you find (?P<second>.*) (?P<n>\w+) places? below (?P<first>.*)",
]


def node(phrase: str) -> tuple[str, str]:
    phrase = re.sub("^The guest", "the guest", phrase)
    return next((name, match[1]) for name, shape in SHAPES.items() if (match := re.fullmatch(shape, phrase)))


def main() -> None:
    memos = prose(APP / "memos")
    withdrawn = set(re.findall(r"Statement (\d+) was withdrawn", memos))
    withdrawn -= set(re.findall(r"withdrawal of statement (\d+) was cancelled", memos))
    edges: dict[tuple[str, str], list[tuple[tuple[str, str], int]]] = {}
    place: dict[tuple[str, str], int] = {}
    for file in APP.glob("statements/*.txt"):
        if file.stem in withdrawn:
            continue
        for sentence in sentences(file):
            if match := re.fullmatch(r"(.*) was the (\w+) to arrive", sentence):
                place[node(match[1])] = ORDINALS.index(match[2]) + 1
            match = next((match for form in FACTS if (match := re.fullmatch(form, sentence))), None)
            if match is None:
                continue
            first, second = node(match["first"]), node(match["second"])
            later = {"one": 1}.get(match["n"]) or int(match["n"]) if "n" in match.re.groupindex else 0
            edges.setdefault(first, []).append((second, later))
            edges.setdefault(second, []).append((first, -later))
    reached = list(place)
    for known in reached:  # grows on the way
        for other, later in edges[known]:
            if other not in place:
                place[other] = place[known] + later
                reached.append(other)
    instruction = Path("/solution/instruction.md").read_text()
    asked = re.findall(r"^(\w+): PLACE, (.*)$", instruction, re.MULTILINE)
    by_place = {(name, at): value for (name, value), at in place.items()}
    with (APP / "answer.txt").open("w") as out:
        for name, properties in asked:
            at = place["name", name]
            print(f"{name}: {at}, {', '.join(by_place[each.lower(), at] for each in properties.split(', '))}", file=out)


main()
