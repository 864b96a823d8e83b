"""The shell, on plain processes: what stays between commands, how they end, and what no command can break."""

import asyncio
import contextlib
import os
import signal
import time
from types import SimpleNamespace

import pytest

from compactionrl.environments.shell import CarriedShell, CommandRefused


class Processes:
    """The part of a sandbox that a shell needs: commands in plain processes. What is left of them is ended in the end."""

    def __init__(self):
        self.groups = []

    async def exec(self, command, cwd=None, env=None, timeout_sec=None, user=None):
        process = await asyncio.create_subprocess_exec(
            "bash", "-c", command, cwd=cwd, env={"PATH": os.environ["PATH"], **(env or {})}, start_new_session=True,
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        self.groups.append(process.pid)
        stdout, stderr = await asyncio.wait_for(process.communicate(), timeout_sec)
        code = process.returncode if process.returncode >= 0 else 128 - process.returncode  # as every shell has it
        return SimpleNamespace(
            stdout=stdout.decode(errors="replace"), stderr=stderr.decode(errors="replace"), return_code=code
        )


@pytest.fixture
def run(tmp_path):
    """Runs a command in the one shell of the test, which begins in the folder `home`."""
    (tmp_path / "home").mkdir()
    processes = Processes()
    shell = CarriedShell(processes, str(tmp_path / "home"), {"GIVEN": "from outside"}, state=str(tmp_path / ".shell"))

    def run(command, seconds=20):
        return asyncio.run(shell.run(command, seconds))

    yield run
    for group in processes.groups:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


def said(run, command):
    ran = run(command)
    return ran.output.strip(), ran.return_code


def test_it_begins_in_its_folder_with_its_variables(run, tmp_path):
    assert said(run, 'pwd; echo "$GIVEN"') == (f"{tmp_path}/home\nfrom outside", 0)


def test_directory_variables_and_functions_stay(run, tmp_path):
    run("mkdir 'a b'; cd 'a b'; x='1 \"2\" $3'; export Y=y")
    run("list=(p 'q r'); declare -A map=([k]=v)\nf() { echo f$1; }")
    expected = f'{tmp_path}/home/a b\n1 "2" $3\ny\nq r\nv\nf7'
    look = 'pwd; echo "$x"; bash -c "echo \\$Y"; echo "${list[1]}"; echo "${map[k]}"; f 7'
    assert said(run, look) == (expected, 0)
    assert said(run, look) == (expected, 0)
    assert said(run, "cd - >/dev/null && pwd; x=2; unset Y") == (f"{tmp_path}/home", 0)
    assert said(run, 'pwd; echo "$x${Y-gone}"') == (f"{tmp_path}/home\n2gone", 0)


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("x=1; cd sub; exit 3", 3),
        ("x=1; cd sub; set -e; false; echo not here", 1),
        ("x=1; cd sub; set -u; echo $nothing", 127),
        ("x=1; cd sub; trap 'echo mine' EXIT; (exit 5)", 5),
        ("x=1; cd sub; set -- a b; false", 1),
        ("x=1; cd sub; set -o posix; kill -TERM $$", 143),
        ("x=1; cd sub; IFS=0123456789; false", 1),
        ('x=1; cd sub; printf() { :; }; mv() { rm "$@"; }; cd() { builtin cd / ; }; true', 0),
    ],
)
def test_however_a_command_ends_the_shell_goes_on_from_there(run, tmp_path, command, code):
    run("mkdir sub")
    assert run(command).return_code == code
    assert said(run, 'pwd; echo "$x"') == (f"{tmp_path}/home/sub\n1", 0)


def test_what_is_no_bash_is_told_and_changes_nothing(run):
    run("x=1")
    ran = run("if then fi (")
    assert ran.return_code != 0
    assert "syntax error" in ran.output
    assert "unexpected EOF" in run("echo 'open").output
    assert said(run, "nosuchcommand")[1] == 127
    assert said(run, "exec false")[1] == 1
    assert said(run, "echo $x") == ("1", 0)


def test_output_and_errors_come_in_order_and_input_is_empty(run):
    assert said(run, "echo 1; echo 2 >&2; echo 3; cat; read line || echo none") == ("1\n2\n3\nnone", 0)
    assert said(run, "cat <<'X'\n$y `z`\nX") == ("$y `z`", 0)


def test_a_command_that_takes_too_long_is_stopped_and_its_output_is_kept(run, tmp_path):
    ran = run("cd /; x=kept; echo before; sleep 60; echo after", 1)
    assert (ran.return_code, ran.out_of_time) == (124, True)
    assert ran.output.removesuffix("Terminated\n") == "before\n"
    assert said(run, "pwd; echo $x") == ("/\nkept", 0)


def test_what_ignores_the_end_is_killed(run):
    begun = time.monotonic()
    ran = run("trap '' TERM; echo before; while true; do sleep 0.1; done", 1)
    assert (ran.output, ran.out_of_time) == ("before\n", True)
    assert time.monotonic() - begun < 20  # of the day that it would have taken


def test_a_status_of_124_alone_is_not_running_out_of_time(run):
    ran = run("timeout 0.1 sleep 5")
    assert (ran.return_code, ran.out_of_time) == (124, False)


def test_what_runs_in_the_background_goes_on(run):
    run("(sleep 0.5; echo late > late) >/dev/null 2>&1 &")
    assert run("wait; for i in $(seq 100); do [ -e late ] && break; sleep 0.1; done; cat late").output == "late\n"


def test_a_directory_that_is_gone_is_said(run, tmp_path):
    run("mkdir sub; cd sub; rmdir ../sub; x=1")
    ran = run("pwd; echo $x")
    assert ran.output == f"[{tmp_path}/home/sub is gone, this is {tmp_path}/home]\n{tmp_path}/home\n1\n"
    assert run("pwd; echo $PWD").output == f"{tmp_path}/home\n" * 2  # and said once


def test_without_its_state_the_shell_begins_anew(run, tmp_path):
    run("x=1; cd /")
    (tmp_path / ".shell").unlink()
    assert said(run, 'pwd; echo "${x-none}"') == (f"{tmp_path}/home\nnone", 0)
    (tmp_path / ".shell").write_text("exit 9; if\0(")
    assert run("echo here").output in ("here\n", "")
    (tmp_path / ".shell").unlink()
    (tmp_path / ".shell").mkdir()
    assert said(run, "echo here") == ("here", 0)


def test_every_character_arrives(run):
    text = "a'b\"c\\d$e`f!g\th\u00e9\U0001f600*?[]{}~#&|;<>()"
    run(f"cat > out <<'END'\n{text}\nEND")
    assert run("cat out").output == text + "\n"


def test_what_no_shell_can_take_is_refused(run):
    with pytest.raises(CommandRefused, match="NUL"):
        run("echo \0")
    with pytest.raises(CommandRefused, match="too long"):
        run("echo " + "'" * 60_000)
    assert said(run, "echo '\ud800'") == ("?", 0)
    assert said(run, f"echo {'x' * 60_000} | wc -c") == ("60001", 0)
