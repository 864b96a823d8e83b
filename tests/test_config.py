"""Configuration: every mistake is refused with the key and the remedy; what is printed reads back as it was."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compactionrl.config import Config, ConfigError, load_config, parse_config
from compactionrl.config_toml import dump, parse_value, toml

RECIPES = sorted((Path(__file__).parents[1] / "recipes").glob("*.toml"))


def test_defaults_are_the_papers() -> None:
    config = load_config()
    assert (config.context.threshold, config.context.response_tokens) == (10240, 10240)
    assert (config.context.max_compactions, config.context.tail_steps) == (3, 2)
    assert (config.train.group_size, config.train.estimator, config.train.normalisation) == (
        1,
        "cross_trajectory",
        "token",
    )
    assert (config.train.critic_updates, config.train.policy_updates, config.train.alpha) == (2, 1, 1.5)
    config.check_trainable()


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"train.stepz": 3}, ["train.stepz", "unknown key"]),
        ({"trian.steps": 3}, ["trian", "unknown key"]),
        ({"train.steps": "many"}, ["train.steps", "integer", "'many'"]),
        ({"train.steps": 1.5}, ["train.steps", "integer"]),
        ({"train": 3}, ["train", "3"]),
        ({"train.policy_lr": -1}, ["train.policy_lr", "greater than 0"]),
        ({"train.policy_lr": float("nan")}, ["train.policy_lr", "finite number"]),
        ({"train.critic_lr": float("inf")}, ["train.critic_lr", "finite number"]),
        ({"train.estimator": "gae"}, ["train.estimator", "cross_trajectory"]),
        ({"context.budget": 0}, ["context.budget", "greater than 0"]),
        ({"context.resume_template": "go on"}, ["context.resume_template", "{summary}"]),
        ({"context.min_response": 10**6}, ["context.min_response", "context.response_tokens"]),
        ({"context.budget": 5000}, ["context.threshold", "context.budget", "lower the threshold or raise the budget"]),
        ({"context.threshold": 8192}, ["context.threshold", "context.summary_tokens", "raise the threshold"]),
        ({"context.budget": 18600}, ["context.summary_tokens", "context.budget", "raise the budget"]),
        ({"train.estimator": "group"}, ["train.estimator", "group_size", "raise"]),
        ({"train.rollouts_per_step": 10, "train.group_size": 4}, ["train.rollouts_per_step", "train.group_size"]),
        ({"evaluation.modes": ["x1", "x0"]}, ["evaluation.modes", "x4"]),
        ({"evaluation.modes": []}, ["evaluation.modes: ", "at least 1"]),
        ({"warm_start.kv_heads": 3}, ["warm_start.heads", "warm_start.kv_heads"]),
        ({"warm_start.head_dim": 3}, ["warm_start.head_dim", "multiple of 2"]),
        ({"run.threads": 0}, ["run.threads: ", "greater than or equal to 1", "'auto'"]),
        ({"sampling.temperature": 1e-4}, ["sampling.temperature", "at least 0.001"]),
        ({"sampling.temperature": -1}, ["sampling.temperature", "greater than or equal to 0"]),
        ({"sampling.top_p": 1e-9}, ["sampling.top_p", "greater than or equal to 0.000001"]),
    ],
)
def test_each_mistake_names_the_key_and_the_remedy(overrides: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(None, overrides)
    assert [word for word in words if word not in str(refused.value)] == []


def test_all_mistakes_are_named_at_once() -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(None, {"train.stepz": 1, "run.seed": -1})
    assert "train.stepz" in str(refused.value)
    assert "run.seed" in str(refused.value)


@pytest.mark.parametrize(("key", "value"), [("sampling.top_p", 0.9), ("sampling.temperature", 0)])
def test_what_could_not_be_trained_is_fine_to_evaluate(key: str, value: float) -> None:
    config = load_config(None, {key: value})
    with pytest.raises(ConfigError, match=key.replace(".", r"\.")):
        config.check_trainable()


def test_compaction_rules_do_not_bind_where_compaction_is_off() -> None:
    load_config(None, {"context.max_compactions": 0, "context.threshold": 1})


def test_overrides_win_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[train]\nsteps = 5\nalpha = 2.0\n")
    config = load_config(path, {"train.steps": 7})
    assert (config.train.steps, config.train.alpha) == (7, 2.0)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no configuration file"):
        load_config(tmp_path / "missing.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("[train\n")
    with pytest.raises(ConfigError, match=r"broken\.toml is not valid TOML"):
        load_config(broken)


def test_an_override_below_a_value_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run\.seed\.x.*seed is a value"):
        load_config(None, {"run.seed": 1, "run.seed.x": 2})


def test_prompts_hash_follows_each_prompt() -> None:
    changes = ["summary_request", "retry_request", "placeholder"]
    hashes = {load_config(None, {f"context.{key}": "other"}).context.prompts_hash for key in changes}
    hashes |= {load_config(None, {"context.resume_template": "x {summary}"}).context.prompts_hash}
    assert len(hashes | {Config().context.prompts_hash}) == 5


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipes_are_valid_and_print_back(path: Path) -> None:
    config = load_config(path)
    assert parse_config(tomllib.loads(dump(config))) == config


def test_printing_keeps_what_is_hard_to_write() -> None:
    overrides = {
        "context.summary_request": 'quotes " and \\ lines\nbreaks \t tabs \x7f \x00 \u2028 \U0001f600',
        "environment.options": {"odd key": [1, 2.5, True, "x"], "nested": {"a": {"b": -1e-30}}, "empty": {}},
        "train.value_clip": 0.3,
        "run.threads": "auto",
        "limits.environment_seconds": float("inf"),
    }
    config = load_config(None, overrides)
    assert parse_config(tomllib.loads(dump(config))) == config


def test_printed_text_documents_every_key() -> None:
    lines = dump(Config()).splitlines()
    for section, field in Config.model_fields.items():
        assert f"[{section}]" in lines
        for key, info in field.annotation.model_fields.items():  # type: ignore[union-attr]
            assert any(line.removeprefix("# ").startswith(f"{key} =") for line in lines), key
            assert info.description, f"{section}.{key} has no description"


JSON = st.recursive(
    st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner),
    max_leaves=8,
)


@given(JSON)
def test_any_value_reads_back(value: Any) -> None:
    back = tomllib.loads(f"value = {toml(value)}")["value"]
    assert back == value
    assert type(back) is type(value)


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("train.steps", "10", 10),
        ("train.policy_lr", "1e-3", 0.001),
        ("train.whiten", "true", True),
        ("evaluation.modes", '["x1", "x4"]', ["x1", "x4"]),
        ("evaluation.modes", "x1,x4", ["x1", "x4"]),
        ("evaluation.modes", "x4", ["x4"]),
        ("train.estimator", "segment", "segment"),
        ("run.threads", "auto", "auto"),
        ("run.threads", "2", 2),
        ("run.folder", "2026", "2026"),
        ("run.folder", "true", "true"),
        ("context.summary_request", '"quoted"', '"quoted"'),
        ("environment.options.facts", "3", 3),
        ("environment.options.style", "token", "token"),
        ("train.steps", "3\ntrain.alpha = 9", "3\ntrain.alpha = 9"),
    ],
)
def test_command_line_values(key: str, text: str, value: Any) -> None:
    assert parse_value(key, text) == value
