"""The package /app/harbour. Reward: (accepted changes carried out - other changes carried out) / accepted changes, at least 0,
and 0 if `python3 -m harbour` does not print what it printed.

What a right run prints is known here by its hash alone: the agent's own code runs beside these files.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from reading import expected, read, reward

SECONDS = 20
CALL = """
import importlib, json, sys
sys.path.insert(0, "/app")
for call in json.load(sys.stdin):
    try:
        function = getattr(importlib.import_module("harbour." + call["module"]), call["function"])
        first, second = call["parameters"]
        print(int(function(**{first: call["arguments"][0], second: call["arguments"][1]})))
    except BaseException:
        print("none")
"""


def run(arguments: list[str], given: str = "") -> str:
    """What a Python process prints, or nothing if it fails or does not end in time."""
    command = [sys.executable, "-B", *arguments]
    try:
        ended = subprocess.run(
            command, cwd="/app", input=given, capture_output=True, text=True, timeout=SECONDS, errors="replace"
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return ended.stdout if ended.returncode == 0 else ""


def digest(text: str) -> str:
    return hashlib.sha256(text.strip().encode()).hexdigest()


def sources() -> dict[str, str]:
    """Module -> text, of the package's ordinary files."""
    texts = {path.stem: read(path) for path in sorted(Path("/app/harbour").glob("*.py"))[:500]}
    return {module: text for module, text in texts.items() if text is not None}


def function(text: str, name: str) -> ast.FunctionDef | None:
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return next((node for node in body if isinstance(node, ast.FunctionDef) and node.name == name), None)


def shaped(wanted: dict[str, Any], texts: dict[str, str]) -> bool:
    """Whether the function stands where it should, with the parameters that it should have, and nothing old is left."""
    found = function(texts.get(wanted["module"], ""), wanted["function"])
    if found is None:
        return False
    plain, named = [each.arg for each in found.args.args], [each.arg for each in found.args.kwonlyargs]
    split = 1 if wanted["keyword_only"] else 2
    if (plain, named) != (wanted["parameters"][:split], wanted["parameters"][split:]):
        return False
    if (
        found.args.posonlyargs
        or found.args.vararg
        or found.args.kwarg
        or found.args.defaults
        or any(found.args.kw_defaults)
    ):
        return False
    left = [(name, text) for name in wanted["gone"] for text in texts.values()]
    left += [(name, texts.get(module, "")) for module, name in wanted["gone_from"].items()]
    return not any(re.search(rf"\b{name}\b", text) for name, text in left)


def main() -> None:
    right, texts = expected(), sources()
    reward(0)  # the agent's own code runs next: should it end this process, that is no failure of the tests
    if any(digest(run(["-m", "harbour", *numbers.split()])) != value for numbers, value in right["output"].items()):
        return reward(0)
    changes = right["accepted"] + right["others"]
    calls = [{key: each[key] for key in ("module", "function", "parameters", "arguments")} for each in changes]
    values = run(["-c", CALL], json.dumps(calls)).split()
    values += ["none"] * (len(changes) - len(values))
    good = [
        shaped(change, texts) and digest(value) == change["value"]
        for change, value in zip(changes, values, strict=False)
    ]
    done, kept = good[: len(right["accepted"])], good[len(right["accepted"]) :]
    return reward(max(0, sum(done) - kept.count(False)) / len(done))


main()
