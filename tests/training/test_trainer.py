"""The loop: what it leaves behind, how it stops and goes on, what it refuses."""

import hashlib
import json
import os
import shutil
import signal
import tomllib
from collections.abc import Iterator
from io import StringIO
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from training_tasks import Chatter, make_base, tiny_config

from compactionrl.config import Config, ConfigError, load_config, parse_config
from compactionrl.environments.protocol import Verdict
from compactionrl.evaluation.evaluate import evaluate
from compactionrl.rollout.collect import CollectionError
from compactionrl.training.learner import Learner
from compactionrl.training.optimiser import TrainingError
from compactionrl.training.order import task_order, units
from compactionrl.training.records import read_rollouts
from compactionrl.training.run_folder import RunFolder
from compactionrl.training.trainer import Trainer


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def train(config: Config, **options: Any) -> tuple[bool, str]:
    """Run to the end; returns whether it finished, and what it said."""
    console = Console(file=StringIO(), width=200)
    finished = Trainer(config, console=console, **options).run()
    return finished, console.file.getvalue()  # type: ignore[attr-defined]


def hashes(folder: Path) -> dict[str, str]:
    """Of all tensors in the final checkpoint."""
    files = sorted((folder / "checkpoints" / "step-000006").rglob("*.safetensors"))
    assert len(files) == 4
    return {str(f.relative_to(folder)): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}


def metrics(folder: Path) -> list[dict[str, Any]]:
    """All lines, without what the clock decides."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.partition("pretraining/")[2].startswith(("time", "speed"))
             and not k.startswith(("time", "speed"))} for line in lines]  # fmt: skip


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run."""
    tmp = tmp_path_factory.mktemp("reference")
    make_base(tmp / "base")
    finished, _ = train(tiny_config(tmp))
    assert finished
    return tmp


@pytest.fixture
def tmp(reference: Path, tmp_path: Path) -> Path:
    (tmp_path / "base").symlink_to(reference / "base")
    return tmp_path


def same_as(reference: Path, tmp: Path) -> None:
    assert hashes(tmp / "run") == hashes(reference / "run")
    assert metrics(tmp / "run") == metrics(reference / "run")
    names = sorted(path.name for path in (reference / "run" / "rollouts").iterdir())
    assert sorted(path.name for path in (tmp / "run" / "rollouts").iterdir()) == names
    for name in names:
        expected, found = (read_rollouts(folder / "run" / "rollouts" / name) for folder in (reference, tmp))
        assert [(r.id, r.reward, r.windows) for r in found] == [(r.id, r.reward, r.windows) for r in expected]


def test_what_a_run_leaves_behind(reference: Path) -> None:
    run = reference / "run"
    config = tiny_config(reference)
    assert load_config(run / "config.toml") == config
    lines = metrics(run)
    assert [(line["phase"], line["step"]) for line in lines] == [
        ("value", 1), ("value", 2), ("eval", 0), ("train", 1), ("train", 2), ("train", 3), ("eval", 3),
        ("train", 4), ("train", 5), ("train", 6), ("eval", 6),
    ]  # fmt: skip
    for line in lines:
        if line["phase"] == "value":
            assert line["pretraining/critic/loss"] > 0
            assert not any("policy" in key for key in line)
        if line["phase"] == "train":
            counts = {k.removeprefix("tokens/"): v for k, v in line.items() if k.startswith("tokens/")}
            assert counts.pop("sampled") == sum(counts.values())
            assert counts["trained"] > 0
            assert line["policy/skipped"] == line["critic/skipped"] == 0
    state = json.loads((run / "checkpoints" / "step-000006" / "state.json").read_text())
    assert state["units"] == 8 * 6
    best = max((line for line in lines if line["phase"] == "eval"), key=lambda line: line["eval/x4/pass_at_1"])
    assert state["best"]["step"] == best["step"]
    assert (run / "checkpoints" / "best").resolve().name == state["best"]["checkpoint"]


