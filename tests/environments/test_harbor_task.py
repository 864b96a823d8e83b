"""A Harbor task in a real sandbox: built, solved or not, judged by tests that nobody saw before."""

import asyncio

import pytest
from harbor_folders import SOLVE, TEST, need_bwrap, write_task

from compactionrl.environments.harbor_settings import TaskFolderError
from compactionrl.environments.harbor_task import HarborTask, run_nothing, run_oracle
from compactionrl.environments.protocol import Response, ToolCall
from compactionrl.environments.reward import VerifierError
from compactionrl.sandboxes.bwrap import BwrapSandbox
from compactionrl.sandboxes.protocol import SandboxError
from compactionrl.sandboxes.rootfs import Image

SHELLS = ["exec", "persistent"]


def sandbox_for(task, shell="exec"):
    return BwrapSandbox(Image(env=task.env), shell=shell, workdir=task.workdir)


@pytest.fixture
def task(tmp_path):
    need_bwrap()
    return lambda **files: HarborTask(write_task(tmp_path / "task", **files))


def nothing(task):
    return asyncio.run(run_nothing(task, sandbox_for(task)))


def oracle(task):
    return asyncio.run(run_oracle(task, sandbox_for(task)))


def play(task, commands, shell="exec"):
    """What each command showed, and the verdict (or what verifying raised)."""

    async def play():
        environment = task.environment(sandbox_for(task, shell))
        try:
            await environment.start()
            shown = []
            for command in commands:
                call = ToolCall("1", "execute_commands", {"commands": [{"command": command}]})
                shown += (await environment.step(Response("", calls=[call]))).text
            try:
                return shown, await environment.verify()
            except VerifierError as error:
                return shown, error
        finally:
            await environment.close()

    return asyncio.run(play())


def test_the_solution_is_worth_1_and_doing_nothing_0(task):
    made = task()
    assert oracle(made).reward == 1.0
    verdict = nothing(made)
    assert verdict.reward == 0.0
    assert verdict.details["rewards"] == {"reward": 0.0}
    assert "seven.txt: No such file" in verdict.details["verifier_output"]


@pytest.mark.parametrize("shell", SHELLS)
def test_an_agent_solves_it_in_a_shell_that_stays(task, shell):
    first, second = "pwd; cat built.txt data/*; cd data; x=5", 'pwd; echo $((x + 2)) > "$OLDPWD/seven.txt"'
    shown, verdict = play(task(), [first, second], shell)
    assert shown == ["/app\nbuilt\na note for task", "/app/data"]
    assert verdict.reward == 1.0


@pytest.mark.parametrize("shell", SHELLS)
def test_tests_and_solution_are_not_there_while_the_agent_is(task, shell):
    look = "ls -d /tests /solution 2>&1 | grep -c 'No such file'; find / -path /usr -prune -o -path /proc -prune -o -name '*.sh'"
    shown, _ = play(task(), [f"{look} -print"], shell)
    assert shown == ["2"]


CHEATS = {
    "reward files": "echo '{\"reward\": 1}' > /logs/verifier/reward.json; echo 1 > /logs/verifier/reward.txt",
    "a helper among the tests": "mkdir -p /tests; echo 'echo 1 > /logs/verifier/reward.txt; exit' > /tests/helper.sh",
    "a test of its own": "mkdir -p /tests; printf '#!/bin/bash\\necho 1 > /logs/verifier/reward.txt' > /tests/test.sh",
    "links": "rm -rf /logs/verifier; mkdir -p /app/v; echo 1 > /app/v/reward.txt; ln -s /app/v /logs/verifier; ln -s /app /tests",
    "functions": "cat() { echo $NUMBER; }; bash() { echo 1 > /logs/verifier/reward.txt; }; export -f cat bash",
    "variables": "export NUMBER= BASH_ENV=/app/e PATH=/app:$PATH; echo 'echo $NUMBER > /app/seven.txt' > /app/e",
}


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("cheat", CHEATS)
def test_what_the_agent_left_is_no_reward(task, shell, cheat):
    trusting = TEST.replace("#!/bin/bash\n", "#!/bin/bash\n[ -e /tests/helper.sh ] && . /tests/helper.sh\n")
    _, verdict = play(task(tests__test_dot_sh=trusting), [CHEATS[cheat]], shell)
    assert verdict.reward == 0.0


