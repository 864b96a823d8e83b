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
from compactionrl.evaluation.evaluate import OWN, Evaluation, evaluate, make_arms
from compactionrl.rollout.chat import ChatFormat
from compactionrl.rollout.ledger import Rollout, Segment, Window
from compactionrl.rollout.stream import CollectionError
from compactionrl.samplers.protocol import Sampled, SamplerError
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


def evaluation(tasks: NotesTasks, config: Config, *modes: str, runs: int = 1, summarisers: Any = (OWN,)) -> Evaluation:
    arms = make_arms(config, modes, summarisers)
    return Evaluation(tasks, config, arms, n_tasks=N, seed=7, runs=runs)


def with_concurrency(config: Config, n: int) -> Config:
    return config.model_copy(update={"sampling": config.sampling.model_copy(update={"concurrency": n})})


def run(measured: Evaluation, sampler: Any, chat: ChatFormat, **options: Any) -> list[Rollout]:
    seen: list[Rollout] = []
    asyncio.run(measured.run(sampler, chat, on_rollout=seen.append, **options))
    return seen


def test_runs_are_tries_of_the_same_tasks_with_streams_of_their_own(
    tasks: NotesTasks, chat: ChatFormat, config: Config
) -> None:
    recorder = Recorder(tasks, chat.tokenizer)
    recorder.seeds = []
    measured = evaluation(tasks, config, "x4", runs=3)
    seen = run(measured, recorder, chat)
    assert len(set(recorder.seeds)) == len(recorder.seeds)
    assert {rollout.task_id for rollout in seen} == {f"notes-heldout-{index}" for index in range(N)}
    assert sorted(rollout.id for rollout in seen if rollout.task_id == "notes-heldout-2") == [
        "x4-heldout-2",
        "x4-heldout-2-run2",
        "x4-heldout-2-run3",
    ]
    result = measured.results()["x4"]
    assert (result["n"], result["outcomes"]) == (3 * N, " ".join(3 * [N * "1"]))
    # The first run is what a single one would have been.
    assert set(streams(tasks, chat, config, 7, "x4")) < set(recorder.seeds)


def test_every_summariser_is_an_arm_of_the_modes_that_compact(
    tasks: NotesTasks, chat: ChatFormat, config: Config
) -> None:
    """The paper's Table 1: what the summaries lose, the policy cannot know."""
    forgetful = Demonstrator(tasks, chat.tokenizer, forget=1.0)
    measured = evaluation(tasks, config, "x1", "x4", "long", summarisers=[OWN, "forgetful"])
    seen = run(measured, Demonstrator(tasks, chat.tokenizer), chat, summarisers={"forgetful": forgetful})
    results = measured.results()
    assert {arm: result["pass_at_1"] for arm, result in results.items()} == {
        "x1": 0.0,
        "x4": 1.0,
        "x4+forgetful": 0.0,
        "long": 1.0,
    }
    by_arm = {arm.name: arm for arm in measured.arms}
    swap = measured.difference(by_arm["x4+forgetful"], by_arm["x4"])
    assert (swap["difference"], swap["tasks"]) == (-1.0, N)
    assert swap["high"] < 0
    others = [r for r in seen if r.id.startswith("x4+forgetful-")]
    assert all(s.excluded == "written by another summariser" for r in others for s in r.segments if s.kind == "summary")


def test_arms_advance_together(tasks: NotesTasks, chat: ChatFormat, config: Config) -> None:
    """So an evaluation that was stopped has pairs."""
    measured = evaluation(tasks, with_concurrency(config, 1), "x1", "x4", runs=2)
    names = [rollout.id for rollout in run(measured, Demonstrator(tasks, chat.tokenizer), chat)]
    assert names[:4] == ["x1-heldout-0", "x4-heldout-0", "x1-heldout-1", "x4-heldout-1"]
    assert names[-1] == f"x4-heldout-{N - 1}-run2"


@pytest.mark.parametrize("stopped_after", [1, 7, 2 * 2 * N - 1])
def test_what_was_stopped_goes_on_to_the_same_result(
    tasks: NotesTasks, chat: ChatFormat, config: Config, stopped_after: int
) -> None:
    sampler = Demonstrator(tasks, chat.tokenizer, forget=0.3)
    whole = evaluation(tasks, config, "x1", "x4", runs=2)
    everything = run(whole, sampler, chat)
    assert 0 < whole.results()["x4"]["pass_at_1"] < 1

    goes_on = evaluation(tasks, config, "x1", "x4", runs=2)
    for rollout in everything[:stopped_after]:
        goes_on.keep(rollout)
    rest = run(goes_on, sampler, chat)
    assert {r.id for r in rest} == {r.id for r in everything[stopped_after:]}
    assert goes_on.results() == whole.results()
    assert run(goes_on, sampler, chat) == []


