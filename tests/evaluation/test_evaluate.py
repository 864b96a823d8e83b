"""Evaluation of a scripted expert, whose results are known: with a perfect memory it solves what its windows let it see."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest

from compactionrl.config import Config, ConfigError, parse_config
from compactionrl.environments.demonstrator import Demonstrator
from compactionrl.environments.notes import NOTES_PROMPTS, NotesEnvironment, NotesTasks
from compactionrl.environments.protocol import Verdict
from compactionrl.evaluation.evaluate import evaluate
from compactionrl.rollout.chat import ChatFormat
from compactionrl.rollout.ledger import Rollout
from compactionrl.samplers.protocol import Sampled
from compactionrl.training.tokenizer import build_tokenizer

N = 8


@pytest.fixture(scope="module")
def tasks() -> NotesTasks:
    """Eight held-out tasks of exactly 16 notes: more than one window of 128 tokens holds."""
    return NotesTasks(seed=3, notes=[16, 16], facts=3, values=6, noise=1, n_train=10, n_heldout=N)


@pytest.fixture(scope="module")
def chat(tasks: NotesTasks) -> ChatFormat:
    return ChatFormat(build_tokenizer([*tasks.texts, *NOTES_PROMPTS.values()]))


@pytest.fixture
def config() -> Config:
    context = {"budget": 128, "threshold": 40, "response_tokens": 12, "min_response": 8, "summary_tokens": 16}
    return parse_config(
        {
            "context": {**context, **NOTES_PROMPTS, "tail_steps": 1},
            "limits": {"turns": 40},
            "sampling": {"concurrency": 4},
            "train": {"retries": 1},
        }
    )


def measure(tasks: Any, sampler: Any, chat: ChatFormat, config: Config, **options: Any) -> dict[str, dict[str, Any]]:
    arguments = {"modes": ["x1", "x4", "long"], "n_tasks": N, "seed": 7, **options}
    return asyncio.run(evaluate(tasks, sampler, chat, config, **arguments))


def test_modes_differ_by_what_the_windows_hold(tasks: NotesTasks, chat: ChatFormat, config: Config) -> None:
    seen: list[Rollout] = []
    results = measure(tasks, Demonstrator(tasks, chat.tokenizer), chat, config, on_rollout=seen.append)
    assert {mode: result["pass_at_1"] for mode, result in results.items()} == {"x1": 0.0, "x4": 1.0, "long": 1.0}
    assert results["x1"]["ends"]["budget"] == N
    assert results["x4"]["ends"]["submitted"] == N
    assert results["x4"]["compacted"]["n"] == N
    assert results["x1"]["compactions"] == results["long"]["compactions"] == 0
    assert [results[mode]["budget"] for mode in ("x1", "x4", "long")] == [128, 128, 512]
    assert all(result["errors"] == 0 and result["n"] == N for result in results.values())
    assert sorted(rollout.id.partition("-")[0] for rollout in seen) == ["long"] * N + ["x1"] * N + ["x4"] * N
    json.dumps(results, allow_nan=False)


def test_a_summariser_that_forgets_loses_what_it_forgot(tasks: NotesTasks, chat: ChatFormat, config: Config) -> None:
    """Same agent, other summaries (the paper's Table 1): nothing that stood in an earlier window survives."""
    expert, forgetful = Demonstrator(tasks, chat.tokenizer), Demonstrator(tasks, chat.tokenizer, forget=1.0)
    kept = measure(tasks, expert, chat, config, modes=["x4"])["x4"]
    lost = measure(tasks, expert, chat, config, modes=["x4"], summariser=forgetful)["x4"]
    assert kept["pass_at_1"] == 1.0
    assert lost["pass_at_1"] == 0.0


class Recorder(Demonstrator):
    seeds: list[int]

    async def sample(self, token_ids: Sequence[int], **request: Any) -> Sampled:
        self.seeds.append(request["seed"])
        return await super().sample(token_ids, **request)


def streams(tasks: NotesTasks, chat: ChatFormat, config: Config, seed: int, mode: str, n: int = N) -> list[int]:
    recorder = Recorder(tasks, chat.tokenizer)
    recorder.seeds = []
    measure(tasks, recorder, chat, config, modes=[mode], seed=seed, n_tasks=n)
    return sorted(recorder.seeds)


def test_random_streams_follow_the_seed_alone(tasks: NotesTasks, chat: ChatFormat, config: Config) -> None:
    first = streams(tasks, chat, config, 1, "long")
    assert len(set(first)) == len(first)
    assert first == streams(tasks, chat, config.model_copy(deep=True), 1, "long")
    assert not set(first) & set(streams(tasks, chat, config, 2, "long"))
    assert set(streams(tasks, chat, config, 1, "x1")) < set(first)
    assert set(streams(tasks, chat, config, 1, "long", n=3)) < set(first)


def dials(tasks: NotesTasks) -> dict[str, Any]:
    return {key: getattr(tasks, key) for key in ("seed", "notes", "facts", "values", "noise", "n_train", "n_heldout")}


class Breaking(NotesTasks):
    """Task 2 breaks down whenever it is verified; task 5 only the first time."""

    failures = 0

    def environment(self, split: str, index: int) -> NotesEnvironment:
        environment = super().environment(split, index)
        if index == 2 or (index == 5 and not self.failures):
            self.failures += index == 5

            async def verify() -> Verdict:
                raise OSError("disk full")

            environment.verify = verify  # type: ignore[method-assign]
        return environment


def test_errors_are_retried_counted_and_never_scored(tasks: NotesTasks, chat: ChatFormat, config: Config) -> None:
    broken = Breaking(**dials(tasks))
    result = measure(broken, Demonstrator(tasks, chat.tokenizer), chat, config, modes=["x4"])["x4"]
    assert (result["pass_at_1"], result["n"]) == (1.0, N - 1)
    assert (result["errors"], result["error_causes"]) == (1, {"OSError: disk full": 1})
    assert result["retried"] == 2


class Uneven(NotesTasks):
    """Some tasks are solved, some are not, some earn a part, some break down: at first, or for good."""

    tried: dict[int, int]
    verdicts = (1.0, 0.0, "broken", 0.99, 1.0, "once", 2.0, "never made")

    def environment(self, split: str, index: int) -> NotesEnvironment:
        environment, verdict = super().environment(split, index), self.verdicts[index]
        tried, self.tried[index] = self.tried.get(index, 0), self.tried.get(index, 0) + 1
        if verdict == "never made":
            raise OSError("no such image")

        async def verify() -> Verdict:
            if verdict == "broken" or (verdict == "once" and not tried):
                raise OSError("disk full")
            return Verdict(1.0 if verdict == "once" else float(verdict))

        environment.verify = verify  # type: ignore[method-assign]
        return environment


@pytest.mark.parametrize("concurrency", [1, 3, 100])
def test_outcomes_are_the_tasks_in_order(tasks: NotesTasks, chat: ChatFormat, config: Config, concurrency: int) -> None:
    uneven = Uneven(**dials(tasks))
    sampling = config.sampling.model_copy(update={"concurrency": concurrency})
    config = config.model_copy(update={"sampling": sampling})
    for n, expected in ((N, "10-0111-"), (4, "10-0"), (1000, "10-0111-")):
        seen: list[Rollout] = []
        uneven.tried = {}
        results = measure(
            uneven,
            Demonstrator(tasks, chat.tokenizer),
            chat,
            config,
            modes=["x1", "x4"],
            n_tasks=n,
            on_rollout=seen.append,
        )
        # In x1 the expert runs out of room; what it has earned is the verdict all the same.
        assert results["x4"]["outcomes"] == expected
        assert results["x4"]["errors"] == expected.count("-")
        assert results["x4"]["n"] == len(expected) - expected.count("-")
        solved = expected.count("1") / results["x4"]["n"]
        assert results["x4"]["pass_at_1"] == pytest.approx(solved)
        by_task = {r.task_id: "01"[r.reward >= 1] for r in seen if r.id.startswith("x1-")}
        assert results["x1"]["outcomes"] == "".join(
            by_task.get(f"notes-heldout-{i}", "-") for i in range(len(expected))
        )


def test_all_tasks_if_there_are_fewer(tasks: NotesTasks, chat: ChatFormat, config: Config) -> None:
    result = measure(tasks, Demonstrator(tasks, chat.tokenizer), chat, config, modes=["long"], n_tasks=1000)["long"]
    assert result["n"] == N


def test_an_impossible_mode_is_refused_before_anything_is_sampled(
    tasks: NotesTasks, chat: ChatFormat, config: Config
) -> None:
    off = parse_config({"context": {**config.context.model_dump(), "max_compactions": 0, "threshold": 1}})
    with pytest.raises(ConfigError, match="x4"):
        measure(tasks, None, chat, off)
