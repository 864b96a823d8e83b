"""Reads what a last holds when, then all entries in order, and adds up what stands in the end."""

from __future__ import annotations

import re
from pathlib import Path

from prose import prose, sentences

APP = Path("/app")
HOLDS = re.compile(r"From day (\d+) on a last of ([\w ]+) holds (\d+) crates\.")
ENTRY = re.compile(r"Entry (\d+): (.*)")
STRUCK = re.compile(r"entry (\d+) (?:is struck out|must be forgotten)")
RIGHT = re.compile(r"(?:the number in|what) entry (\d+) (?:should be|tells has to read) (\d+)")
AMOUNT = r"(?P<count>\d+) (?P<unit>lasts|crates) of (?P<good>[\w ]+?)"
MOVES = [
    re.compile(form.replace("AMOUNT", AMOUNT))
    for form in (
        r"AMOUNT were carried from the (?P<source>[\w ]+) to the (?P<target>[\w ]+)",
        r"the (?P<target>[\w ]+) got AMOUNT from the (?P<source>[\w ]+)",
        r"AMOUNT left the (?P<source>[\w ]+) for \w+",
        r"the (?P<source>[\w ]+) gave AMOUNT to a ship for \w+",
        r"AMOUNT came into the (?P<target>[\w ]+) from \w+",
        r"the (?P<target>[\w ]+) took AMOUNT in, sent from \w+",
    )
]


def main() -> None:
    letters = prose(APP / "letters")
    holds: dict[str, dict[int, int]] = {}
    for day, good, crates in HOLDS.findall(letters):
        holds.setdefault(good, {})[int(day)] = int(crates)
    moves: dict[str, tuple[int, int, str, str, str]] = {}
    """Entry -> number, crates of a unit, good, source, target."""
    for page in sorted(APP.glob("days/day-*.txt")):
        day = int(page.stem[-2:])
        for number, text in (match.groups() for match in map(ENTRY.fullmatch, sentences(page)) if match):
            if match := STRUCK.fullmatch(text):
                del moves[match[1]]
            elif match := RIGHT.fullmatch(text):
                moves[match[1]] = (int(match[2]), *moves[match[1]][1:])
            else:
                move = next(match.groupdict() for form in MOVES if (match := form.fullmatch(text)))
                good = move["good"]
                unit = holds[good][max(each for each in holds[good] if each <= day)] if move["unit"] == "lasts" else 1
                moves[number] = int(move["count"]), unit, good, move.get("source", ""), move.get("target", "")
    opening = re.findall(r"^([\w ]+) in the ([\w ]+): (\d+) crates$", (APP / "opening.txt").read_text(), re.MULTILINE)
    stock = {(good, place): int(crates) for good, place, crates in opening}
    for count, unit, good, source, target in moves.values():
        if source:
            stock[good, source] -= count * unit
        if target:
            stock[good, target] += count * unit
    asked = re.findall(
        r"^(([\w ]+) in the ([\w ]+)): CRATES$", Path("/solution/instruction.md").read_text(), re.MULTILINE
    )
    (APP / "answer.txt").write_text("".join(f"{name}: {stock[good, place]}\n" for name, good, place in asked))


main()
