"""Reads the files of January, carries the tickets out by their days, and looks the answers up."""

from __future__ import annotations

import re
from configparser import ConfigParser
from pathlib import Path

from prose import prose

APP = Path("/app")
MONTHS = [
    "January", "February", "March", "April", "May", "June",
    "July", "August", "September", "October", "November", "December",
]  # fmt: skip
SET = [
    re.compile(r"Set `(?P<name>\w+)` to (?P<value>\d+) in section \[(?P<section>\w+)\] of `(?P<file>\S+)`"),
    re.compile(
        r"In `(?P<file>\S+)`, section \[(?P<section>\w+)\], the right value of `(?P<name>\w+)` would be (?P<value>\d+)"
    ),
]
DELETE = [
    re.compile(r"Delete `(?P<name>\w+)` from section \[(?P<section>\w+)\] of `(?P<file>\S+)`"),
    re.compile(r"In `(?P<file>\S+)`, section \[(?P<section>\w+)\] should do without `(?P<name>\w+)`"),
]
BACK = [re.compile(r"Roll (CHG-\d+) back"), re.compile(r"as they were before (CHG-\d+)")]
DONE = [re.compile(r"Carried out by \w+ on (\d+) (\w+)\."), re.compile(r"\w+ did so on (\d+) (\w+)\.")]
RENAMED = re.compile(r"the setting `(\w+)` is called `(\w+)`")
UNTIL = re.compile(r"at the end of (\d+) (\w+)\.")


def day(match: re.Match[str]) -> tuple[int, int]:
    return MONTHS.index(match[2]), int(match[1])


def search(patterns: list[re.Pattern[str]], text: str) -> re.Match[str] | None:
    return next((match for pattern in patterns if (match := pattern.search(text))), None)


def where(match: re.Match[str], newest: dict[str, str]) -> tuple[str, str, str]:
    return match["file"], match["section"], newest.get(match["name"], match["name"])


def main() -> None:
    instruction = Path("/solution/instruction.md").read_text()
    newest = dict(RENAMED.findall(prose(APP / "notices")))
    lines: dict[tuple[str, str, str], str] = {}
    for file in APP.glob("config/**/*.ini"):
        parser = ConfigParser()
        parser.read(file)
        for section in parser.sections():
            for name, entry in parser[section].items():
                lines[str(file.relative_to(APP)), section, newest.get(name, name)] = entry

    asked = UNTIL.search(instruction)
    assert asked
    texts = {file.stem: " ".join(file.read_text().split()) for file in APP.glob("changes/*.txt")}
    done = {number: day(match) for number, text in texts.items() if (match := search(DONE, text))}
    before: dict[str, tuple[tuple[str, str, str], str | None]] = {}
    value: str | None
    for number in sorted((each for each in done if done[each] <= day(asked)), key=lambda each: done[each]):
        text = texts[number]
        if match := search(SET, text):
            line, value = where(match, newest), str(match["value"])
        elif match := search(DELETE, text):
            line, value = where(match, newest), None
        else:
            match = search(BACK, text)
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
