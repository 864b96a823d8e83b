"""Joins what the statements that stand relate, then numbers everything from the one guest whose place is told."""

from __future__ import annotations

import re
from pathlib import Path

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


def node(phrase: str) -> tuple[str, str]:
    phrase = re.sub("^The guest", "the guest", phrase)
    return next((name, match[1]) for name, shape in SHAPES.items() if (match := re.fullmatch(shape, phrase)))


def main() -> None:
    memos = "\n".join(file.read_text() for file in APP.glob("memos/*.txt"))
    withdrawn = set(re.findall(r"Statement (\d+) was withdrawn", memos))
    withdrawn -= set(re.findall(r"withdrawal of statement (\d+) was cancelled", memos))
    edges: dict[tuple[str, str], list[tuple[tuple[str, str], int]]] = {}
    place: dict[tuple[str, str], int] = {}
    for file in APP.glob("statements/*.txt"):
        if file.stem in withdrawn:
            continue
        for line in file.read_text().splitlines():
            if match := re.fullmatch(r"(.*) and (.*) are one and the same\.", line):
                first, second, later = node(match[1]), node(match[2]), 0
            elif match := re.fullmatch(r"(.*) arrived (\w+) places? (before|after) (.*)\.", line):
                later = 1 if match[2] == "one" else int(match[2])
                first, second = node(match[1]), node(match[4])
                later *= 1 if match[3] == "before" else -1
            elif match := re.fullmatch(r"(.*) was the (\w+) to arrive\.", line):
                place[node(match[1])] = ORDINALS.index(match[2]) + 1
                continue
            else:
                continue
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