def test_value_pretraining_leaves_the_base_alone(reference: Path) -> None:
    base = (reference / "base" / "model.safetensors").read_bytes()
    pretrained = reference / "run" / "checkpoints" / "value-000002" / "policy" / "model.safetensors"
    final = reference / "run" / "checkpoints" / "step-000006" / "policy" / "model.safetensors"
    if pretrained.exists():  # unless a later policy did better at x4
        assert pretrained.read_bytes() == base
    assert final.read_bytes() != base


def test_each_task_is_trained_once(reference: Path) -> None:
    files = (reference / "run" / "rollouts").iterdir()
    tasks = [rollout.task_id for path in files for rollout in read_rollouts(path)]
    assert len(tasks) == len(set(tasks)) == 8 * 6


def test_every_token_was_sampled_by_the_latest_policy(reference: Path) -> None:
    """On-policy: step n trains what the policy after n - 1 updates sampled, and its log-probabilities agree."""
    for name, version in (("value-000002", 0), ("step-000001", 0), ("step-000002", 1), ("step-000006", 5)):
        rollouts = read_rollouts(reference / "run" / "rollouts" / f"{name}.parquet")
        versions = {v for r in rollouts for w in r.windows for v in w.versions}
        assert versions == {-1, version}
    assert all(abs(line.get("ratio/mean", 1) - 1) < 1e-4 for line in metrics(reference / "run"))


def test_rollout_files_of_batches_to_be_done_again_are_removed(tmp: Path) -> None:
    folder = RunFolder(tiny_config(tmp), resume=False)
    folder.create()
    for name in ("value-000001", "value-000002", "step-000001", "step-000002", ".partial-step-000001"):
        folder.rollout_file(name).touch()
    folder.drop_rollouts_after(value_batches=2, step=1)
    kept = ["step-000001.parquet", "value-000001.parquet", "value-000002.parquet"]
    assert sorted(path.name for path in folder.rollouts.iterdir()) == kept


def interrupt_at(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, call: int) -> None:
    """Send SIGINT at the `call`-th call of a method."""
    method, count = getattr(owner, name), 0

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count == call:
            os.kill(os.getpid(), signal.SIGINT)
        return method(*args, **kwargs)

    monkeypatch.setattr(owner, name, wrapper)


@pytest.mark.parametrize(
    ("owner", "name", "call", "stopped_after"),
    [
        (Chatter, "step", 5, "value-000000"),  # while collecting the first batch of all
        (Chatter, "start", 6 + 4, "value-000001"),
        (Learner, "update_critic", 3, "value-000002"),  # within an update: it is finished first
        (Learner, "update_policy", 3, "step-000003"),
    ],
)
def test_ctrl_c_and_resume_change_nothing(
    reference: Path, tmp: Path, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, call: int, stopped_after: str
) -> None:
    with monkeypatch.context() as patch:
        interrupt_at(patch, owner, name, call)
        finished, said = train(tiny_config(tmp))
    assert not finished
    assert f"stopped after {stopped_after}" in said
    assert "--resume" in said
    assert (tmp / "run" / "checkpoints" / stopped_after).is_dir()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finished, _ = train(tiny_config(tmp), resume=True)
    assert finished
    same_as(reference, tmp)


def test_ctrl_c_during_an_evaluation(reference: Path, tmp: Path) -> None:
    async def interrupted(*args: Any, **options: Any) -> dict[str, dict[str, Any]]:
        os.kill(os.getpid(), signal.SIGTERM)
        return await evaluate(*args, **options)

    finished, said = train(tiny_config(tmp), evaluate=interrupted)
    assert not finished
    assert "stopped after value-000002" in said
    finished, _ = train(tiny_config(tmp), resume=True)
    assert finished
    same_as(reference, tmp)


def test_a_damaged_checkpoint_costs_only_time(reference: Path, tmp_path: Path) -> None:
    shutil.copytree(reference / "run", tmp_path / "run", symlinks=True)
    (tmp_path / "run" / "checkpoints" / "step-000006" / "state.json").write_text("{")
    finished, said = train(tiny_config(reference, run__folder=str(tmp_path / "run")), resume=True)
    assert finished
    assert "step-000006 is incomplete" in said
    same_as(reference, tmp_path)