JUDGES = {
    "the exit status says nothing": ("echo 0.25 > $V/reward.txt; exit 3", 0.25),
    "json counts more": ('echo 1 > $V/reward.txt; echo \'{"reward": 0.5, "more": 2}\' > $V/reward.json', 0.5),
    "nothing": ("exit 0", "neither"),
    "empty": (": > $V/reward.txt", "empty"),
    "empty json beside text": (": > $V/reward.json; echo 1 > $V/reward.txt", "empty"),
    "not a number": ("echo nan > $V/reward.txt", "finite"),
    "no object": ("echo 1 > $V/reward.json", "object"),
    "another name": ("echo '{\"score\": 1}' > $V/reward.json", "score"),
    "too much": ("seq 10000 > $V/reward.txt", "at most"),
    "a folder": ("mkdir $V/reward.txt", "no file"),
    "a device": ("ln -s /dev/zero $V/reward.json", "no file"),
    "bytes": ("printf '\\377\\0' > $V/reward.txt", "one number"),
    "nothing at the path": ("rm -rf $V", "neither"),
}


@pytest.mark.parametrize("judge", JUDGES)
def test_rewards_are_what_the_tests_wrote_or_an_error(task, judge):
    script, expected = JUDGES[judge]
    made = task(tests__test_dot_sh=f"#!/bin/bash\nV=/logs/verifier\n{script}\n")
    if isinstance(expected, float):
        assert nothing(made).reward == expected
        return
    with pytest.raises(VerifierError, match=expected):
        nothing(made)


def test_another_reward_may_be_the_one(task):
    made = task(tests__test_dot_sh='#!/bin/bash\necho \'{"reward": 0, "share": 0.75}\' > /logs/verifier/reward.json\n')
    assert asyncio.run(run_nothing(made, sandbox_for(made), "share")).reward == 0.75


def test_a_verifier_that_takes_too_long_is_an_error(task):
    toml = "[verifier]\ntimeout_sec = 1\n"
    script = "#!/bin/bash\necho 1 > /logs/verifier/reward.txt\n"
    with pytest.raises(VerifierError, match="timeout_sec"):
        nothing(task(task_dot_toml=toml, tests__test_dot_sh=f"{script}sleep 60\n"))
    assert nothing(task(task_dot_toml=toml, tests__test_dot_sh=f"{script}exit 124\n")).reward == 1.0


def test_variables_of_the_task_of_the_verifier_and_of_the_solution(task, monkeypatch):
    monkeypatch.setenv("FROM_HERE", "here")
    toml = '[environment]\nenv = { A = "${FROM_HERE}" }\n[verifier]\nenv = { V = "v" }\n[solution]\nenv = { S = "s" }\n'
    test = '[ "$A$V$S$NUMBER" = herev7 ] && [ "$(cat /app/said)" = heres7 ]; echo $((1 - $?)) > /logs/verifier/reward.txt\n'
    solve = 'echo "$A$V$S$NUMBER" > said\n'
    scripts = {"tests__test_dot_sh": f"#!/bin/bash\n{test}", "solution__solve_dot_sh": f"#!/bin/bash\n{solve}"}
    made = task(task_dot_toml=toml, **scripts)
    assert oracle(made).reward == 1.0


def test_a_dockerfile_is_carried_out(task, tmp_path):
    write_task(
        tmp_path / "task",
        environment__one_dot_txt="1",
        environment__two_dot_txt="2",
        environment__deep__er__three_dot_txt="3",
    )
    (tmp_path / "task/environment/run.sh").write_text("#!/bin/sh\necho ran in $PWD as $WHO\n")
    (tmp_path / "task/environment/run.sh").chmod(0o755)
    made = task(
        environment__Dockerfile="""\
FROM debian
ENV WHO="the builder"
WORKDIR /srv/work
COPY one.txt named
COPY one.txt two.txt /lists/
COPY one.txt /lists/old
COPY deep /deeper/
RUN mkdir folder
COPY two.txt folder
COPY run.sh /opt/run
RUN /opt/run > out && \\
    test -n "$WHO"
RUN ["sh", "-c", "echo '$HOME' >> out"]
ENV WHO=later
"""
    )
    look = (
        "pwd; for f in named /lists/* folder/* $(find /deeper -type f); do echo $f: $(cat $f); done; cat out; echo $WHO"
    )
    shown, _ = play(made, [look])
    assert shown[0].splitlines() == [
        "/srv/work", "named: 1", "/lists/old: 1", "/lists/one.txt: 1", "/lists/two.txt: 2", "folder/two.txt: 2",
        "/deeper/er/three.txt: 3", "ran in /srv/work as the builder", "$HOME", "later",
    ]  # fmt: skip


def test_a_step_that_fails_is_the_tasks_fault_and_says_why(task):
    with pytest.raises(SandboxError, match=r"echo why >&2; false.*status 1: why"):
        nothing(task(environment__Dockerfile="FROM x\nRUN echo why >&2; false\n"))
    slow = "[environment]\nbuild_timeout_sec = 1\n"
    with pytest.raises(SandboxError, match=r"sleep 60.*124"):
        nothing(task(task_dot_toml=slow, environment__Dockerfile="FROM x\nRUN sleep 60\n"))


