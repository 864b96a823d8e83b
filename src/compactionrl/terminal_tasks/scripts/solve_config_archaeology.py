"""Reads the files of January, carries the tickets out by their days, and looks the answers up."""

from __future__ import annotations

import re
from configparser import ConfigParser
from pathlib import Path

APP = Path("/app")
MONTHS = [
    "January", "February", "March", "April", "May", "June",
    "July", "August", "September", "October", "November", "December",
]  # fmt: skip
SET = re.compile(r"Set `(\w+)` to (\d+) in section \[(\w+)\] of `(\S+)`")
DELETE = re.compile(r"Delete `(\w+)` from section \[(\w+)\] of `(\S+)`")
BACK = re.compile(r"Roll (CHG-\d+) back")
DONE = re.compile(r"Carried out by \w+ on (\d+) (\w+)\.")
RENAMED = re.compile(r"the setting `(\w+)` is called `(\w+)`")
UNTIL = re.compile(r"at the end of (\d+) (\w+)\.")


def day(match: re.Match[str]) -> tuple[int, int]:
    return MONTHS.index(match[2]), int(match[1])


def main() -> None:
    instruction = Path("/solution/instruction.md").read_text()
    newest = {m[1]: m[2] for file in APP.glob("notices/*.txt") for m in RENAMED.finditer(file.read_text())}
    lines: dict[tuple[str, str, str], str] = {}
    for file in APP.glob("config/**/*.ini"):
        parser = ConfigParser()
        parser.read(file)
        for section in parser.sections():
            for name, entry in parser[section].items():
                lines[str(file.relative_to(APP)), section, newest.get(name, name)] = entry

    asked = UNTIL.search(instruction)
    assert asked
    texts = {file.stem: file.read_text() for file in APP.glob("changes/*.txt")}
    done = {number: day(match) for number, text in texts.items() if (match := DONE.search(text))}
    before: dict[str, tuple[tuple[str, str, str], str | None]] = {}
    value: str | None
    for number in sorted((each for each in done if done[each] <= day(asked)), key=lambda each: done[each]):
        text = texts[number]
        if match := SET.search(text):
            line, value = (match[4], match[3], newest.get(match[1], match[1])), str(match[2])
        elif match := DELETE.search(text):
            line, value = (match[3], match[2], newest.get(match[1], match[1])), None
        else:
            match = BACK.search(text)
            assert match
            line, value = before[match[1]]
        before[number] = line, lines.get(line)
        if value is None:
            lines.pop(line, None)
        else:
            lines[line] = value

    with (APP / "answer.txt").open("w") as out:
        for name in re.findall(r"^(\w+ \w+ \w+): VALUE$", instruction, re.MULTILINE):
            service, region, setting = name.split()
            own = f"config/services/{service}.ini"
            places = [(own, region), (own, "all"), (f"config/regions/{region}.ini", "all"), ("config/base.ini", "all")]
            print(f"{name}: {next(lines[(*at, setting)] for at in places if (*at, setting) in lines)}", file=out)


main()
