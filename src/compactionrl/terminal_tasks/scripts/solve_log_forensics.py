"""Reads the clocks from the hosts' notes and every start from the logs, then goes back from start to start."""

from __future__ import annotations

import re
from pathlib import Path

from prose import prose

APP = Path("/app")
SKEW = re.compile(r"From the first of May on the clock of (\w+) has been (\d+) minutes and (\d+) seconds (fast|slow)")
STARTS = [
    re.compile(r"runner: task (?P<task>\w+) started for task (?P<parent>\w+) of (?P<host>\w+)"),
    re.compile(r"spool: begin (?P<task>\w+) <- (?P<host>\w+)/(?P<parent>\w+)"),
    re.compile(r"job event=start id=(?P<task>\w+) parent=(?P<parent>\w+)@(?P<host>\w+)"),
    re.compile(r"runner: task (?P<task>\w+) started by (?P<account>\w+) from (?P<address>[\d.]+)"),
    re.compile(r"spool: begin (?P<task>\w+) <- login (?P<account>\w+) (?P<address>[\d.]+)"),
    re.compile(r"job event=start id=(?P<task>\w+) login=(?P<account>\w+)@(?P<address>[\d.]+)"),
]
ASKED = re.compile(r"On (\d+) May 2031 at (\S+) true time.*?host `(\w+)`.*?`(\w+)` of that host", re.DOTALL)


def seconds(day: int, clock: str) -> int:
    hours, minutes, rest = map(int, clock.split(":"))
    return ((day * 24 + hours) * 60 + minutes) * 60 + rest


def clock(time: int) -> str:
    return f"{time // 3600 % 24:02}:{time // 60 % 60:02}:{time % 60:02}"


def skews() -> dict[str, int]:
    found = SKEW.finditer(prose(APP / "hosts"))
    return {m[1]: (int(m[2]) * 60 + int(m[3])) * (1 if m[4] == "fast" else -1) for m in found}


def starts() -> dict[tuple[str, str], list[tuple[int, dict[str, str]]]]:
    """(host, task) -> true times and causes."""
    skew = skews()
    found: dict[tuple[str, str], list[tuple[int, dict[str, str]]]] = {}
    for log in APP.glob("logs/*/*.log"):
        host, day = log.parent.name, int(log.stem[-2:])
        for line in log.read_text().splitlines():
            time, _, text = line.partition(" ")
            for match in filter(None, (pattern.fullmatch(text) for pattern in STARTS)):
                entry = (seconds(day, time) - skew[host], match.groupdict())
                found.setdefault((host, match["task"]), []).append(entry)
    return found


def main() -> None:
    asked = ASKED.search(Path("/solution/instruction.md").read_text())
    assert asked
    time, host, task = seconds(int(asked[1]), asked[2]), asked[3], asked[4]
    known = starts()
    lines: list[str] = []
    while True:
        time, cause = max((entry for entry in known[host, task] if entry[0] < time), key=lambda entry: entry[0])
        lines.append(f"step {len(lines) + 1}: {host} {task} {clock(time)}")
        if "account" in cause:
            break
        host, task = cause["host"], cause["parent"]
    lines += [f"account: {cause['account']}", f"address: {cause['address']}"]
    (APP / "answer.txt").write_text("\n".join(lines) + "\n")


main()
