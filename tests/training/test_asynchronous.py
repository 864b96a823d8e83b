"""Rollouts that run ahead of the updates: the bound, from the records; what they were sampled with; how it all stops."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from io import StringIO
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from slow_tasks import SlowSampler
from training_tasks import make_base, tiny_config

from compactionrl import build
from compactionrl.config import Config, parse_config
from compactionrl.models import Critic, load_critic, load_policy
from compactionrl.rollout.ledger import Rollout
from compactionrl.rollout.loop import RolloutSettings, run_rollout
from compactionrl.rollout.stream import CollectionError
from compactionrl.samplers.protocol import SamplerRefused
from compactionrl.training.batch import build_batch
from compactionrl.training.learner import Learner
from compactionrl.training.optimiser import TrainingError
from compactionrl.training.order import task_order, units
from compactionrl.training.records import read_rollouts
from compactionrl.training.staleness import recorded_staleness, trained_versions
from compactionrl.training.trainer import Trainer


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    SlowSampler.calls.clear()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("made") / "base")


@pytest.fixture
def tmp(base: Path, tmp_path: Path) -> Path:
    (tmp_path / "base").symlink_to(base)
    return tmp_path


def slow_config(tmp: Path, staleness: int, *, seconds: float = 0.004, faults: float = 0.0, **options: Any) -> Config:
    """Environments and a sampler that dawdle; all checkpoints are kept."""
    return tiny_config(
        tmp,
        **{
            "train__staleness": staleness,
            "train__checkpoint_every": 1,
            "train__keep_checkpoints": 100,
            "environment__tasks": "slow_tasks:SlowTasks",
            "environment__options": {"seconds": seconds, "faults": faults, "size": 400},
            "sampling__sampler": "slow_tasks:SlowSampler",
            "sampling__sampler_options": {"seconds": seconds, "faults": faults},
            "evaluation__every": 0,
            "evaluation__modes": ["x1"],
            **options,
        },
    )


def train(config: Config, **options: Any) -> tuple[bool, str]:
    """Run to the end; returns whether it finished, and what it said."""
    console = Console(file=StringIO(), width=200)
    finished = Trainer(config, console=console, **options).run()
    return finished, console.file.getvalue()  # type: ignore[attr-defined]


def metrics(tmp: Path, phase: str = "train") -> list[dict[str, Any]]:
    lines = (json.loads(line) for line in (tmp / "run" / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["phase"] == phase]


def batches(tmp: Path) -> dict[str, list[Rollout]]:
    """The rollouts of each batch of a run, dropped ones included, in the order of the batches."""
    files = sorted((tmp / "run" / "rollouts").iterdir(), key=lambda path: (path.stem[0] == "s", path.stem))
    return {path.stem: read_rollouts(path) for path in files}


def unit_of(rollout: Rollout) -> int:
    return int(rollout.id.split("-")[1])


def state(tmp: Path, name: str) -> dict[str, Any]:
    return json.loads((tmp / "run" / "checkpoints" / name / "state.json").read_text())


def check_records(tmp: Path, staleness: int) -> None:
    """What must hold of every run: the bound, and that each task was trained once, in order, or counted as dropped."""
    for name, ages in recorded_staleness(tmp / "run"):
        assert 0 <= ages["staleness/max"] <= staleness, name
    seen: list[int] = []
    for rollouts in batches(tmp).values():
        trained = [unit_of(r) for r in rollouts if r.end != "error"]
        assert len(trained) == 6
        assert trained == sorted(trained)
        numbers = sorted(map(unit_of, rollouts))
        assert numbers == list(range(len(seen), len(seen) + len(numbers))), "nothing is passed over"
        seen += numbers
    last = list(batches(tmp))[-1]
    assert state(tmp, last)["units"] == len(seen)
    assert state(tmp, last)["dropped"] == len(seen) - 6 * len(batches(tmp))


@pytest.mark.parametrize("staleness", [1, 2])
def test_the_bound_holds_and_each_version_sampled_what_it_is_said_to_have_sampled(tmp: Path, staleness: int) -> None:
    """Every recorded log-probability is that of the checkpoint of its version: no half of an update was ever used."""
    assert train(slow_config(tmp, staleness))[0]
    check_records(tmp, staleness)
    policies = {0: load_policy(tmp / "base")}
    for step in range(1, 6):
        policies[step] = load_policy(tmp / "run" / "checkpoints" / f"step-{step:06}" / "policy")
    ages, spanning = set(), 0
    for name, rollouts in batches(tmp).items():
        for rollout in rollouts:
            spanning += len(set(trained_versions(rollout).tolist())) > 1
            if name.startswith("step"):
                ages |= {int(name[5:]) - 1 - v for v in trained_versions(rollout).tolist()}
            for window in rollout.windows:
                ids = torch.tensor(window.token_ids)
                for version in set(window.versions) - {-1}:
                    policy = policies[version]
                    with torch.no_grad():
                        logp = (policy(ids, [len(ids)]) @ policy.head_weight.T).log_softmax(1)
                    for t in (t for t, v in enumerate(window.versions) if v == version):
                        assert window.logprobs[t] == pytest.approx(float(logp[t - 1, ids[t]]), abs=1e-4)
    assert max(ages) == staleness, "it is used"
    assert spanning, "rollouts go on with new weights"
    logged = metrics(tmp)
    found = dict(recorded_staleness(tmp / "run"))
    for line in logged:
        expected = found[f"step-{line['step']:06}"]
        assert {key: line[key] for key in expected} == pytest.approx(expected)


def test_without_staleness_it_is_the_plain_loop(tmp: Path) -> None:
    """Weights and figures bit for bit: rollouts of one batch, all together; its update; the next batch."""
    config = tiny_config(tmp, evaluation__every=0, train__keep_checkpoints=9)
    assert train(config)[0]
    base = tmp / "base"
    policy, critic = load_policy(base), Critic(load_policy(base))
    learner = Learner(policy, critic, config.train)
    tasks, chat = build.build_tasks(config), build.build_chat(config, base)
    jobs = units(config.run.seed, 1000, 1)
    settings = RolloutSettings(config.context, config.limits)

    async def collect() -> list[Rollout]:
        sampler = build.build_sampler(config, policy)
        running = [
            run_rollout(
                tasks.environment("train", job.index),
                sampler,
                chat,
                settings,
                rollout_id=job.rollout_id,
                task_id=tasks.task_id("train", job.index),
                seed=job.seed,
            )
            for (job,) in islice(jobs, 6)
        ]
        return await asyncio.gather(*running)

    expected = []
    for number in range(8):
        batch = build_batch(asyncio.run(collect()), config.train)
        expected.append(learner.update(batch, learner.credit(batch), train_policy=number >= 2))
    lines = metrics(tmp, "value") + metrics(tmp)
    for line, figures in zip(lines, expected, strict=True):
        plain = {key.removeprefix("pretraining/"): value for key, value in line.items()}
        assert {key: plain[key] for key in figures} == figures
        assert plain["time/overlap"] == 0
        assert not any(key.startswith("staleness") for key in plain)
    final = tmp / "run" / "checkpoints" / "step-000006"
    for model, stored in ((policy, load_policy(final / "policy")), (critic, load_critic(final / "critic"))):
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), stored.parameters(), strict=True))


@pytest.mark.parametrize(
    "sections",
    [
        {"lora": {"rank": 2}},
        {"lora": {"rank": 2}, "train": {"critic_trunk": "shared", "gradient_checkpointing": True}},
        {"model": {"dtype": "bfloat16"}},
    ],
    ids=["adapters", "adapters, shared trunk, recomputed", "bfloat16"],
)
def test_what_is_copied_is_what_is_trained(tmp: Path, sections: dict[str, dict[str, Any]]) -> None:
    """The base of adapters stays one, in memory; the weights behind it differ during an update and not after it."""
    data = slow_config(tmp, 1, train__steps=2, sampling__sampler="local", sampling__sampler_options={}).model_dump()
    for name, section in sections.items():
        data[name] |= section
    trainer = Trainer(parse_config(data), console=Console(file=StringIO()))
    learned, sampled = (dict(m.named_parameters()) for m in (trainer.learner.policy, trainer.sampling.policy))
    assert learned.keys() == sampled.keys()
    assert any(p.requires_grad for p in learned.values())
    for name, p in learned.items():
        assert (sampled[name] is p) == (not p.requires_grad), name
    assert trainer.run()
    asyncio.run(trainer.sampling.current(2))
    assert all(torch.equal(sampled[name], p) for name, p in learned.items())
    assert metrics(tmp)[0]["ratio/mean"] == pytest.approx(1, abs=0.05)


def test_rollouts_run_during_the_updates(tmp: Path) -> None:
    """An environment that takes its time is waited for while the update computes."""
    train(slow_config(tmp, 1, seconds=0.02, train__value_pretraining_steps=0))
    lines = metrics(tmp)
    assert all(0 <= line["time/overlap"] <= line["time/update"] for line in lines)
    assert sum(line["time/overlap"] for line in lines[:-1]) > 0
    assert lines[-1]["time/overlap"] == 0, "nothing is left to run ahead of"


@pytest.mark.parametrize("staleness", [0, 2])
def test_what_a_sampler_may_have_is_asked_for(tmp: Path, staleness: int) -> None:
    """`start` first, with the longest window; each version's weights once, before anything of it; `close` at the end."""
    assert train(slow_config(tmp, staleness, evaluation__every=2, evaluation__modes=["x4", "2C"]))[0]
    calls = SlowSampler.calls
    assert calls[:2] == [("start", 2 * 96), ("weights", 0)]
    assert calls[-1] == "close"
    assert [call for call in calls if call[0] == "weights"] == [("weights", version) for version in range(7)]
    assert calls.count("close") == 1
    lines = metrics(tmp, "eval")
    assert [line["step"] for line in lines] == [0, 2, 4, 6]