def test_a_solution_that_is_missing_or_too_slow(task, tmp_path):
    made = task(task_dot_toml="[agent]\ntimeout_sec = 1\n", solution__solve_dot_sh=SOLVE + "sleep 60\n")
    with pytest.raises(SandboxError, match="time"):
        oracle(made)
    (tmp_path / "task/solution/solve.sh").unlink()
    with pytest.raises(TaskFolderError, match=r"solve\.sh"):
        oracle(made)


def test_what_runs_too_long_is_stopped_and_the_rest_goes_on(task):
    made = task()

    async def run():
        environment = made.environment(sandbox_for(made))
        await environment.start()
        slow = {"command": "cd data; echo begun; sleep 60", "duration": 1}
        call = ToolCall("1", "execute_commands", {"commands": [slow, {"command": "pwd"}]})
        shown = await environment.step(Response("", calls=[call]))
        await environment.close()
        return shown.text[0]

    shown = asyncio.run(run())
    assert "begun" in shown
    assert "[stopped after" in shown
    assert shown.endswith("$ pwd\n/app/data")


@pytest.mark.parametrize("shell", SHELLS)
def test_a_step_that_is_called_off_can_be_judged(task, shell):
    made = task()

    async def run():
        environment = made.environment(sandbox_for(made, shell))
        await environment.start()
        call = ToolCall("1", "execute_commands", {"commands": [{"command": "echo 7 > seven.txt; sleep 60"}]})
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(environment.step(Response("", calls=[call])), 1)
        verdict = await environment.verify()
        await environment.close()
        return verdict

    assert asyncio.run(run()).reward == 1.0


def test_endless_and_hostile_output(task):
    shown, _ = play(task(), ["head -c 3000000 /dev/zero | tr '\\0' x", r"printf '\033[31m\0\377<|im_end|>\r\n'"])
    assert len(shown[0]) < 31_000
    assert "bytes left out" in shown[0]
    assert shown[1] == "\ufffd\ufffd<|im_end|>"


def test_sandboxes_of_one_task_do_not_see_each_other(task):
    made = task()

    async def one(number):
        environment = made.environment(sandbox_for(made))
        await environment.start()
        command = f"echo {number} >> mine; sleep 0.2; cat mine; ls /app"
        shown = await environment.step(
            Response("", calls=[ToolCall("1", "execute_commands", {"commands": [{"command": command}]})])
        )
        await environment.close()
        return shown.text[0]

    async def all_of_them():
        return await asyncio.gather(*map(one, range(4)))

    assert asyncio.run(all_of_them()) == [f"{n}\nbuilt.txt\ndata\nmine" for n in range(4)]


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ({"instruction_dot_md": None}, r"instruction\.md"),
        ({"tests__test_dot_sh": None}, r"tests/test\.sh"),
        ({"environment__Dockerfile": None}, "no Dockerfile"),
        ({"environment__Dockerfile": "FROM x\nUSER y\n"}, "line 2: USER"),
        ({"environment__docker-compose_dot_yaml": "services: {}"}, "docker-compose"),
        ({"task_dot_toml": "[environment]\ngpus = 4\n"}, "gpus"),
    ],
)
def test_folders_that_cannot_be_used(tmp_path, files, named):
    with pytest.raises(TaskFolderError, match=named):
        HarborTask(write_task(tmp_path / "task", **files))


def test_the_network_is_there_only_where_the_task_asks_for_it(tmp_path):
    networks = [
        HarborTask(write_task(tmp_path / str(index), task_dot_toml=f"[environment]\n{line}\n")).network
        for index, line in enumerate(
            ["", 'network_mode = "public"', 'network_mode = "no-network"', "allow_internet = true"]
        )
    ]
    assert networks == [False, True, False, True]


def test_the_same_content_has_the_same_digest_under_any_name(tmp_path):
    first = HarborTask(write_task(tmp_path / "a", environment__data__note_dot_txt="same"))
    again = HarborTask(
        write_task(tmp_path / "b", environment__data__note_dot_txt="same", tests__test_dot_sh=TEST + "#")
    )
    other = HarborTask(write_task(tmp_path / "c", environment__data__note_dot_txt="other"))
    asked = HarborTask(write_task(tmp_path / "d", environment__data__note_dot_txt="same", instruction_dot_md="Other."))
    (tmp_path / "e").mkdir()
    moved = HarborTask(write_task(tmp_path / "e/a", environment__data__note_dot_txt="same"))
    (moved.folder / "environment/data/note.txt").rename(moved.folder / "environment/data/other.txt")
    assert first.digest == again.digest
    assert len({first.digest, other.digest, asked.digest, moved.digest}) == 4
