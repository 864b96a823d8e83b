"""Graded by what each reply names; the last question asks for everything."""

import asyncio

import pytest

from compactionrl.environments.deliveries import DeliveriesEnvironment, DeliveriesTasks
from compactionrl.environments.protocol import Observation, Response, Verdict

TWO = [("Heron", ("lamp oil", "raw wool")), ("Swift", ("pine tar", "tin plate"))]


def play(*replies: str) -> tuple[list[Observation], Verdict]:
    async def run() -> tuple[list[Observation], Verdict]:
        environment = DeliveriesEnvironment(TWO)
        seen = [await environment.step(Response(text=reply)) for reply in replies]
        return seen, await environment.verify()

    return asyncio.run(run())


def test_every_turn_counts_the_same() -> None:
    seen, verdict = play("Raw wool and lamp oil.", "pine tar", "Lamp oil, raw wool and pine tar came.")
    assert verdict.details == {"shares": [1.0, 0.5, 0.75]}
    assert verdict.reward == 0.75
    assert [each.done for each in seen] == [False, False, True]
    assert seen[0].text == "The Swift brought pine tar and tin plate. Which goods did the Swift bring?"
    assert "in all" in seen[1].text


def test_questions_that_were_not_reached_count_as_wrong() -> None:
    assert play("lamp oil, raw wool")[1].reward == pytest.approx(1 / 3)
    assert play()[1].reward == 0
    with pytest.raises(RuntimeError, match="Start a new environment"):
        play("", "", "", "")


def test_tasks_are_fixed_and_distinct() -> None:
    tasks = DeliveriesTasks(deliveries=6)
    first = tasks.environment("train", 3).deliveries
    assert first == DeliveriesTasks(deliveries=6).environment("train", 3).deliveries
    assert first != tasks.environment("heldout", 3).deliveries
    assert len({good for _, pair in first for good in pair}) == 12
    with pytest.raises(ValueError, match="must be 1 to 6"):
        DeliveriesTasks(deliveries=7)
    with pytest.raises(IndexError):
        tasks.environment("heldout", 500)
    with pytest.raises(ValueError, match="no split"):
        tasks.size("test")
