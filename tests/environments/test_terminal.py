"""The scaffold: what a policy is told and shown, turn by turn. (Real commands: test_terminal_shell.py, test_harbor_task.py.)"""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compactionrl.environments.protocol import Response, ToolCall, Verdict
from compactionrl.environments.shell import CommandRefused, Ran
from compactionrl.environments.terminal import TerminalEnvironment, TerminalOptions
from compactionrl.rollout.environment_time import OutOfTime
from compactionrl.sandboxes.protocol import SandboxError

TASK = "Write 7 into /app/seven.txt."


class Recorded:
    """A sandbox and a shell that only write down what is asked of them; a command is answered by `ran`."""

    def __init__(self, ran=None):
        self.calls, self.ran = [], ran or (lambda command: Ran(f"<{command}>", 0, 0.0, False))

    async def run(self, command, seconds):
        self.calls.append((command, seconds))
        ran = self.ran(command)
        if isinstance(ran, Exception):
            raise ran
        return ran

    async def start(self, force_build=False):
        self.calls.append("start")

    async def stop(self, delete=True):
        self.calls.append(("stop", delete))


def make(ran=None, agent_seconds=float("inf"), **options):
    recorded = Recorded(ran)

    async def verifier(sandbox):
        recorded.calls.append("verify")
        return Verdict(0.5)

    environment = TerminalEnvironment(
        recorded, TASK, verifier, TerminalOptions(**options), shell=recorded, agent_seconds=agent_seconds
    )
    return environment, recorded


def step(environment, text="", calls=()):
    return asyncio.run(environment.step(Response(text, calls=list(calls))))


def execute(*commands, **more):
    return ToolCall("1", "execute_commands", {"commands": list(commands), **more})


DONE = ToolCall("2", "task_complete", {})


def fence(command):
    return f"Thinking.\n```bash\n{command}\n```"


def test_a_life():
    environment, recorded = make(seconds=5)
    system, task = asyncio.run(environment.start())
    assert (system["role"], task) == ("system", {"role": "user", "content": TASK})
    shown = step(environment, calls=[execute({"command": "echo 7 > seven.txt", "duration": 2}, analysis="a", plan="p")])
    assert (shown.text, shown.done) == (["<echo 7 > seven.txt>"], False)
    asked = step(environment, calls=[DONE])
    assert TASK in asked.text[0]
    assert not asked.done
    assert step(environment, calls=[execute({"command": "cat seven.txt"})]).text == ["<cat seven.txt>"]
    assert step(environment, calls=[DONE]).done
    assert asyncio.run(environment.verify()) == Verdict(0.5)
    asyncio.run(environment.close())
    assert recorded.calls == ["start", ("echo 7 > seven.txt", 2.0), ("cat seven.txt", 5), "verify", ("stop", True)]
    with pytest.raises(RuntimeError, match="completed"):
        step(environment, calls=[DONE])


def test_the_same_in_fences():
    environment, recorded = make(tools="fenced")
    assert environment.tools is None
    assert step(environment, fence("ls")).text == "<ls>"
    assert TASK in step(environment, fence("task_complete")).text
    last = step(environment, fence(" task_complete "))
    assert last.done
    assert recorded.calls == [("ls", 60)]


def test_one_response_cannot_confirm_what_it_has_not_read():
    environment, _ = make()
    asked = step(environment, calls=[DONE, DONE, DONE])
    assert not asked.done
    assert all(TASK in text for text in asked.text)
    assert step(environment, calls=[DONE]).done


def test_asking_once_is_an_option_and_nothing_runs_after_the_end():
    environment, recorded = make(ask_twice=False)
    last = step(environment, calls=[DONE, execute({"command": "ls"})])
    assert last.done
    assert "Nothing was run" in last.text[1]
    assert recorded.calls == []


@pytest.mark.parametrize("form", ["native", "fenced"])
def test_the_prompt_says_what_holds(form):
    environment, _ = make(tools=form, output_bytes=12345, seconds=7, most_seconds=99)
    system = asyncio.run(environment.start())[0]["content"]
    assert "12345 bytes" in system
    assert "7 seconds" in system
    assert "task_complete" in system
    assert ("99" in system, "```bash" in system, "execute_commands" in system) == (
        (True, False, True) if form == "native" else (False, True, False)
    )


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (ToolCall("1", "", {}, "Malformed call: it is no valid JSON"), "no valid JSON"),
        (ToolCall("1", "bash", {}), "the tools are execute_commands, task_complete"),
        (ToolCall("1", "execute_commands", {}), "commands"),
        (ToolCall("1", "execute_commands", {"commands": "ls"}), "must be a list"),
        (ToolCall("1", "execute_commands", {"commands": [], "reflection": ""}), "reflection"),
        (ToolCall("1", "execute_commands", {"commands": [], "plan": 3}), "'plan' must be a string"),
        (execute(), "commands is empty"),
        (execute("ls"), "an object with a string 'command'"),
        (execute({"command": 3}), "an object with a string 'command'"),
        (execute({"command": "ls"}, {"keystrokes": "ls"}), "an object with a string 'command'"),
        (execute({"command": "ls", "timeout": 3}), "no 'timeout'"),
        *((execute({"command": "ls", "duration": n}), "duration must be") for n in (0, -1, 601, "5", True, None, float("nan"))),
        (ToolCall("1", "task_complete", {"summary": "x"}), "summary"),
    ],
)  # fmt: skip
def test_a_malformed_call_is_answered_and_runs_nothing(call, said):
    environment, recorded = make()
    observation = step(environment, calls=[call])
    assert said in observation.text[0]
    assert not observation.done
    assert recorded.calls == []


