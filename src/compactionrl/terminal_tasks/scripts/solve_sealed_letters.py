"""Reads the archive, resolves what each letter says about the next, and opens them one by one."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from prose import prose, sentences

APP = Path("/app")


def triples(pattern: str, folder: str) -> list[tuple[str, str, str]]:
    found: list[tuple[str, str, str]] = re.findall(pattern, prose(APP / folder))
    return found


CAPTAIN = {
    (year, ship): person for year, ship, person in triples(r"In (\d+) the ([\w ]+) sailed under (\w+)\.", "crews")
}
CAPTAIN |= {(year, ship): person for person, ship, year in triples(r"(\w+) commanded the ([\w ]+) in (\d+)\.", "crews")}
PORT = {(year, ship): town for year, ship, town in triples(r"winter of (\d+) the ([\w ]+) lay at (\w+)\.", "winters")}
HARBOUR = r"(\w+) had the ([\w ]+) in its harbour in the winter of (\d+)\."
PORT |= {(year, ship): town for town, ship, year in triples(HARBOUR, "winters")}
COMMANDED = {(year, person): ship for (year, ship), person in CAPTAIN.items()}
LAY = {(year, town): ship for (year, ship), town in PORT.items()}
BAPTISED = {
    sentence.split()[0]: file.stem
    for file in APP.glob("parish/*.txt")
    for sentence in sentences(file)
    if sentence.endswith("was baptised here")
}
HOPS = [
    (re.compile(r"the captain in (\d+) of (.*)"), CAPTAIN),
    (re.compile(r"the port where in the winter of (\d+) lay (.*)"), PORT),
    (re.compile(r"the ship that in (\d+) sailed under (.*)"), COMMANDED),
    (re.compile(r"the ship that in the winter of (\d+) lay at (.*)"), LAY),
]


def resolve(phrase: str, named: dict[str, str]) -> str:
    for pattern, known in HOPS:
        if match := pattern.fullmatch(phrase):
            return known[match[1], resolve(match[2], named)]
    if match := re.fullmatch(r"the town of baptism of (.*)", phrase):
        return BAPTISED[resolve(match[1], named)]
    if match := re.fullmatch(r"the ship named in the letter under the (\w+)", phrase):
        return named[match[1]]
    return phrase.removeprefix("the ")


def main() -> None:
    text = Path("/solution/instruction.md").read_text()
    opening = re.search(r"Begin with the letter under the (\w+)\.", text)
    named: dict[str, str] = {}
    answers = []
    while opening:
        words = [re.search(rf"Its {which} word is (.*?)\.( |\n|$)", text) for which in ("first", "second")]
        command = [sys.executable, str(APP / "unseal.py"), opening[1], *(resolve(m[1], named) for m in words if m)]
        text = " ".join(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split())
        answers += re.findall(r"Part (\d+) of the testament is (\S+)\.", text)
        named[opening[1]] = re.findall(r"The ship that this letter names is the ([\w ]+)\.", text)[0]
        opening = re.search(r"Next open the (\w+)\.", text)
    (APP / "answer.txt").write_text("".join(f"part {part}: {word}\n" for part, word in answers))


main()