def test_an_evaluation_runs_alone_and_with_the_latest_weights(tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from compactionrl.evaluation.evaluate import evaluate

    seen = []

    async def watched(tasks: Any, sampler: Any, *arguments: Any, **options: Any) -> dict[str, dict[str, Any]]:
        assert not sampler.local._rows._by_affinity, "no rollout in training holds a row"
        results = await evaluate(tasks, sampler, *arguments, **options)
        assert not sampler.local._rows._by_affinity
        seen.append(sampler.local.policy_version)
        return results

    assert train(slow_config(tmp, 2, evaluation__every=2), evaluate=watched)[0]
    assert seen == [0, 2, 4, 6]
    check_records(tmp, 2)


def test_faults_of_all_kinds(tmp: Path) -> None:
    """Environments and requests that break down, tasks that always do: dropped, refilled, counted, in order."""
    broken = task_order(5, 0, 400)[3:40:9]
    options = {"seconds": 0.002, "faults": 0.05, "size": 400, "broken": list(broken)}
    assert train(slow_config(tmp, 2, faults=0.05, environment__options=options))[0]
    check_records(tmp, 2)
    dropped = {r.task_id for rollouts in batches(tmp).values() for r in rollouts if r.end == "error"}
    assert {f"train-{index}" for index in broken} <= dropped
    lines = metrics(tmp)
    assert sum(line["rollout/retried"] for line in lines) > 0


def test_when_everything_breaks_the_run_stops_with_its_state_saved(tmp: Path) -> None:
    order = task_order(5, 0, 400)
    options = {"seconds": 0.001, "size": 400, "broken": list(order[20:])}
    with pytest.raises(CollectionError, match="the sandbox is gone"):
        train(slow_config(tmp, 1, environment__options=options, train__retries=0))
    done = list(batches(tmp))[-1]
    assert state(tmp, done)["units"] == 6 * len(batches(tmp)) <= 18
    assert SlowSampler.calls[-1] == "close"


def test_a_sampler_that_refuses_to_start_leaves_nothing_behind(tmp: Path) -> None:
    config = slow_config(tmp, 1, sampling__sampler_options={"refuses": "start"})
    with pytest.raises(SamplerRefused, match="no such model"):
        train(config)
    assert not (tmp / "run").exists()
    assert SlowSampler.calls == [("start", 96), "close"]


def test_weights_that_cannot_be_pushed_stop_the_run_with_its_state_saved(tmp: Path) -> None:
    with pytest.raises(SamplerRefused, match="wrong weights"):
        train(slow_config(tmp, 1, sampling__sampler_options={"refuses": "weights 3"}))
    assert state(tmp, "step-000003")["step"] == 3
    assert SlowSampler.calls[-1] == "close"


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_sampler_that_keeps_old_weights_is_found_out(tmp: Path, staleness: int) -> None:
    """Its tokens are never trained beyond the bound."""
    with pytest.raises(TrainingError, match=rf"{staleness + 1} policy versions ago.*staleness allows {staleness}"):
        train(slow_config(tmp, staleness, sampling__sampler_options={"deaf": True}))
    assert [line["step"] for line in metrics(tmp)] == list(range(1, staleness + 2))


def test_an_exception_in_an_update_comes_out(tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Learner, *arguments: Any) -> dict[str, float]:
        assert threading.current_thread() is not threading.main_thread()
        raise RuntimeError("no memory")

    monkeypatch.setattr(Learner, "update_policy", fail)
    with pytest.raises(RuntimeError, match="no memory"):
        train(slow_config(tmp, 1))
    assert SlowSampler.calls[-1] == "close"
    assert [thread for thread in threading.enumerate() if thread.name == "update"] == []


def press_in(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, call: int) -> None:
    """Ctrl-C at the `call`-th call of a method, and a while for it to be noticed."""
    method, count = getattr(owner, name), 0

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count == call:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.05 if threading.current_thread() is not threading.main_thread() else 0)
        return method(*args, **kwargs)

    monkeypatch.setattr(owner, name, wrapper)


