"""TextWorld behind the protocol. Its tests need the extra `games`; they generate small games, each in a few seconds."""

from __future__ import annotations

import asyncio
import gc
import os
from pathlib import Path

import pytest

pytest.importorskip("textworld", reason="the extra `games` is not installed")

from compactionrl.config import ContextConfig, LimitsConfig
from compactionrl.environments.protocol import Response
from compactionrl.environments.text_game import WalkthroughDemonstrator
from compactionrl.environments.textworld import TextWorldTasks, tidy
from compactionrl.rollout.chat import ChatFormat
from compactionrl.rollout.ledger import Rollout
from compactionrl.rollout.loop import RolloutSettings, run_rollout
from compactionrl.training.tokenizer import build_tokenizer

SMALL = {"recipe": 1, "take": 1, "go": 1, "open": True, "cook": True, "cut": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("games")


@pytest.fixture(scope="module")
def tasks(folder: Path) -> TextWorldTasks:
    return TextWorldTasks(settings=SMALL, n_train=2, n_heldout=2, folder=str(folder))


async def replies(tasks: TextWorldTasks, split: str, index: int, commands: list[str]) -> tuple[str, list[str], float]:
    environment = tasks.environment(split, index)
    task = (await environment.start())[-1]["content"]
    texts = [str((await environment.step(Response(command))).text) for command in commands]
    reward = (await environment.verify()).reward
    await environment.close()
    return task, texts, reward


def test_many_games_at_once(tasks: TextWorldTasks) -> None:
    """First of all tests: what cannot be done from many threads is done when the first game is opened."""
    [facts, _] = tasks.facts("train")

    async def all_at_once() -> list[tuple[str, list[str], float]]:
        return await asyncio.gather(*(replies(tasks, "train", 0, facts.walkthrough) for _ in range(16)))

    for task, texts, reward in asyncio.run(all_at_once()):
        assert ([task, *texts], reward) == (facts.texts, 1.0)


def test_the_walkthrough_scores_1_and_half_of_it_less(tasks: TextWorldTasks) -> None:
    for split in ("train", "heldout"):
        for facts, index in zip(tasks.facts(split), range(2), strict=True):
            task, texts, reward = asyncio.run(replies(tasks, split, index, facts.walkthrough))
            assert reward == 1.0
            assert [task, *texts] == facts.texts  # the same answers as when it was generated
            assert tasks.walkthroughs[task] == facts.walkthrough
            _, _, half = asyncio.run(replies(tasks, split, index, facts.walkthrough[:-1]))
            assert half == (facts.max_score - 1) / facts.max_score  # all but eating the meal, a point


def test_wrong_commands_are_answered_and_change_nothing(tasks: TextWorldTasks) -> None:
    [facts, _] = tasks.facts("train")
    wrong = ["dance", "take moon", "eat", "open open open", "cook everything", "go"]
    commands = [text for command in facts.walkthrough[:3] for text in (*wrong, command)]
    _, texts, _ = asyncio.run(replies(tasks, "train", 0, commands))
    assert all(texts)
    assert texts[len(wrong) :: len(wrong) + 1] == facts.texts[1:4]


@pytest.mark.parametrize(
    "command", ["save", "restart", "undo", "restore", "tw-print objective", "look then save", "again"]
)
def test_what_would_leave_the_game_never_reaches_it(tasks: TextWorldTasks, command: str, tmp_path: Path) -> None:
    here = set(os.listdir("."))
    _, texts, _ = asyncio.run(replies(tasks, "train", 0, [command, "inventory"]))
    assert texts[0].startswith("Commands begin with")
    assert "carrying" in texts[1]  # not the name of a file asked for
    assert set(os.listdir(".")) == here


def test_admissible_commands_are_listed_on_demand(folder: Path) -> None:
    tasks = TextWorldTasks(settings=SMALL, n_train=1, n_heldout=1, folder=str(folder), admissible=True)
    [facts] = tasks.facts("train")
    task, texts, reward = asyncio.run(replies(tasks, "train", 0, facts.walkthrough))
    assert reward == 1.0
    for shown, command in zip([task, *texts], facts.walkthrough, strict=False):
        listed = shown.rsplit("\nCommands: ", 1)[1].split(", ")
        assert command in [*listed, "inventory"]


def test_splits_share_no_game(tasks: TextWorldTasks) -> None:
    """Neither a seed nor a content, and the held-out kitchens may use foods that training never shows."""
    contents = {split: {facts.content for facts in tasks.facts(split)} for split in ("train", "heldout")}
    assert [len(found) for found in contents.values()] == [2, 2]
    assert not contents["train"] & contents["heldout"]
    folders = [tasks.generate(split, range(2)) for split in ("train", "heldout")]
    assert not {path.name for path in folders[0]} & {path.name for path in folders[1]}
    shared = TextWorldTasks(settings=SMALL, foods="shared", n_train=2, n_heldout=2, folder=str(tasks.folder))
    assert shared._settings("train") == shared._settings("heldout")
    assert [tasks._settings(split)["split"] for split in ("train", "heldout")] == ["train", "test"]


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="counts what is mapped into memory, in /proc")
def test_a_closed_game_leaves_no_interpreter_behind(tasks: TextWorldTasks) -> None:
    def interpreters() -> int:
        gc.collect()
        return Path("/proc/self/maps").read_text().count("libfrotz")

    asyncio.run(replies(tasks, "train", 0, ["inventory"]))
    before = interpreters()
    for _ in range(5):
        asyncio.run(replies(tasks, "train", 0, ["inventory"]))
    assert interpreters() == before


