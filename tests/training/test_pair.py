"""Policy and critic as configured: what is trained, what is stored, how it goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from training_fakes import VOCABULARY, parameters, random_rollouts, small_config
from transformers import AutoModelForCausalLM, AutoTokenizer

from compactionrl.cli import main
from compactionrl.config import Config, ConfigError, parse_config
from compactionrl.models import Transformer, load_policy, save_policy
from compactionrl.training.batch import build_batch
from compactionrl.training.checkpoint import Checkpoints, State, load
from compactionrl.training.learner import Learner
from compactionrl.training.merge import merge
from compactionrl.training.pair import new_pair
from compactionrl.training.tokenizer import build_tokenizer

LORA = {"rank": 2, "alpha": 4.0}
SETTINGS: dict[str, dict[str, Any]] = {
    "bfloat16": {"model": {"dtype": "bfloat16"}},
    "lora": {"lora": LORA},
    "lora, bfloat16": {"lora": LORA, "model": {"dtype": "bfloat16"}},
    "frozen": {"train": {"critic_trunk": "frozen"}},
    "shared": {"train": {"critic_trunk": "shared"}},
    "shared, bfloat16": {"train": {"critic_trunk": "shared"}, "model": {"dtype": "bfloat16"}},
    "lora, frozen": {"lora": LORA, "train": {"critic_trunk": "frozen"}},
    "lora, shared": {"lora": LORA, "train": {"critic_trunk": "shared"}},
    "lora, group": {"lora": LORA, "train": {"estimator": "group", "group_size": 2, "rollouts_per_step": 4}},
    "recomputed": {"train": {"gradient_checkpointing": True}},
    "lora, recomputed": {"lora": LORA, "train": {"gradient_checkpointing": True}},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    save_policy(Transformer(small_config(VOCABULARY, initializer_range=0.2)), folder)
    build_tokenizer(["one two"]).save_pretrained(folder)
    return folder


def configure(setting: str) -> Config:
    sections = SETTINGS[setting]
    rates = {"policy_lr": 1e-2, "critic_lr": 1e-2, "micro_batch_tokens": 40}
    return parse_config({**sections, "train": rates | sections.get("train", {})})


def learner_of(config: Config, base: Path) -> Learner:
    policy, critic = new_pair(config, base, "cpu")
    return Learner(policy, critic, config.train)


def train(learner: Learner, seed: int) -> dict[str, float]:
    batch = build_batch(random_rollouts(4, seed), learner.config)
    return learner.update(batch, learner.credit(batch))


@pytest.mark.parametrize("setting", SETTINGS)
def test_only_what_is_trained_changes_and_resume_is_exact(setting: str, base: Path, tmp_path: Path) -> None:
    config = configure(setting)
    learner = learner_of(config, base)
    before = parameters(learner)
    expected = trained_names(config, learner)
    metrics = [train(learner, seed) for seed in range(2)]
    assert all(m.get("critic/skipped", 0) == m["policy/skipped"] == 0 for m in metrics)
    after = parameters(learner)
    assert {key for key in before if not torch.equal(before[key], after[key])} == expected
    state = {key.rpartition(".")[0] for o in optimisers(learner) for key in o.tensors()}
    assert state == {key.partition(".")[2] for key in expected}

    folder = Checkpoints(tmp_path, keep=1).save(State(step=2), learner, base)
    _, resumed = load(folder, config, base)
    assert same(parameters(resumed), after)
    for seed in (2, 3):
        assert train(learner, seed) == train(resumed, seed)
    assert same(parameters(resumed), parameters(learner))
    assert same(masters(resumed), masters(learner))


def trained_names(config: Config, learner: Learner) -> set[str]:
    """By the meaning of the keys."""
    everything = {f"policy.{name}" for name, _ in learner.policy.named_parameters()}
    if learner.critic is not None:
        everything |= {f"critic.{name}" for name, _ in learner.critic.named_parameters()}
    head = {"critic.score.weight", "critic.score.bias"} & everything
    trunks_own = config.train.critic_trunk == "own"
    rest = {name for name in everything - head if name.startswith("policy") or trunks_own}
    return head | {name for name in rest if not config.lora.rank or ".lora_" in name}


def optimisers(learner: Learner) -> list[Any]:
    return [o for o in (learner.policy_optimiser, learner.critic_optimiser) if o is not None]


def masters(learner: Learner) -> dict[str, torch.Tensor]:
    return {f"{o.name}.{key}": m for o in optimisers(learner) for key, m in o.masters.items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("setting", ["lora", "lora, frozen", "shared", "lora, shared"])
def test_one_base_in_memory(setting: str, base: Path) -> None:
    learner = learner_of(configure(setting), base)
    assert learner.critic is not None
    decoders = (learner.policy.model, learner.critic.model)
    addresses = [{p.data_ptr() for name, p in d.named_parameters() if ".lora_" not in name} for d in decoders]
    assert addresses[0] == addresses[1]


def test_a_shared_trunk_is_read_as_it_is_at_the_time(base: Path) -> None:
    learner = learner_of(configure("shared"), base)
    critic = learner.critic
    assert critic is not None
    torch.nn.init.normal_(critic.score.weight)
    ids = torch.arange(6)
    before = critic(ids, [6])
    before.sum().backward()
    assert all(p.grad is None for p in learner.policy.parameters())
    assert critic.score.weight.grad is not None
    train(learner, 0)
    expected = learner.policy(ids, [6]) @ critic.score.weight[0] + critic.score.bias
    torch.testing.assert_close(critic(ids, [6]), expected)
    assert not torch.allclose(before, expected)


def test_recomputed_blocks_give_the_same_update(base: Path) -> None:
    plain = configure("lora")
    results = []
    for on in (False, True):
        config = plain.model_copy(update={"train": plain.train.model_copy(update={"gradient_checkpointing": on})})
        learner = learner_of(config, base)
        train(learner, 0)
        results.append(parameters(learner))
    assert same(*results)


def test_checkpoints_of_adapters_are_used_and_merged(base: Path, tmp_path: Path) -> None:
    learner = learner_of(configure("lora"), base)
    train(learner, 0)
    folder = Checkpoints(tmp_path / "checkpoints", keep=1).save(State(step=1), learner, base) / "policy"
    ids = torch.arange(8)
    expected = learner.policy(ids, [8]) @ learner.policy.head_weight.T
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    torch.testing.assert_close(theirs(ids[None]).logits[0], expected, rtol=1e-5, atol=1e-5)
    assert len(AutoTokenizer.from_pretrained(folder)) > 0
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["merge", str(folder), str(tmp_path / "merged")])
    merged = load_policy(tmp_path / "merged")
    torch.testing.assert_close(merged(ids, [8]) @ merged.head_weight.T, expected, rtol=1e-5, atol=1e-5)
    assert len(AutoTokenizer.from_pretrained(tmp_path / "merged")) > 0
    with pytest.raises(ConfigError, match="exists: choose another"):
        merge(folder, tmp_path / "merged")
    with pytest.raises(ConfigError, match="holds no adapters"):
        merge(base, tmp_path / "again")
    with pytest.raises(ConfigError, match="holds adapters; make an ordinary model of it first"):
        learner_of(configure("frozen"), folder)
    with pytest.raises(ConfigError, match="holds adapters; make an ordinary model of it first"):
        learner_of(configure("lora"), folder)


def test_a_value_head_has_the_digits_of_float32(base: Path, tmp_path: Path) -> None:
    learner = learner_of(configure("bfloat16"), base)
    assert learner.critic is not None
    assert learner.critic.score.weight.dtype == torch.float32
    assert {p.dtype for p in learner.critic.model.parameters()} == {torch.bfloat16}
    with pytest.raises(ConfigError, match=r"lora\.targets"):
        learner_of(parse_config({"lora": {**LORA, "targets": ["conv"]}}), base)
