"""mini-swe-agent's environments behind the protocol: a stand-in for all, and the real local one where it is installed."""

from __future__ import annotations

import asyncio
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from compactionrl.environments.mini_swe import SUBMIT, MiniSweEnvironment, clip
from compactionrl.environments.protocol import Response, Verdict


class Submitted(Exception):
    """Named as mini-swe-agent's own."""


class Shell:
    """As mini-swe-agent's local environment behaves."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.cleaned = folder, 0

    def execute(self, action: dict[str, Any], cwd: str = "") -> dict[str, Any]:
        run = subprocess.run(
            ["bash", "-c", action["command"]],
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if run.stdout.lstrip().split("\n")[0] == SUBMIT and not run.returncode:
            raise Submitted
        return {"output": run.stdout, "returncode": run.returncode, "exception_info": ""}

    def cleanup(self) -> None:
        self.cleaned += 1


def fenced(command: str) -> Response:
    return Response(f"I run this:\n```bash\n{command}\n```")


def judge(shell: Shell) -> Verdict:
    return Verdict(float((shell.folder / "done").exists()), {"checked": True})


def test_a_task_from_start_to_end(tmp_path: Path) -> None:
    async def play() -> None:
        shell = Shell(tmp_path)
        environment = MiniSweEnvironment(shell, "make the file `done`", judge)
        system, task = await environment.start()
        assert SUBMIT in system["content"]
        assert task == {"role": "user", "content": "make the file `done`"}
        assert (await environment.verify()).reward == 0.0
        assert (await environment.step(fenced("echo a; echo b >&2; exit 3"))).text == "a\nb\n[exit code 3]"
        assert "exactly one block" in str((await environment.step(Response("touch done"))).text)
        assert not (tmp_path / "done").exists()
        assert (await environment.step(fenced("touch done"))).text == "[exit code 0]"
        assert (await environment.step(fenced(f"echo {SUBMIT}"))).done
        verdict = await environment.verify()
        assert (verdict.reward, verdict.details) == (1.0, {"checked": True})
        with pytest.raises(RuntimeError, match="submitted"):
            await environment.step(fenced("ls"))
        await environment.close()
        assert shell.cleaned == 1

    asyncio.run(play())


def test_an_async_verifier_and_nothing_to_clean_up() -> None:
    class Bare:
        def execute(self, action: dict[str, Any], cwd: str = "") -> dict[str, Any]:
            return {"output": "", "returncode": -1, "exception_info": "timed out after 5 s"}

    async def judge(shell: Bare) -> Verdict:
        await asyncio.sleep(0)
        return Verdict(0.25)

    async def play() -> None:
        environment = MiniSweEnvironment(Bare(), "task", judge)
        assert (await environment.step(fenced("sleep 9"))).text == "timed out after 5 s\n[exit code -1]"
        assert (await environment.verify()).reward == 0.25
        await environment.close()

    asyncio.run(play())


def test_trouble_that_is_not_the_policys_is_raised() -> None:
    class Gone:
        def execute(self, action: dict[str, Any], cwd: str = "") -> dict[str, Any]:
            raise ConnectionError("the container is gone")

    async def play() -> None:
        environment = MiniSweEnvironment(Gone(), "task", lambda _: Verdict(1.0))
        with pytest.raises(ConnectionError, match="container is gone"):
            await environment.step(fenced("ls"))
        await environment.close()

    asyncio.run(play())


def test_a_blocking_command_leaves_the_event_loop_free_and_is_closed_behind(tmp_path: Path) -> None:
    async def play() -> None:
        begun, end = threading.Event(), threading.Event()
        order: list[str] = []

        class Slow(Shell):
            def execute(self, action: dict[str, Any], cwd: str = "") -> dict[str, Any]:
                begun.set()
                assert end.wait(30)
                order.append("executed")
                return {"output": "", "returncode": 0, "exception_info": ""}

            def cleanup(self) -> None:
                order.append("cleaned")

        environment = MiniSweEnvironment(Slow(tmp_path), "task", judge)
        step = asyncio.create_task(environment.step(fenced("ls")))
        await asyncio.to_thread(begun.wait, 30)
        step.cancel()
        closing = asyncio.create_task(environment.close())
        await asyncio.sleep(0)
        end.set()
        await closing
        assert order == ["executed", "cleaned"]

    asyncio.run(play())


def test_long_output_keeps_head_and_tail() -> None:
    assert clip("abcdefghij", 10) == "abcdefghij"
    assert clip("abcdefghij", 5) == "abc\n[... 5 characters left out ...]\nij"
    with pytest.raises(ValueError, match="at least 2"):
        MiniSweEnvironment(Shell(Path()), "task", judge, output_chars=1)


def test_the_real_local_environment(tmp_path: Path) -> None:
    pytest.importorskip("minisweagent", reason="mini-swe-agent is not installed")
    from minisweagent.environments.local import LocalEnvironment

    async def play() -> None:
        environment = MiniSweEnvironment(
            LocalEnvironment(cwd=str(tmp_path), timeout=1),
            "task",
            lambda shell: Verdict(float((tmp_path / "done").exists())),
        )
        await environment.start()
        assert (await environment.step(fenced("touch done; ls"))).text == "done\n[exit code 0]"
        assert "[exit code -1]" in str((await environment.step(fenced("sleep 5"))).text)
        assert (await environment.step(fenced(f"echo {SUBMIT}"))).done
        assert (await environment.verify()).reward == 1.0
        await environment.close()

    asyncio.run(play())
