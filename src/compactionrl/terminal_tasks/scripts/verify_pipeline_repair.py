"""The stages below /app/stages. Reward: (wrong ones that are right now - right ones that are spoiled) / wrong ones, at least 0.

Right results are known here by their hash alone: the agent's own code runs beside these files.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from reading import expected, read, reward

SECONDS = 20
CALL = """
import json, sys
for line in sys.stdin:
    task = json.loads(line)
    try:
        space = {"__name__": task["name"]}
        exec(compile(task["text"], task["name"], "exec"), space)
        results = [[int(value) for value in space["run"](list(values))] for values in task["inputs"]]
    except BaseException:
        results = []
    print("result", task["name"], json.dumps(results), flush=True)
"""


def results(texts: dict[str, str], inputs: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
    """Stage -> what it returns for its inputs; stages that fail are missing."""
    lines = [json.dumps({"name": name, "text": text, "inputs": inputs[name]}) for name, text in texts.items()]
    with tempfile.TemporaryFile("w+", errors="replace") as out:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):  # what was printed before counts
            subprocess.run(
                [sys.executable, "-I", "-B", "-c", CALL],
                cwd="/app", input="\n".join(lines), stdout=out, stderr=subprocess.DEVNULL, text=True, timeout=SECONDS,
            )  # fmt: skip
        out.seek(0)
        printed = [line.split(" ", 2) for line in out if line.startswith("result ")]
    found = {}
    for parts in printed:
        try:
            found[parts[1]] = json.loads(parts[2])
        except (IndexError, ValueError, RecursionError):
            continue
    return found


def digest(values: object) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()


def main() -> None:
    right = expected()
    texts = {name: read(f"/app/stages/{name}.py") or "" for name in right["inputs"]}
    reward(0)  # the agent's own code runs next: should it end this process, that is no failure of the tests
    found = results(texts, right["inputs"])
    broken, score = set(right["broken"]), 0
    for name, wanted in right["results"].items():
        given = found.get(name)
        good = isinstance(given, list) and [digest(values) for values in given] == wanted
        score += good if name in broken else -(not good)
    reward(max(0, score) / len(broken))


main()
