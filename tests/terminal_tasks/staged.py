"""A task staged below a temporary folder: absolute paths become paths in there, so that scripts run without a sandbox."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

from compactionrl.terminal_tasks import TerminalTask

ABSOLUTE = re.compile(r"(?<![\w.])/(app|tests|solution|logs)\b")


class Staged:
    """`app` is what the agent sees as /app."""

    def __init__(self, task: TerminalTask, root: Path) -> None:
        self.root, self.app = root, root / "app"
        for path, text in task.folder().items():
            top, _, rest = path.partition("/")
            if top == "environment" and rest.startswith("app/"):
                self.put(rest, text)
            elif top in ("tests", "solution"):
                self.put(path, self.local(text) if path.endswith((".sh", ".py")) and "/after/" not in path else text)

    def put(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def local(self, text: str) -> str:
        return ABSOLUTE.sub(lambda match: f"{self.root}/{match[1]}", text)

    def solve(self, check: bool = True) -> None:
        subprocess.run(["bash", self.root / "solution/solve.sh"], check=check, capture_output=True, timeout=60)

    def reward(self) -> float:
        """What test.sh writes, whatever its exit status is."""
        file = self.root / "logs/verifier/reward.json"
        file.unlink(missing_ok=True)
        subprocess.run(["bash", self.root / "tests/test.sh"], capture_output=True, timeout=60)
        rewards = json.loads(file.read_text())
        assert list(rewards) == ["reward"]
        assert 0 <= rewards["reward"] <= 1
        return rewards["reward"]

    def answer(self, text: str) -> float:
        """The reward of this answer.txt."""
        (self.app / "answer.txt").write_text(text)
        return self.reward()