def test_a_finished_run_resumed_does_nothing_and_more_steps_go_on(tmp: Path) -> None:
    train(tiny_config(tmp, train__steps=2))
    before = (tmp / "run" / "metrics.jsonl").read_bytes()
    assert train(tiny_config(tmp, train__steps=2), resume=True)[0]
    assert (tmp / "run" / "metrics.jsonl").read_bytes() == before
    assert train(tiny_config(tmp, train__steps=3), resume=True)[0]
    assert [line["step"] for line in metrics(tmp / "run") if line["phase"] == "train"] == [1, 2, 3]
    assert tomllib.loads((tmp / "run" / "config.toml").read_text())["train"]["steps"] == 3


def test_refusals(tmp: Path) -> None:
    with pytest.raises(ConfigError, match="no run in"):
        Trainer(tiny_config(tmp), resume=True)
    train(tiny_config(tmp, train__steps=1))
    with pytest.raises(ConfigError, match=r"already holds a run.*--resume"):
        Trainer(tiny_config(tmp, train__steps=1))
    with pytest.raises(ConfigError, match=r"train.policy_lr: 0.01 in the run, 0.02 now") as refused:
        Trainer(tiny_config(tmp, train__steps=2, train__policy_lr=0.02), resume=True)
    assert "train.steps:" not in str(refused.value)
    with pytest.raises(ConfigError, match=r"train.steps: 1 in the run, 0 now"):
        Trainer(tiny_config(tmp, train__steps=0), resume=True)
    stray = tiny_config(tmp, run__folder=str(tmp / "stray"))
    (tmp / "stray" / "checkpoints").mkdir(parents=True)
    with pytest.raises(ConfigError, match="already holds a run"):
        Trainer(stray)
    elsewhere = parse_config(
        tiny_config(tmp, train__steps=1).model_dump() | {"server": {"urls": ["http://127.0.0.1:1"]}}
    )
    assert Trainer(elsewhere, resume=True).finished, "servers may have moved"
    moved = tmp / "moved"
    (tmp / "run").rename(moved)
    assert Trainer(tiny_config(tmp, train__steps=1, run__folder=str(moved)), resume=True).finished


def test_nothing_is_written_for_a_configuration_that_cannot_work(tmp: Path) -> None:
    for options, message in [
        ({"environment__tasks": "training_tasks"}, "environment.tasks"),
        ({"environment__tasks": "training_tasks:Nothing"}, "environment.tasks"),
        ({"environment__tasks": "no_such_module:Tasks"}, "environment.tasks"),
        ({"environment__options": {"colour": 1}}, "environment.options"),
        ({"environment__options": {"size": 0}}, "environment.options.*size must be positive"),
        ({"sampling__sampler": "training_tasks:Nothing"}, "sampling.sampler"),
        ({"sampling__top_p": 0.9}, "sampling.top_p"),
        ({"model__path": "/nowhere"}, "model.path"),
        ({"environment__options": {"heldout": 0}}, "environment.options.*heldout"),
        # Only the tokenizer tells how long the framed request is; and only x4 needs room for it here.
        ({"context__threshold": 30}, r"context.threshold \(30\) must be at least"),
        ({"context__threshold": 30, "context__max_compactions": 0}, r"context.threshold \(30\) must be at least"),
        ({"model__device": "teapot"}, "model.device"),
        ({"evaluation__modes": ["long"], "context__budget": 400}, "context.budget.*512 positions"),
    ]:
        with pytest.raises(ConfigError, match=message):
            Trainer(tiny_config(tmp, **options))
    assert not (tmp / "run").exists()


def test_broken_tasks_are_dropped_counted_and_refilled(tmp: Path) -> None:
    broken = task_order(5, 0, 12)[1:3]
    options = {"size": 12, "broken": list(broken)}
    train(tiny_config(tmp, train__steps=1, train__value_pretraining_steps=0, environment__options=options))
    (line,) = (line for line in metrics(tmp / "run") if line["phase"] == "train")
    rollouts = read_rollouts(tmp / "run" / "rollouts" / "step-000001.parquet")
    dropped = [rollout for rollout in rollouts if rollout.end == "error"]
    assert line["rollout/n"] == 6
    assert len(rollouts) == 6 + len(dropped) == 6 + line["rollout/dropped"]
    assert {rollout.task_id for rollout in dropped} == {f"train-{index}" for index in broken}
    assert all("the sandbox is gone" in str(rollout.error) for rollout in dropped)
    assert line["rollout/retried"] == 2 * len(dropped)
    state = json.loads((tmp / "run" / "checkpoints" / "step-000001" / "state.json").read_text())
    assert state["units"] == 6 + 2
    assert state["dropped"] == 2


