"""Checkpoints: all or nothing, whenever the process dies; the next update is the same bit for bit."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from training_fakes import parameters, random_rollouts, small_learner
from transformers import AutoModelForCausalLM

from compactionrl.config import Config
from compactionrl.training import atomic
from compactionrl.training.batch import build_batch
from compactionrl.training.checkpoint import Checkpoints, State, load
from compactionrl.training.learner import Learner


class Killed(BaseException):
    """Nothing in the code under test can catch this by accident."""


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    folder = tmp_path / "base"
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "config.json").write_text("not the policy's")
    (folder / "model.safetensors").write_text("not the policy's")
    return folder


def train(learner: Learner, seed: int) -> None:
    batch = build_batch(random_rollouts(4, seed), learner.config)
    learner.update(batch, learner.credit(batch))


def whole(learner: Learner) -> Config:
    return Config(train=learner.config)


def never(message: str) -> None:
    raise AssertionError(message)


@pytest.mark.parametrize("options", [{}, {"estimator": "group", "group_size": 2, "rollouts_per_step": 4}])
def test_the_next_update_is_the_same_bit_for_bit(tmp_path: Path, tokenizer: Path, options: dict[str, Any]) -> None:
    learner = small_learner(**options)
    train(learner, 1)
    state = State(value_batches=3, step=1, units=17, best={"checkpoint": "step-000001", "step": 1, "pass_at_1": 0.5})
    folder = Checkpoints(tmp_path / "checkpoints", keep=2).save(state, learner, tokenizer)
    learner.policy_optimiser.bad = 0
    loaded_state, loaded = load(folder, whole(learner), tokenizer)
    assert loaded_state == state
    assert (loaded.critic is None) == (learner.critic is None)
    for seed in (2, 3):
        train(learner, seed)
        train(loaded, seed)
    expected, found = parameters(learner), parameters(loaded)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[key], found[key]) for key in expected)


def test_before_the_first_update_and_between_bad_ones(tmp_path: Path, tokenizer: Path) -> None:
    learner = small_learner()
    learner.critic_optimiser.bad = 2  # type: ignore[union-attr]
    folder = Checkpoints(tmp_path / "checkpoints", keep=1).save(State(), learner, tokenizer)
    _, loaded = load(folder, whole(learner), tokenizer)
    assert loaded.policy_optimiser.tensors() == {}
    assert loaded.critic_optimiser.bad == 2  # type: ignore[union-attr]


def test_the_policy_is_an_ordinary_model_folder(tmp_path: Path, tokenizer: Path) -> None:
    learner = small_learner()
    folder = Checkpoints(tmp_path / "checkpoints", keep=1).save(State(step=1), learner, tokenizer)
    model = AutoModelForCausalLM.from_pretrained(folder / "policy")
    assert torch.equal(model.get_input_embeddings().weight, learner.policy.model.embed_tokens.weight)
    assert (folder / "policy" / "tokenizer.json").read_text() == "{}"
    stored = {path.name for path in folder.rglob("*") if path.is_file()}
    assert not any(name.endswith((".pt", ".bin", ".pkl")) for name in stored)
    assert load_file(folder / "policy_adam.safetensors") == {}


def crash_at(monkeypatch: pytest.MonkeyPatch, call: int) -> Callable[[], int]:
    """Raise `Killed` at the `call`-th operation on the disk; returns how many there were."""
    count = 0

    def guarded(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count == call:
                raise Killed
            return function(*args, **kwargs)

        return wrapper

    for owner, name in (
        (Path, "mkdir"), (Path, "rename"), (Path, "replace"), (Path, "write_text"), (Path, "symlink_to"),
        (Path, "unlink"), (shutil, "copyfile"), (shutil, "rmtree"), (os, "fsync"), (os, "unlink"), (os, "rmdir"),
    ):  # fmt: skip
        monkeypatch.setattr(owner, name, guarded(getattr(owner, name)))
    return lambda: count


def test_a_crash_at_any_write_leaves_a_complete_checkpoint(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three checkpoints with keep=1: the third save writes, links the best, and removes. Die at each of its operations."""
    learner = small_learner()

    def save(folder: Path, step: int) -> None:
        best = {"checkpoint": f"step-{min(step, 2):06}"}
        Checkpoints(folder, keep=1).save(State(step=step, best=best), learner, tokenizer)

    call, survived = 0, False
    while not survived:
        call += 1
        folder = tmp_path / f"crash-{call}"
        save(folder, 1)
        save(folder, 2)
        with monkeypatch.context() as patch:
            count = crash_at(patch, call)
            try:
                save(folder, 3)
                survived = True
            except Killed:
                assert count() == call
        messages: list[str] = []
        checkpoints = Checkpoints(folder, keep=1)
        latest = checkpoints.latest(messages.append)
        assert latest is not None
        assert latest.name in ("step-000002", "step-000003")
        assert not messages, "a crash alone never damages a checkpoint that has its final name"
        state, _ = load(latest, whole(learner), tokenizer)
        assert f"step-{state.step:06}" == latest.name
        assert not list(folder.glob(".partial*"))
        save(folder, 4)  # goes on as if nothing had happened
        assert checkpoints.names() == ["step-000002", "step-000004"]
        assert (folder / "best").resolve().name == "step-000002"
        shutil.rmtree(folder)
    assert call > 20, "the crashes did not reach the writes"


