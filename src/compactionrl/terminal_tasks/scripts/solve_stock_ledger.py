"""Reads what a last holds when, then all entries in order, and adds up what stands in the end."""

from __future__ import annotations

import re
from pathlib import Path

APP = Path("/app")
HOLDS = re.compile(r"From day (\d+) on a last of ([\w ]+) holds (\d+) crates\.")
ENTRY = re.compile(r"^Entry (\d+): (.*)$", re.MULTILINE)
CARRIED = re.compile(r"(\d+) (lasts|crates) of ([\w ]+) were carried from the ([\w ]+) to the ([\w ]+)\.")
LEFT = re.compile(r"(\d+) (lasts|crates) of ([\w ]+) left the ([\w ]+) for \w+\.")
CAME = re.compile(r"(\d+) (lasts|crates) of ([\w ]+) came into the ([\w ]+) from \w+\.")


def main() -> None:
    letters = "\n".join(file.read_text() for file in APP.glob("letters/*.txt"))
    holds: dict[str, dict[int, int]] = {}
    for day, good, crates in HOLDS.findall(letters):
        holds.setdefault(good, {})[int(day)] = int(crates)
    moves: dict[str, tuple[int, int, str, str, str]] = {}
    """Entry -> number, crates of a unit, good, source, target."""
    for page in sorted(APP.glob("days/day-*.txt")):
        day = int(page.stem[-2:])
        for number, text in ENTRY.findall(page.read_text()):
            if match := re.fullmatch(r"entry (\d+) is struck out\.", text):
                del moves[match[1]]
            elif match := re.fullmatch(r"the number in entry (\d+) should be (\d+)\.", text):
                moves[match[1]] = (int(match[2]), *moves[match[1]][1:])
            else:
                match = CARRIED.fullmatch(text) or LEFT.fullmatch(text) or CAME.fullmatch(text)
                assert match, text
                unit = 1
                if match[2] == "lasts":
                    unit = holds[match[3]][max(each for each in holds[match[3]] if each <= day)]
                came = match.re is CAME
                target = match[5] if match.re is CARRIED else match[4] if came else ""
                moves[number] = (int(match[1]), unit, match[3], "" if came else match[4], target)
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
