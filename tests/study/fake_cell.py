"""Stands in for `compactionrl.study.cell`, without torch: `fake_cell.py CONTROL FOLDER`.

CONTROL/plan.json says what becomes of a cell, by its key: {"ticks": 3, "exit": 1, "result": false, "late exit": 1,
"deaf": true, "value": 7, "base": "x"}.
CONTROL/events gets a line at the start and at the end of each process. A cell works in ticks and keeps count of them on
disk, goes on with the next one when it is started again, and stops when its stdin ends, all as the real one does.
"""

import fcntl
import json
import os
import select
import sys
import time
from pathlib import Path
from typing import NoReturn

TICK = 0.01


def main(control: Path, folder: Path) -> None:
    spec = json.loads((folder / "cell.json").read_text())
    key = "/".join(folder.parts[-3:])
    plan = json.loads((control / "plan.json").read_text()).get(key, {})

    def event(name: str) -> None:
        line = json.dumps({"event": name, "key": key, "pid": os.getpid()}) + "\n"
        handle = os.open(control / "events", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(handle, line.encode())
        os.close(handle)

    def leave(name: str, code: int) -> NoReturn:
        event(name)
        sys.exit(code)

    event("start")
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if missing := [path for path in spec["policies"].values() if not Path(path).is_dir()]:
            print("there is no policy in", *missing)
            leave("no policy", 3)
        ticks = folder / "ticks"
        for number in range(int(ticks.read_text()) if ticks.exists() else 0, plan.get("ticks", 2)):
            if not plan.get("deaf") and select.select([0], [], [], 0)[0]:
                leave("stopped", 130)
            time.sleep(TICK)
            write(ticks, str(number + 1))
        if "exit" in plan:
            print("this is why")
            leave("failed", plan["exit"])
        if spec["kind"] != "swap":
            policy_of(spec, folder).mkdir(parents=True, exist_ok=True)
        if plan.get("result", True):
            write(folder / "result.json", json.dumps(result(key, plan)))
        if "late exit" in plan:
            leave("failed", plan["late exit"])
        event("end")


def policy_of(spec: dict, folder: Path) -> Path:
    """Where the real program would leave the policy."""
    if spec["kind"] == "base":
        return folder / "base"
    return folder / "checkpoints" / f"step-{spec['config']['train']['steps']:06}" / "policy"


def result(key: str, plan: dict) -> dict:
    """What depends on the cell and its plan alone, and the time, which does not."""
    return {
        "base": plan.get("base", f"base of {key.rpartition('/')[2]}"),
        "evaluation": {"x4": {"outcomes": "01-1", "value": plan.get("value", 0)}},
        "seconds": {"wall": time.time(), "cpu": 0.5},
    }


def write(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}")
    partial.write_text(text)
    partial.replace(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
