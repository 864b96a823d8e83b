"""The number of threads is measured once and then kept."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from training_fakes import parameters, small_learner
from training_tasks import tiny_config

from compactionrl.config import LoraConfig
from compactionrl.models.lora import add_adapters
from compactionrl.training import threads
from compactionrl.training.run_folder import RunFolder


@pytest.fixture(autouse=True)
def restore() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_candidates() -> None:
    assert [threads.candidates(cores) for cores in (1, 2, 4, 6)] == [[1], [1, 2], [1, 2, 4], [1, 2, 4, 6]]


def test_auto_takes_the_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that says: this workload is fastest with two threads."""
    now = 0.0

    def workload() -> None:
        nonlocal now
        now += {1: 3.0, 2: 2.0, 4: 5.0}[torch.get_num_threads()]

    monkeypatch.setattr(threads.time, "perf_counter", lambda: now)
    monkeypatch.setattr(threads, "available_cores", lambda: 4)
    assert threads.choose_threads("auto", workload) == 2
    assert threads.choose_threads(3, workload) == 3


def test_a_base_with_adapters_is_measured_too(tmp_path: Path) -> None:
    policy = small_learner().policy
    add_adapters(policy, LoraConfig(rank=2))
    threads.work(tiny_config(tmp_path), policy)


def test_the_choice_is_stored_and_reused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config(tmp_path, run__threads="auto")
    folder = RunFolder(config, resume=False)
    folder.create()
    monkeypatch.setattr(threads, "available_cores", lambda: 1)
    learner = small_learner()
    before = parameters(learner)
    assert threads.settle_threads(config, folder, learner.policy) == 1
    assert all(torch.equal(before[key], value) for key, value in parameters(learner).items())
    assert all(p.grad is None for p in learner.policy.parameters())
    folder.remember({"threads": 2})
    assert threads.settle_threads(config, folder, learner.policy) == 2
    assert torch.get_num_threads() == 2
    assert folder.recall()["threads"] == 2