def test_games_are_generated_once(tasks: TextWorldTasks, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks.facts("train")
    monkeypatch.setattr(tasks, "_run_generator", None)
    assert len(tasks.facts("train")) == 2


def test_a_game_that_cannot_be_made_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    tasks = TextWorldTasks(settings={"recipe": 1, "take": 1, "go": 99}, n_train=1, n_heldout=1, folder=str(tmp_path))
    with pytest.raises(RuntimeError, match="could not generate a cooking game"):
        tasks.facts("train")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_bad_options_are_refused() -> None:
    with pytest.raises(ValueError, match="game must be one of cooking, coin, treasure"):
        TextWorldTasks(game="chess")
    with pytest.raises(ValueError, match="foods"):
        TextWorldTasks(foods="all")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="0 or more"):
        TextWorldTasks(n_train=-1)
    with pytest.raises(IndexError, match="There is no task 100"):
        TextWorldTasks().environment("train", 100)
    with pytest.raises(ValueError, match="split must be one of"):
        TextWorldTasks().size("test")


def test_banner_status_line_and_blank_lines_go() -> None:
    feedback = "   ____ $$ \\ |\n  >$$  |\n\nYou cook.\n\n\n-= Kitchen =-\nA room.\n\n> Kitchen  3/4\n"
    assert tidy(feedback) == "You cook.\n-= Kitchen =-\nA room."


def rollout(tasks: TextWorldTasks, split: str, index: int, context: ContextConfig) -> Rollout:
    texts = [text for facts in tasks.facts(split) for text in (*facts.texts, *facts.walkthrough)]
    tokenizer = build_tokenizer(texts)
    played = run_rollout(
        tasks.environment(split, index),
        WalkthroughDemonstrator(tasks, tokenizer),
        ChatFormat(tokenizer),
        RolloutSettings(context, LimitsConfig(turns=200)),
        rollout_id="r",
        task_id=tasks.task_id(split, index),
        seed=0,
    )
    return asyncio.run(played)


@pytest.mark.parametrize("tail_steps", [0, 2])
def test_a_walkthrough_keeps_its_score_across_compactions(folder: Path, tail_steps: int) -> None:
    """2 to 8 compactions, and every point is still there."""
    settings = {"recipe": 3, "take": 3, "go": 6, "open": True, "cook": True, "cut": True}
    tasks = TextWorldTasks(settings=settings, n_train=2, n_heldout=1, folder=str(folder))
    context = ContextConfig(
        budget=1150, threshold=580, summary_tokens=200, response_tokens=32, min_response=16, max_compactions=8,
        tail_steps=tail_steps,
    )  # fmt: skip
    for index in range(2):
        finished = rollout(tasks, "train", index, context)
        assert (finished.end, finished.reward) == ("submitted", 1.0), finished.error
        assert 2 <= finished.compactions <= 8
        assert all(len(window) <= context.budget for window in finished.windows)