def test_a_kept_rollout_must_be_of_the_same_task(tasks: NotesTasks, config: Config) -> None:
    measured = evaluation(tasks, config, "x4")
    measured.keep(Rollout("x4-heldout-1-retry2", "notes-heldout-1", end="submitted"))
    assert len(measured.pending) == N - 1
    measured.keep(Rollout("x8-heldout-1", "other", end="submitted"))  # of an arm that is not asked for today
    with pytest.raises(ConfigError, match=r"x4-heldout-2 was of the task 'notes-heldout-5'.*environment\.tasks"):
        measured.keep(Rollout("x4-heldout-2", "notes-heldout-5", end="submitted"))


def test_differences_are_over_the_tasks_that_both_finished(tasks: NotesTasks, config: Config) -> None:
    """x1: tasks 0 to 3 solved in 0, 1, 2 of two runs, task 3 broke down. x4: all solved but task 0; task 1 compacted."""
    measured = evaluation(tasks, config, "x1", "x4", runs=2)
    x1, x4 = measured.arms
    outcomes = {"x1": ["00", "10", "11", "--", "0-"], "x4": ["00", "11", "11", "11", "11"]}
    for arm, by_task in outcomes.items():
        for index, both in enumerate(by_task):
            for number, outcome in enumerate(both, 1):
                name = f"{arm}-heldout-{index}" + ("-run2" if number == 2 else "")
                compacted = arm == "x4" and index == 1 and number == 2
                if outcome != "-":
                    measured.keep(done(name, f"notes-heldout-{index}", float(outcome), compacted))
    found = measured.difference(x4, x1)
    assert (found["difference"], found["tasks"]) == ((0 + 0.5 + 0 + 1) / 4, 4)
    found = measured.difference(x4, x1, compacted=True)
    assert (found["difference"], found["tasks"]) == (0.5, 1)
    assert measured.results()["x1"]["outcomes"] == "011-0--- 001-----"
    assert measured.results()["x1"]["errors"] == 0  # they are not there, which is no breakdown


def done(name: str, task: str, reward: float, compacted: bool) -> Rollout:
    window = Window()
    window.append_context([1], "user", "task")
    window.append_sampled([1], [-1.0], [0], Segment("summary" if compacted else "execution", 0))
    return Rollout(name, task, [window], reward=reward, end="submitted", turns=1)


def test_tokens_add_up(tasks: NotesTasks, chat: ChatFormat, config: Config) -> None:
    measured = evaluation(tasks, config, "x4")
    seen = run(measured, Demonstrator(tasks, chat.tokenizer), chat)
    tokens = measured.results()["x4"]["tokens"]
    sampled = sum(rollout.token_counts()["sampled"] for rollout in seen)
    assert tokens["responses"]["sampled"] + tokens["summaries"]["sampled"] == sampled
    assert tokens["summaries"]["requests"] == sum(rollout.compactions for rollout in seen) > 0
    assert tokens["responses"]["requests"] == sum(rollout.turns for rollout in seen)


class Dead:
    """A server that is gone for good."""

    async def sample(self, token_ids: Sequence[int], **request: Any) -> Sampled:
        raise SamplerError("http://gone: no answer")

    async def release(self, affinity: str) -> None:
        pass


def test_what_only_breaks_down_is_stopped(chat: ChatFormat, config: Config) -> None:
    many = NotesTasks(seed=3, notes=[16, 16], facts=3, values=6, noise=1, n_train=10, n_heldout=500)
    arms = make_arms(config, ["x1", "x4"])
    measured = Evaluation(many, with_concurrency(config, 4), arms, n_tasks=500, seed=7)
    broken: list[Rollout] = []
    with pytest.raises(CollectionError, match=r"16 tasks in a row broke down; the last: SamplerError: http://gone"):
        asyncio.run(measured.run(Dead(), chat, on_broken=broken.append))
    assert len(broken) < 2 * 16 + 4


def test_modes_twice_are_one_arm(config: Config) -> None:
    assert [arm.name for arm in make_arms(config, ["x4", "x1", "x4"], [OWN, "glm"])] == ["x4", "x4+glm", "x1"]
