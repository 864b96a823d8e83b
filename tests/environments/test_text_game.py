"""Text games behind the protocol, with games of our own: what blocks, what breaks, and what a walkthrough carries along."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compactionrl import build
from compactionrl.config import ConfigError, ContextConfig, LimitsConfig, load_config
from compactionrl.environments.protocol import Response
from compactionrl.environments.text_game import NO_COMMAND, TextGameEnvironment, WalkthroughDemonstrator
from compactionrl.rollout.chat import ChatFormat
from compactionrl.rollout.ledger import Rollout
from compactionrl.rollout.loop import RolloutSettings, run_rollout
from compactionrl.training.tokenizer import build_tokenizer

WORDS = ["go", "take", "north", "south", "coin"]


class Corridor:
    """Wants `wanted` in this order; anything else changes nothing."""

    system = "say a command"

    def __init__(self, wanted: Sequence[str], before_step: Callable[[], None] = lambda: None) -> None:
        self.wanted, self.done, self.before_step = list(wanted), 0, before_step
        self.log: list[str] = []

    def start(self) -> str:
        self.log.append("start")
        return "you stand here"

    def step(self, command: str) -> tuple[str, bool]:
        self.log.append(command)
        self.before_step()
        right = command == self.wanted[self.done]
        self.done += right
        return ("well done" if right else "no"), self.done == len(self.wanted)

    def score(self) -> float:
        return self.done / len(self.wanted)

    def interrupt(self) -> None:
        self.log.append("interrupt")

    def close(self) -> None:
        self.log.append("close")


async def said(environment: TextGameEnvironment, text: str) -> tuple[str | list[str], bool]:
    observation = await environment.step(Response(text))
    return observation.text, observation.done


def test_a_game_from_start_to_end() -> None:
    async def play() -> None:
        game = Corridor(["go north", "take coin"])
        environment = TextGameEnvironment(lambda: game)
        assert await environment.start() == [
            {"role": "system", "content": "say a command"},
            {"role": "user", "content": "you stand here"},
        ]
        assert await said(environment, "go south") == ("no", False)
        assert await said(environment, " go north\n") == ("well done", False)
        assert (await environment.verify()).reward == 0.5
        assert await said(environment, "take coin") == ("well done", True)
        verdict = await environment.verify()
        assert (verdict.reward, verdict.details["commands"]) == (1.0, 3)
        with pytest.raises(RuntimeError, match="game is over"):
            await environment.step(Response("go north"))
        await environment.close()
        assert game.log == ["start", "go south", "go north", "take coin", "interrupt", "close"]

    asyncio.run(play())


@pytest.mark.parametrize(
    "text",
    [
        "",
        "go north. take coin",
        "go north\ntake coin",
        "go north, take coin",
        "gö",
        'say "x"',
        "x" * 201,
        "\x00",
        "a\tb",
    ],
)
def test_what_is_no_command_never_reaches_the_game(text: str) -> None:
    async def play() -> None:
        game = Corridor(["go north"])
        environment = TextGameEnvironment(lambda: game)
        await environment.start()
        assert await said(environment, text) == (NO_COMMAND, False)
        assert game.log == ["start"]
        await environment.close()

    asyncio.run(play())


def test_quit_ends_the_game_with_what_was_reached() -> None:
    async def play() -> None:
        game = Corridor(["go north", "take coin"])
        environment = TextGameEnvironment(lambda: game)
        await environment.start()
        await said(environment, "go north")
        assert await said(environment, "Quit") == ("", True)
        assert (await environment.verify()).reward == 0.5
        assert game.log == ["start", "go north"]
        await environment.close()

    asyncio.run(play())


def test_the_event_loop_goes_on_while_a_game_blocks() -> None:
    """Each of three games waits until all three are being stepped and the event loop has spoken: no deadlock."""

    async def play() -> None:
        together, spoken = threading.Barrier(4), threading.Event()

        def wait() -> None:
            together.wait(30)
            assert spoken.wait(30)

        environments = [TextGameEnvironment(lambda: Corridor(["go north"], wait)) for _ in range(3)]
        for environment in environments:
            await environment.start()
        steps = [asyncio.create_task(said(environment, "go north")) for environment in environments]
        await asyncio.to_thread(together.wait, 30)
        spoken.set()
        assert await asyncio.gather(*steps) == [("well done", True)] * 3
        for environment in environments:
            await environment.close()

    asyncio.run(play())


def test_trouble_of_the_game_is_raised() -> None:
    def broken() -> None:
        raise OSError("the interpreter died")

    async def play() -> None:
        environment = TextGameEnvironment(lambda: Corridor(["go north"], broken))
        await environment.start()
        with pytest.raises(OSError, match="interpreter died"):
            await environment.step(Response("go north"))
        await environment.close()

    asyncio.run(play())


def test_a_game_is_closed_behind_a_step_that_was_given_up() -> None:
    async def play() -> None:
        begun, end = threading.Event(), threading.Event()
        game = Corridor(["go north"], lambda: (begun.set(), end.wait(30), game.log.append("stepped"))[0])
        environment = TextGameEnvironment(lambda: game)
        await environment.start()
        step = asyncio.create_task(environment.step(Response("go north")))
        await asyncio.to_thread(begun.wait, 30)
        step.cancel()
        closing = asyncio.create_task(environment.close())
        await asyncio.sleep(0)
        end.set()
        await closing
        assert game.log == ["start", "go north", "interrupt", "stepped", "close"]

    asyncio.run(play())


def test_a_game_that_was_given_up_while_it_started_is_closed_too() -> None:
    async def play() -> None:
        begun, end = threading.Event(), threading.Event()
        game = Corridor(["go north"])

        def slowly() -> Corridor:
            begun.set()
            end.wait(30)
            return game

        environment = TextGameEnvironment(slowly)
        start = asyncio.create_task(environment.start())
        await asyncio.to_thread(begun.wait, 30)
        start.cancel()
        closing = asyncio.create_task(environment.close())
        await asyncio.sleep(0)
        end.set()
        await closing
        assert game.log == ["start", "close"]

    asyncio.run(play())


def test_what_was_never_started_is_closed() -> None:
    asyncio.run(TextGameEnvironment(lambda: Corridor(["go north"])).close())


@pytest.mark.parametrize(
    "family",
    ["compactionrl.environments.textworld:TextWorldTasks", "compactionrl.environments.scienceworld:ScienceWorldTasks"],
)
def test_a_library_that_is_not_installed_is_named_with_what_to_do(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = family.partition(":")[0]
    monkeypatch.setattr(f"{module}.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"World is not installed: pip install 'compactionrl\[games\]'"):
        build.build_tasks(load_config(None, {"environment.tasks": family}))


# The demonstrator.


class Corridors:
    def __init__(self, wanted: Sequence[str]) -> None:
        self.walkthroughs = {"you stand here": list(wanted)}


TOKENIZER = build_tokenizer(
    ["go take north south coin say a command you stand here well done no to do: nothing, quit carry on sum up again"]
)
CONTEXT: dict[str, Any] = {
    "threshold": 115,
    "response_tokens": 8,
    "min_response": 4,
    "summary_tokens": 90,
    "max_compactions": 99,
    "summary_request": "sum up",
    "retry_request": "sum up again",
    "resume_template": "carry on {summary}",
    "placeholder": "no",
}


def rollout(wanted: Sequence[str], budget: int, tail_steps: int, forget: float = 0.0, **changes: Any) -> Rollout:
    context = ContextConfig(**{**CONTEXT, "budget": budget, "tail_steps": tail_steps, **changes})
    requests = (context.summary_request, context.retry_request)
    demonstrator = WalkthroughDemonstrator(Corridors(wanted), TOKENIZER, forget=forget, summary_requests=requests)
    settings = RolloutSettings(context, LimitsConfig(turns=60))
    played = run_rollout(
        TextGameEnvironment(lambda: Corridor(wanted)),
        demonstrator,
        ChatFormat(TOKENIZER),
        settings,
        rollout_id="r",
        task_id="t",
        seed=0,
    )
    finished = asyncio.run(played)
    assert demonstrator._followed == {}  # nothing is kept of a rollout that is over
    return finished


COMMANDS = st.sampled_from(["go north", "go south", "take coin"])


@settings(max_examples=40, deadline=None)
@given(
    wanted=st.lists(COMMANDS, min_size=16, max_size=24),
    budget=st.integers(235, 270),
    tail=st.integers(0, 3),
    keep_task=st.booleans(),
)
def test_a_walkthrough_survives_compactions(wanted: list[str], budget: int, tail: int, keep_task: bool) -> None:
    """Also where the latest steps are kept behind the summary and look like those to come."""
    finished = rollout(wanted, budget, tail, keep_task=keep_task)
    assert (finished.end, finished.reward, finished.turns) == ("submitted", 1.0, len(wanted))
    assert finished.compactions >= 1


def test_it_has_only_the_summary_to_go_by() -> None:
    """With everything forgotten at the first compaction, what was done before it is all that is ever done."""
    wanted = ["go north", "take coin"] * 10
    finished = rollout(wanted, 240, 0, forget=1.0)
    assert finished.end == "submitted"
    assert finished.compactions == 1
    assert 0 < finished.reward < 1
    assert finished.reward == (finished.turns - 1) / 20  # the last turn was `quit`


def test_how_much_is_forgotten_follows_the_rate() -> None:
    wanted = ["go north", "take coin", "go south", "go south"]
    kept = 0
    for seed in range(1000):
        demonstrator = WalkthroughDemonstrator(Corridors(wanted), TOKENIZER, forget=0.25)
        prompt = "<|im_start|>user\nyou stand here<|im_end|>\n<|im_start|>user\nsum up<|im_end|>\n"
        demonstrator.summary_requests = frozenset(["sum up"])
        reply = demonstrator.reply(prompt, "r", seed)
        kept += 0 if reply == "to do: nothing" else reply.count(",") + 1
    assert abs(kept - 3000) < 137  # 5 standard deviations


def test_a_prompt_without_a_plan_is_refused() -> None:
    demonstrator = WalkthroughDemonstrator(Corridors(["go north"]), TOKENIZER)
    with pytest.raises(ValueError, match="neither a summary nor the task"):
        demonstrator.reply("<|im_start|>user\nelsewhere<|im_end|>\n", "r")
    with pytest.raises(ValueError, match="forget is a probability"):
        WalkthroughDemonstrator(Corridors(["go north"]), TOKENIZER, forget=-0.1)