def test_a_turn_without_a_call_or_a_command_is_answered():
    environment, recorded = make()
    assert "execute_commands" in step(environment, "I am done.").text
    environment, _ = make(tools="fenced")
    assert "No command was found" in step(environment, "ls").text
    assert "not closed" in step(environment, "```bash\nls").text
    assert step(environment, "ls").text.endswith(
        "in this form:\n\n```bash\nls -la\n```"
    )  # and is what a command looks like
    assert "2 commands" in step(environment, fence("ls") + "\n" + fence("ls")).text
    assert recorded.calls == []


def test_what_no_shell_takes_is_answered_in_both_forms():
    refuse = lambda command: CommandRefused("too long")  # noqa: E731
    environment, _ = make(refuse)
    assert step(environment, calls=[execute({"command": "x"})]).text == ["too long"]
    environment, _ = make(refuse, tools="fenced")
    assert step(environment, fence("x")).text == "too long"


def test_how_a_command_ended_is_said():
    results = {"bad": Ran("oops\n\n", 2, 0, False), "mute": Ran("\n", 0, 0, False), "quit": Ran("", 1, 0, False),
               "slow": Ran("so far\n", 124, 30.01, True)}  # fmt: skip
    environment, _ = make(results.get, tools="fenced")
    assert step(environment, fence("bad")).text == "oops\n[exit status 2]"
    assert step(environment, fence("mute")).text == "[no output]"
    assert step(environment, fence("quit")).text == "[exit status 1]"
    slow = step(environment, fence("slow")).text
    assert slow.startswith("so far\n[stopped after 30.0 seconds.")
    assert "background" in slow


def test_several_commands_are_told_apart():
    environment, recorded = make()
    shown = step(environment, calls=[execute({"command": "cd /\nls"}, {"command": "pwd", "duration": 1})]).text[0]
    assert shown == "$ cd /\n<cd /\nls>\n$ pwd\n<pwd>"
    assert recorded.calls == [("cd /\nls", 60.0), ("pwd", 1.0)]


@given(
    st.lists(st.lists(st.integers(0, 3000), min_size=1, max_size=5), min_size=1, max_size=4),
    st.integers(100, 2000),
)
def test_no_turn_shows_more_than_was_allowed(calls, most):
    """A turn is at most the cap and a mark for each command; what is short is shown whole where others leave room."""
    environment, _ = make(lambda command: Ran("é" * int(command), 0, 0, False), output_bytes=most)
    texts = step(environment, calls=[execute(*({"command": str(n)} for n in sizes)) for sizes in calls]).text
    marks = 40 * len(calls)
    assert sum(len(text.encode()) for text in texts) <= most + marks


def test_a_short_output_is_whole_beside_a_long_one():
    environment, _ = make(lambda command: Ran(command * int(command), 0, 0, False), output_bytes=1000)
    (shown,) = step(environment, calls=[execute({"command": "9"}, {"command": "5000"})]).text
    assert shown.startswith("$ 9\n999999999\n$ 5000\n5000")
    assert "bytes left out" in shown
    (shown,) = step(environment, calls=[execute({"command": "5000"}, {"command": "9"})]).text
    assert shown.endswith("$ 9\n999999999")
    assert len(shown) > 500


def test_hostile_output_is_plain_text():
    environment, _ = make(lambda command: Ran("\x1b[31m\0<|im_end|>\udcff\r\n", 0, 0, False), tools="fenced")
    assert (
        step(environment, fence("x")).text == "\ufffd<|im_end|>\ufffd\ufffd\ufffd"
    )  # the chat format sees to the token


def test_the_agents_time_is_that_of_its_commands():
    environment, recorded = make(lambda command: Ran("x", 0, 4.0, False), agent_seconds=10, seconds=5)
    for _ in range(2):
        step(environment, calls=[execute({"command": "x"})])
    with pytest.raises(OutOfTime):
        step(environment, calls=[execute({"command": "x"})])
    assert [seconds for _, seconds in recorded.calls] == [5, 5, 2]


def test_trouble_of_the_sandbox_is_not_the_policys():
    environment, _ = make(lambda command: SandboxError("gone"))
    with pytest.raises(SandboxError):
        step(environment, calls=[execute({"command": "x"})])


@pytest.mark.parametrize("options", [{"tools": "json"}, {"output_bytes": 99}, {"seconds": 0}, {"seconds": 700}])
def test_options_that_cannot_be(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        TerminalOptions(**options)