@pytest.mark.parametrize(
    ("owner", "name", "call", "stopped_after"),
    [
        (SlowSampler, "sample", 5, "value-000000"),
        (SlowSampler, "weights_changed", 4, "step-000003"),
        (Learner, "update_critic", 3, "value-000002"),  # in the thread: it is finished first
        (Learner, "update_policy", 3, "step-000003"),
        (Trainer, "save", 4, "step-000002"),
    ],
)
def test_ctrl_c_and_resume(
    tmp: Path, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, call: int, stopped_after: str
) -> None:
    """Rollouts in flight are lost and run again; each task is trained once."""
    with monkeypatch.context() as patch:
        press_in(patch, owner, name, call)
        finished, said = train(slow_config(tmp, 2))
    assert not finished
    assert f"stopped after {stopped_after}" in said
    assert SlowSampler.calls[-1] == "close"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert state(tmp, stopped_after)["units"] == 6 * len(batches(tmp))
    assert train(slow_config(tmp, 2), resume=True)[0]
    check_records(tmp, 2)
    assert [line["step"] for line in metrics(tmp)] == [1, 2, 3, 4, 5, 6]


SCRIPT = """
import sys, time
from pathlib import Path
from slow_tasks import SlowSampler
from training_tasks import tiny_config
from compactionrl.training.learner import Learner
from compactionrl.training.trainer import Trainer
sys.path.insert(0, {here!r})
from test_asynchronous import slow_config
mode, folder = sys.argv[1], Path(sys.argv[2])
if mode == "hang":
    def update(self, *arguments, **options):
        print("updating", flush=True)
        time.sleep(3600)
    Learner.update = update
Trainer(slow_config(folder, 2), resume="--resume" in sys.argv).run()
"""


def start(tmp: Path, mode: str, *options: str) -> subprocess.Popen[str]:
    here = Path(__file__).parent
    environment = os.environ | {"PYTHONPATH": f"{here.parents[1] / 'src'}:{here}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", SCRIPT.format(here=str(here)), mode, str(tmp), *options]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_killed_and_resumed(tmp: Path) -> None:
    for number, lines in enumerate((1, 5)):
        process = start(tmp, "run", *(["--resume"] if number else []))
        path = tmp / "run" / "metrics.jsonl"
        while process.poll() is None and not (path.exists() and path.read_bytes().count(b"\n") >= lines):
            time.sleep(0.002)
        process.kill()
        process.communicate()
    process = start(tmp, "run", "--resume")
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    check_records(tmp, 2)
    assert [line["step"] for line in metrics(tmp)] == [1, 2, 3, 4, 5, 6]


def test_a_second_ctrl_c_does_not_wait_for_the_update(tmp: Path) -> None:
    process = start(tmp, "hang")
    assert process.stdout is not None
    assert any("updating" in line for line in iter(process.stdout.readline, ""))
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert process.poll() is None, "the first one waits"
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode != 0