def test_when_everything_breaks_the_run_stops_with_its_state_saved(tmp: Path) -> None:
    options = {"size": 40, "broken": list(range(40))}
    config = tiny_config(tmp, environment__options=options, train__retries=0)
    with pytest.raises(CollectionError, match="the sandbox is gone"):
        train(config)
    assert (tmp / "run" / "checkpoints" / "value-000000").is_dir()


def test_rollouts_that_no_update_survives_can_be_looked_at(tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def verify(self: Chatter) -> Verdict:
        return Verdict(1e300)

    monkeypatch.setattr(Chatter, "verify", verify)
    with pytest.raises(TrainingError, match="latest rollout files"):
        train(tiny_config(tmp, train__max_bad_updates=1))
    assert {r.reward for r in read_rollouts(tmp / "run" / "rollouts" / "value-000001.parquet")} == {1e300}


def test_what_is_sampled_and_what_is_trained_have_one_temperature(tmp: Path) -> None:
    """Before its update the policy is the sampler: every ratio is 1, in a resumed run as well."""
    for steps in (1, 2):
        train(tiny_config(tmp, train__steps=steps, sampling__temperature=0.5), resume=steps > 1)
    found = [line for line in metrics(tmp / "run") if line["phase"] == "train"]
    assert [line["ratio/mean"] for line in found] == pytest.approx([1, 1], abs=1e-4)
    assert [line["ratio/max"] for line in found] == pytest.approx([1, 1], abs=1e-3)


def drawn_modes(tmp: Path, **options: Any) -> Config:
    """Rollouts of enough turns to need three windows of 96 tokens; which end by their budget in x1 and 2C."""
    options = {"train__modes": ["x1", "x4"], "environment__options": {"turns": 9}, **options}
    return tiny_config(tmp, train__rollouts_per_step=8, **options)


def compactions_by_unit(folder: Path, name: str) -> dict[int, list[int]]:
    """Of each rollout of a batch, by its unit: the number of its group."""
    found: dict[int, list[int]] = {}
    for rollout in read_rollouts(folder / "run" / "rollouts" / f"{name}.parquet"):
        found.setdefault(int(rollout.id.split("-")[1]), []).append(rollout.compactions)
        assert max(len(window) for window in rollout.windows) <= 96
    return found


def test_rollouts_of_a_group_share_the_mode_that_it_draws(tmp: Path) -> None:
    """Both modes occur, in value pretraining too, each as `order.units` says; a resumed run draws the same."""
    options = {"train__steps": 3, "train__group_size": 2, "evaluation__every": 0}
    train(drawn_modes(tmp, **options))
    names = ["value-000001", "value-000002", "step-000001", "step-000002", "step-000003"]
    found = {unit: c for name in names for unit, c in compactions_by_unit(tmp, name).items()}
    contexts = ["x1", "x4"]
    expected = [unit[0].settings for unit in islice(units(5, 1000, 2, 0, contexts), 20)]  # type: ignore[arg-type]
    assert sorted(found) == list(range(20))
    assert set(expected) == {"x1", "x4"}
    for unit, mode in enumerate(expected):
        assert len(found[unit]) == 2
        assert (max(found[unit]) == 0) if mode == "x1" else (min(found[unit]) > 0), (unit, mode)
    parts = [line for line in metrics(tmp / "run") if line["phase"] == "train"]
    for number, line in enumerate(parts):
        batch = [count for unit in range(8 + 4 * number, 12 + 4 * number) for count in found[unit]]
        assert line["rollout/compactions"] == pytest.approx(sum(batch) / 8)
        assert line["rollout/compacted/n"] == sum(count > 0 for count in batch)
        counts = {k.removeprefix("tokens/"): v for k, v in line.items() if k.startswith("tokens/")}
        assert counts.pop("sampled") == sum(counts.values())


def test_a_resumed_run_draws_the_same_modes(tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"train__steps": 3, "evaluation__every": 0}
    train(drawn_modes(tmp, run__folder=str(tmp / "whole" / "run"), **options))
    with monkeypatch.context() as patch:
        interrupt_at(patch, Learner, "update_policy", 1)
        finished, _ = train(drawn_modes(tmp, **options))
    assert not finished
    assert train(drawn_modes(tmp, **options), resume=True)[0]
    assert metrics(tmp / "run") == metrics(tmp / "whole" / "run")
    for name in ("step-000002", "step-000003"):
        assert compactions_by_unit(tmp, name) == compactions_by_unit(tmp / "whole", name)
    weights = [
        (folder / "run/checkpoints/step-000003/policy/model.safetensors").read_bytes()
        for folder in (tmp, tmp / "whole")
    ]
    assert weights[0] == weights[1]


def test_one_window_of_twice_the_budget_is_filled_and_never_compacts(tmp: Path) -> None:
    """As evaluated in 2C; the sampler has room for it, also where the evaluation needs less."""
    options = {"train__modes": ["2C"], "evaluation__modes": ["x1"], "environment__options": {"turns": 40}}
    train(drawn_modes(tmp, train__steps=1, train__value_pretraining_steps=1, **options))
    for name in ("value-000001", "step-000001"):
        rollouts = read_rollouts(tmp / "run" / "rollouts" / f"{name}.parquet")
        assert {len(rollout.windows) for rollout in rollouts} == {1}
        assert {rollout.end for rollout in rollouts} == {"budget"}
        lengths = [len(rollout.windows[0]) for rollout in rollouts]
        # A step takes at most 12 tokens of response, its frame, and an observation of 8 words: the rest was too short.
        assert all(2 * 96 - 40 < length <= 2 * 96 for length in lengths)
    (line,) = (line for line in metrics(tmp / "run") if line["phase"] == "train")
    assert (line["rollout/compactions"], line["rollout/ends/budget"], line["rollout/n"]) == (0, 8, 8)
    assert line["tokens/trained"] == line["tokens/sampled"]
    assert line["ratio/mean"] == pytest.approx(1, abs=1e-4)


def test_a_training_mode_that_the_model_or_the_context_cannot_do_is_refused(tmp: Path) -> None:
    with pytest.raises(ConfigError, match=r"context.budget.*512 positions.*train\.modes"):
        Trainer(tiny_config(tmp, train__modes=["6C"]))
    off = {"context__max_compactions": 0, "context__threshold": 10, "evaluation__modes": ["x1"]}
    with pytest.raises(ConfigError, match="mode x2 is impossible"):
        Trainer(tiny_config(tmp, train__modes=["x1", "x2"], **off))
    assert not (tmp / "run").exists()


def test_a_batch_tells_its_processor_time(reference: Path) -> None:
    lines = [json.loads(line) for line in (reference / "run" / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        if line["phase"] == "eval":
            assert not any("time/" in key for key in line)
        else:
            prefix = "pretraining/" if line["phase"] == "value" else ""
            assert line[f"{prefix}time/cpu"] > 0
            assert line[f"{prefix}time/total"] >= line[f"{prefix}time/collect"]


def test_group_estimator_has_no_critic_and_no_pretraining(tmp: Path) -> None:
    train(tiny_config(tmp, train__steps=1, train__estimator="group", train__group_size=3))
    phases = [(line["phase"], line["step"]) for line in metrics(tmp / "run")]
    assert phases == [("eval", 0), ("train", 1), ("eval", 1)]
    assert not (tmp / "run" / "checkpoints" / "step-000001" / "critic").exists()
    rollouts = read_rollouts(tmp / "run" / "rollouts" / "step-000001.parquet")
    assert len({rollout.task_id for rollout in rollouts}) == 2
    assert len({tuple(rollout.windows[0].token_ids) for rollout in rollouts}) == 6, "members of a group sample alike"
    assert train(tiny_config(tmp, train__steps=1, train__estimator="group", train__group_size=3), resume=True)[0]
