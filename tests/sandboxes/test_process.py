"""Plain processes, for whoever asks for them by name."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from compactionrl.sandboxes import open_sandbox


def test_it_must_be_asked_for() -> None:
    for options in ({}, {"unsafe_no_isolation": False}, {"unsafe_no_isolation": "yes"}):
        with pytest.raises(ValueError, match="unsafe_no_isolation"):
            open_sandbox("process", **options)


@pytest.mark.parametrize("shell", ["exec", "persistent"])
def test_commands_and_files_are_below_a_folder_of_its_own(tmp_path: Path, shell: str) -> None:
    async def scenario() -> None:
        sandbox = open_sandbox("process", unsafe_no_isolation=True, shell=shell)
        await sandbox.start()
        where = Path(((await sandbox.exec("pwd")).stdout or "").strip())
        assert where.name == "app"
        (tmp_path / "file").write_text("x")
        await sandbox.upload_file(tmp_path / "file", "/app/in/file")
        assert (await sandbox.exec("cat in/file; echo $HOME")).stdout == f"x{where.parent}\n"
        assert (await sandbox.exec("pwd", cwd=f"{where}/in")).stdout == f"{where}/in\n"
        await sandbox.download_dir("in", tmp_path / "out")
        result = await sandbox.exec("echo so far; sleep 99", timeout_sec=1)
        assert ((result.stdout or "")[:7], result.return_code) == ("so far\n", 124)
        await sandbox.stop()
        assert not where.exists()
        await sandbox.stop()

    asyncio.run(scenario())
    assert (tmp_path / "out/file").read_text() == "x"