@pytest.mark.parametrize(
    "victim", ["policy/model.safetensors", "critic_adam.safetensors", "state.json", "manifest.json"]
)
@pytest.mark.parametrize("damage", ["truncated", "missing", "flipped"])
def test_damage_is_detected(tmp_path: Path, tokenizer: Path, victim: str, damage: str) -> None:
    learner = small_learner()
    train(learner, 0)
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=3)
    checkpoints.save(State(step=1), learner, tokenizer)
    path = checkpoints.save(State(step=2), learner, tokenizer) / victim
    content = path.read_bytes()
    path.unlink()
    if damage == "truncated":
        path.write_bytes(content[:-3])
    elif damage == "flipped":
        path.write_bytes(bytes([*content[:-5], content[-5] ^ 1, *content[-4:]]))
    messages: list[str] = []
    latest = checkpoints.latest(messages.append)
    assert latest is not None
    assert latest.name == "step-000001"
    assert len(messages) == 1
    assert "step-000002" in messages[0]
    assert checkpoints.names() == ["step-000001"]


def test_what_others_put_beside_it_is_no_damage(tmp_path: Path, tokenizer: Path) -> None:
    """File managers leave files of their own wherever someone looks; people keep notes."""
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=1)
    path = checkpoints.save(State(step=1), small_learner(), tokenizer)
    (path / "policy" / ".DS_Store").write_text("x")
    (tmp_path / "checkpoints" / "my-notes").mkdir()
    assert checkpoints.latest(never) == path
    checkpoints.save(State(step=2), small_learner(), tokenizer)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["my-notes", "step-000002"]


def test_rotation_keeps_the_latest_and_the_best(tmp_path: Path, tokenizer: Path) -> None:
    learner = small_learner()
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
    states = [State(value_batches=2), State(value_batches=10), State(value_batches=10, step=2)]
    states += [State(step=step, best={"checkpoint": "step-000002"}) for step in (10, 11, 12)]
    for state in states:
        checkpoints.save(state, learner, tokenizer)
    assert checkpoints.names() == ["step-000002", "step-000011", "step-000012"]
    assert checkpoints.names() == sorted(checkpoints.names())
    assert os.readlink(checkpoints.folder / "best") == "step-000002"
    assert json.loads((checkpoints.folder / "best" / "state.json").read_text())["step"] == 2
    checkpoints.save(State(step=13, best={"checkpoint": "step-000013"}), learner, tokenizer)
    assert checkpoints.names() == ["step-000012", "step-000013"]
    assert checkpoints.latest(never) == checkpoints.folder / "step-000013"


def test_pretraining_is_older_than_every_step(tmp_path: Path, tokenizer: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=9)
    for state in (State(value_batches=50, step=1), State(value_batches=50), State(value_batches=9)):
        checkpoints.save(state, small_learner(), tokenizer)
    assert checkpoints.names() == ["value-000009", "value-000050", "step-000001"]


def test_no_checkpoint_at_all(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path / "checkpoints", keep=1).latest(never) is None


def test_a_file_is_replaced_or_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "file"
    atomic.write_file(path, lambda p: p.write_text("old"))

    def half(partial: Path) -> None:
        partial.write_text("ne")
        raise Killed

    with pytest.raises(Killed):
        atomic.write_file(path, half)
    assert path.read_text() == "old"
    atomic.write_file(path, lambda p: p.write_text("new"))
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    assert path.read_text() == "new"
