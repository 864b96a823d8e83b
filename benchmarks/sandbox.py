"""What a sandbox costs, and what hostile commands get out of it: the tables of docs/sandboxes.md.

python benchmarks/sandbox.py [--repeats 100] [--output docs]

Times are medians, in milliseconds, as root (if this is root) and as an ordinary user, beside a bare `bash -c` of Python's
`subprocess`. `start` includes the first command of a fresh sandbox. The attempts are those of tests/sandboxes/hostile.py.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from compactionrl.sandboxes.bwrap import BwrapSandbox

HERE = Path(__file__).resolve().parent if "__file__" in globals() else Path()
TESTS = HERE.parent / "tests" / "sandboxes"
FOLDER_FILES, FOLDER_BYTES = 100, 10_000
Times = dict[str, list[float]]


async def measured(times: Times, name: str, work: Awaitable[Any]) -> None:
    began = time.perf_counter()
    await work
    times[name].append((time.perf_counter() - began) * 1000)


async def measure(repeats: int) -> dict[str, float]:
    """Medians in milliseconds. Every repeat does everything once."""
    times: Times = defaultdict(list)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = folder / "source"
        source.mkdir()
        for number in range(FOLDER_FILES):
            (source / str(number)).write_bytes(os.urandom(FOLDER_BYTES))
        running = {shell: BwrapSandbox(shell=shell) for shell in ("exec", "persistent")}
        for sandbox in running.values():
            await sandbox.start()
            await sandbox.exec("true")
        for _ in range(repeats):
            await once(times, running["exec"], running["persistent"], folder)
        for sandbox in running.values():
            await sandbox.stop()
    return {name: round(statistics.median(values), 2) for name, values in times.items()}


async def once(times: Times, fresh: BwrapSandbox, shell: BwrapSandbox, folder: Path) -> None:
    await measured(times, "`bash -c true`, no sandbox", asyncio.to_thread(subprocess.run, ["bash", "-c", "true"]))
    await measured(times, "command, new process: `true`", fresh.exec("true"))
    await measured(times, "command, new process: `/bin/true`", fresh.exec("/bin/true"))
    await measured(times, "command, persistent shell: `true`", shell.exec("true"))
    await measured(times, "command, persistent shell: `/bin/true`", shell.exec("/bin/true"))
    await measured(times, "upload of a file of 10 kB", fresh.upload_file(folder / "source/0", "/app/file"))
    await measured(times, "download of a file of 10 kB", fresh.download_file("/app/file", folder / "file"))
    await measured(times, "upload of 100 files, 1 MB", fresh.upload_dir(folder / "source", "/app/many"))
    await measured(times, "download of 100 files, 1 MB", fresh.download_dir("/app/many", folder / "many"))
    sandbox = BwrapSandbox()
    await measured(times, "start", sandbox.start())
    await measured(times, "first command", sandbox.exec("true"))
    await measured(times, "stop", sandbox.stop())


def as_users(script: Path, *arguments: str) -> dict[str, dict[str, Any]]:
    """What a script prints as JSON, by the user who ran it."""
    sys.path.insert(0, str(TESTS))
    from ordinary_user import as_nobody, as_self

    with ExitStack() as stack:
        starts = {"root" if os.geteuid() == 0 else "ordinary user": as_self()}
        if os.geteuid() == 0:
            starts["ordinary user"] = stack.enter_context(as_nobody())
        return {
            user: json.loads(
                subprocess.run(
                    [*start, "-c", script.read_text(), *arguments], env=env, capture_output=True, text=True, check=True
                ).stdout
            )
            for user, (start, env) in starts.items()
        }


def times_table(found: dict[str, dict[str, float]]) -> str:
    first = next(iter(found.values()))
    lines = [f"| ms, median | {' | '.join(found)} |", f"|---|{'---:|' * len(found)}"]
    return "\n".join(
        lines + [f"| {name} | {' | '.join(str(each[name]) for each in found.values())} |" for name in first]
    )


def attempts_table(found: dict[str, dict[str, Any]]) -> str:
    """Attempts, and what came of them for the first user; what came of them for the others is in the sums."""
    lines = []
    for user, report in found.items():
        rows = report["rows"]
        held = sum(row["held"] for row in rows)
        slowest = max(row["seconds"] for row in rows)
        lines.append(
            f"As {user}: {len(rows)} attempts, {held} held, {len(rows) - held} escapes; {len(report['changed'])} things changed "
            f"on the host, {len(report['leaked'])} processes, mounts or files left; the longest took {slowest} s, and our own "
            f"process took {report['megabytes']} MB.\n"
        )
    users = list(found)
    lines += [f"| | attempt | {' | '.join(f'as {user}' for user in users)} |", f"|---|---|{'---|' * len(users)}"]
    for rows in zip(*[report["rows"] for report in found.values()], strict=True):
        cells = [cell(row) for row in rows]
        lines.append(f"| {rows[0]['group']} | {rows[0]['attempt']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def cell(row: dict[str, Any]) -> str:
    text = row["outcome"].replace("|", "\\|").replace("`", "'").replace("<", "&lt;")
    return text if row["held"] else f"**not held**: {text}"


def fill(page: str, name: str, text: str) -> str:
    """The page with what stands between the marks of `name` replaced."""
    begin, end = f"<!-- {name}: written by benchmarks/sandbox.py -->", f"<!-- end of {name} -->"
    before, rest = page.split(begin)
    return f"{before}{begin}\n{text}\n{end}{rest.split(end)[1]}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=100)
    parser.add_argument("--output", type=Path, default=HERE.parent / "docs", metavar="FOLDER")
    parser.add_argument(
        "--measure", action="store_true", help="Print the times of this user as JSON, and write nothing."
    )
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(asyncio.run(measure(options.repeats))))
        return
    machine = (
        f"Measured on {os.cpu_count()} cores with a load of {os.getloadavg()[0]:.0f}, Linux {platform.release()}, "
    )
    machine += f"{options.repeats} repeats.\n\n"
    times = times_table(as_users(Path(__file__), "--measure", "--repeats", str(options.repeats)))
    attempts = attempts_table(as_users(TESTS / "hostile.py"))
    page = options.output / "sandboxes.md"
    page.write_text(fill(fill(page.read_text(), "times", machine + times), "attempts", attempts))


if __name__ == "__main__":
    main()
