"""Judges what is in a sandbox by a Harbor task's tests, which get there only now."""

from __future__ import annotations

import time
from dataclasses import dataclass
from math import ceil
from pathlib import Path

from compactionrl.environments.harbor_settings import VerifierTable, resolved
from compactionrl.environments.protocol import Verdict
from compactionrl.environments.reward import VerifierError, read_rewards, reward_of
from compactionrl.environments.screen import plain
from compactionrl.sandboxes.protocol import TIMED_OUT, ExecResult, Sandbox

LOGS = "/logs/verifier"
MOST_BYTES = 10_000
"""Of a reward file."""
SHOWN = 2_000
"""Bytes of the end of what test.sh printed that are kept with the rollout."""
SECONDS = 60
"""For each command besides test.sh."""
MISSING = 44
PREPARE = f"rm -rf /tests {LOGS} && mkdir -p /tests {LOGS} && chmod 777 {LOGS}"


@dataclass(frozen=True)
class HarborVerifier:
    """`tests`: the task's folder of that name. `reward`: which of the rewards is trained on. `env`: of the image."""

    tests: Path
    settings: VerifierTable
    reward: str = "reward"
    env: dict[str, str] | None = None
    cwd: str | None = None

    async def __call__(self, sandbox: Sandbox) -> Verdict:
        """Raises VerifierError when the tests give no reward or take too long; their exit status says nothing."""
        await self.command(sandbox, PREPARE)
        await sandbox.upload_dir(self.tests, "/tests")
        await self.command(sandbox, "chmod +x /tests/test.sh")
        begun = time.monotonic()
        printed = await self.judge(sandbox)
        json_text = await self.read(sandbox, "reward.json")
        rewards = read_rewards(json_text, await self.read(sandbox, "reward.txt") if json_text is None else None)
        details = {
            "rewards": rewards,
            "verifier_seconds": round(time.monotonic() - begun, 3),
            "verifier_output": plain(printed),
        }
        return Verdict(reward_of(rewards, self.reward), details)

    async def judge(self, sandbox: Sandbox) -> str:
        """Run test.sh: the end of what it printed."""
        limit, begun = ceil(self.settings.timeout_sec), time.monotonic()
        log = f"{LOGS}/test-stdout.txt"
        result = await sandbox.exec(
            f"/tests/test.sh > {log} 2>&1; code=$?; tail -c {SHOWN} {log}; exit $code",
            self.cwd,
            {**(self.env or {}), **resolved(self.settings.env)} or None,
            limit,
            self.settings.user,
        )
        if result.return_code == TIMED_OUT and time.monotonic() - begun >= limit:
            raise VerifierError(f"test.sh took longer than verifier.timeout_sec ({self.settings.timeout_sec:g})")
        return result.stdout or ""

    async def read(self, sandbox: Sandbox, name: str) -> str | None:
        """A reward file; None where there is none."""
        path = f"{LOGS}/{name}"
        result = await sandbox.exec(
            f"[ -e {path} ] || exit {MISSING}; [ -f {path} ] && head -c {MOST_BYTES + 1} {path}",
            "/",
            timeout_sec=SECONDS,
        )
        if result.return_code == MISSING:
            return None
        text = result.stdout or ""
        if result.return_code or len(text) > MOST_BYTES:
            raise VerifierError(f"{path} is no file of at most {MOST_BYTES} bytes")
        return text

    async def command(self, sandbox: Sandbox, command: str) -> ExecResult:
        result = await sandbox.exec(command, "/", timeout_sec=SECONDS, user="root")
        if result.return_code:
            raise VerifierError(f"{command} ended with status {result.return_code}: {(result.stderr or '')[-500:]}")
        return result
