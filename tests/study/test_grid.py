"""Which cells there are, in which order, with which configuration, and what identifies them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from study_fakes import TINY, tiny

from compactionrl.config import Config, ConfigError, TrainConfig
from compactionrl.evaluation import modes
from compactionrl.evaluation.modes import training_contexts
from compactionrl.study import grid as grid_module
from compactionrl.study.grid import PACKAGED, Cell, Setting, check, grid, load_setting
from compactionrl.study.variants import VARIANTS

PAPER = ["base", "rl-c", "rl-2c", "no-summary", "segment-loss", "segment-gae", "full"]
EXTRA = ["rl-total", "concatenated", "lambda-segment", "lambda-window", "coupled-lambda", "group", "robust"]
ALL = [*PAPER, "swap", *EXTRA]


def named(name: str) -> Setting:
    return Setting(name, "", tiny().config)


def fingerprints(setting: Setting) -> dict[str, str]:
    return {name: Cell(setting, name, 1).fingerprint for name in ALL}


def windows(n: int, **overrides: Any) -> Setting:
    return tiny(context__max_compactions=n - 1, evaluation__modes=["x1", f"x{n}", "2C", f"{n}C"], **overrides)


@given(st.integers(1, 3), st.integers(1, 7), st.booleans())
def test_each_declared_cell_once_and_none_before_what_it_needs(count: int, seeds: int, extra: bool) -> None:
    cells = grid([named(f"s{number}") for number in range(count)], seeds, extra=extra)
    expected = {
        f"s{s}/{name}/{seed}" for s in range(count) for name in [*PAPER, "swap"] for seed in range(1, seeds + 1)
    }
    expected |= {f"s{s}/perfect/1" for s in range(count)}
    if extra:
        expected |= {f"s{s}/{name}/{k}" for s in range(count) for name in EXTRA for k in range(1, min(seeds, 3) + 1)}
    keys = [cell.key for cell in cells]
    assert len(keys) == len(set(keys))
    assert set(keys) == expected
    place = {key: number for number, key in enumerate(keys)}
    assert all(place[need.key] < place[cell.key] for cell in cells for need in cell.needs)


def test_the_papers_arms_come_first_setting_by_setting_and_seed_by_seed() -> None:
    cells = grid([named("a"), named("b")], 4, extra=True)
    names = ["a/1", "a/2", "a/3", "a/4", "b/1", "b/2", "b/3", "b/4"]
    paper, perfect, extras = cells[: 8 * 8], cells[8 * 8 : 8 * 8 + 2], cells[8 * 8 + 2 :]
    assert [cell.key for cell in perfect] == ["a/perfect/1", "b/perfect/1"], "a script plays the same on every seed"
    assert [f"{cell.setting.name}/{cell.seed}" for cell in paper] == [name for name in names for _ in range(8)]
    assert {cell.name for cell in paper} == {*PAPER, "swap"}
    assert {cell.name for cell in extras} == set(EXTRA)
    assert [cell.name for cell in cells[:4]] == ["base", "full", "no-summary", "swap"], "the swap as soon as it can be"


def test_what_a_cell_needs_is_of_its_own_setting_and_seed() -> None:
    def needs(name: str) -> list[str]:
        return [need.key for need in Cell(named("a"), name, 3).needs]

    assert needs("base") == []
    assert all(needs(name) == ["a/base/3"] for name in ALL if name not in ("base", "swap"))
    assert needs("perfect") == ["a/base/3"]
    assert sorted(needs("swap")) == ["a/base/3", "a/full/3", "a/no-summary/3"]


def test_every_arm_trains_what_its_title_says() -> None:
    """The whole difference between an arm and `full`, written out by hand, for four windows of 128."""
    expected: dict[str, dict[str, Any]] = {
        "rl-c": {"modes": ["x1"]},
        "rl-2c": {"modes": ["2C"]},
        "no-summary": {"summaries": False},
        "segment-loss": {"normalisation": "segment"},
        "segment-gae": {"estimator": "segment"},
        "full": {},
        "rl-total": {"modes": ["4C"]},
        "concatenated": {"estimator": "concatenated"},
        "lambda-segment": {"lambda_length": "segment"},
        "lambda-window": {"lambda_length": "window"},
        "coupled-lambda": {"critic_lambda": "policy"},
        "group": {"estimator": "group", "group_size": 8},
        "robust": {"modes": ["x1", "x4"]},
    }
    assert [one.name for one in VARIANTS if not one.extra] == PAPER
    assert [one.name for one in VARIANTS if one.extra] == EXTRA
    full = Cell(tiny(), "full", 2).config()
    for name, changes in expected.items():
        config = Cell(tiny(), name, 2).config()
        assert config.train == full.train.model_copy(update=changes)
        for section in ("context", "limits", "sampling", "environment", "warm_start", "evaluation", "model"):
            assert getattr(config, section) == getattr(full, section), (name, section)


@pytest.mark.parametrize("n", [3, 4, 8, 12])
def test_every_arm_is_a_valid_configuration_with_any_number_of_windows(n: int) -> None:
    setting = windows(n)
    check(grid([setting], 2, extra=True))
    shapes = {
        "rl-c": [(0, 128)],
        "rl-2c": [(0, 256)],
        "rl-total": [(0, 128 * n)],
        "robust": [(0, 128), (n - 1, 128)],
    }
    for name in (name for name in ALL if name not in ("base", "swap")):
        found = [(c.max_compactions, c.budget) for c in training_contexts(Cell(setting, name, 1).config())]
        assert found == shapes.get(name, [(n - 1, 128)])
    texts = {"base": "", "rl-c": "x1", "rl-2c": "2C", "rl-total": f"{n}C", "robust": f"x1 or x{n}"}
    assert all(one.trained_in(n) == texts.get(one.name, f"x{n}") for one in VARIANTS)
    header = setting.header()
    assert (header["windows"], header["compacting"], header["long"], header["budget"]) == (n, f"x{n}", f"{n}C", 128)


def test_the_packaged_settings_can_be_studied() -> None:
    for path in PACKAGED.glob("*.toml"):
        for quick in (False, True):
            setting = load_setting(path.stem, {}, quick=quick)
            assert (setting.name, path.read_text().strip() in setting.toml) == (path.stem, True)
            check(grid([setting], 5, extra=True))
            assert {f"{setting.windows}C", "2C"} <= set(setting.config.evaluation.modes)


def test_where_a_cell_runs_and_what_it_starts_from(tmp_path: Path) -> None:
    setting = tiny(evaluation__final_tasks=5)
    base, full, swap = (Cell(setting, name, 3).config(tmp_path) for name in ("base", "full", "swap"))
    assert base.model.path == "warm-start"
    assert full.model.path == swap.model.path == str(tmp_path / "tiny/base/3/base")
    assert full.run.folder == str(tmp_path / "tiny/full/3")
    for config in (base, full, swap):
        assert (config.run.seed, config.warm_start.seed, config.evaluation.tasks) == (3, 3, 5)
    policy = Cell(setting, "swap", 3).policy_folder(tmp_path, "no-summary")
    assert policy == tmp_path / "tiny/no-summary/3/checkpoints/step-000003/policy"


# Fingerprints


def test_all_cells_of_a_setting_have_different_fingerprints() -> None:
    cells = [Cell(tiny(), name, seed) for name in ALL for seed in range(1, 6)]
    assert len({cell.fingerprint for cell in cells}) == len(cells) == 15 * 5


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("context.tail_steps", 2),
        ("context.summary_request", "again"),
        ("limits.turns", 17),
        ("sampling.temperature", 0.9),
        ("sampling.concurrency", 3),
        ("environment.options", {"seed": 2}),
        ("environment.options.early", 0.5),
        ("warm_start.lr", 1e-3),
        ("warm_start.forget", 0.3),
        ("train.steps", 4),
        ("train.policy_lr", 2e-2),
        ("train.entropy_bonus", 0.2),
        ("evaluation.seed", 1),
        ("evaluation.final_tasks", 9),
        ("evaluation.modes", ["x1", "x4"]),
        ("model.renderer_options", {"enable_thinking": False}),
    ],
)
def test_any_other_value_is_another_run(key: str, value: Any) -> None:
    before, after = fingerprints(tiny()), fingerprints(load_setting(str(TINY), {key: value}))
    assert not set(before.values()) & set(after.values())


def test_places_names_and_defaults_written_out_change_nothing(tmp_path: Path) -> None:
    text = TINY.read_text() + '\n[run]\nfolder = "elsewhere"\nseed = 9\n[sampling]\ntop_p = 1.0\n'
    (tmp_path / "other.toml").write_text(text.replace("[train]", "[train]\nclip_low = 0.2\nsummaries = true"))
    other = load_setting(str(tmp_path / "other.toml"), {"evaluation.final_tasks": 8})
    assert other.name == "other"
    assert fingerprints(other) == fingerprints(tiny())


def test_a_key_that_is_new_changes_nothing_where_it_stands_at_its_default(monkeypatch: pytest.MonkeyPatch) -> None:
    class WiderTrain(TrainConfig):
        novelty: int = 3

    class Wider(Config):
        train: WiderTrain

    before = fingerprints(tiny())
    for reader in (grid_module, modes):
        monkeypatch.setattr(reader, "parse_config", Wider.model_validate)
    assert Cell(tiny(), "full", 1).config().train.novelty == 3  # type: ignore[attr-defined]
    assert fingerprints(tiny()) == before


def test_another_process_finds_the_same_fingerprint() -> None:
    script = (
        "import sys; from compactionrl.study.grid import Cell, load_setting; "
        "print(Cell(load_setting(sys.argv[1], {}), 'robust', 2).fingerprint, 'torch' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", script, str(TINY)], capture_output=True, text=True, check=True)
    assert run.stdout.split() == [Cell(tiny(), "robust", 2).fingerprint, "False"]


# Overrides


def test_an_override_reaches_every_arm_but_the_one_that_is_about_it() -> None:
    setting = tiny(train__normalisation="token", train__group_size=2, train__alpha=2.0, train__rollouts_per_step=16)
    for name in (name for name in ALL if name not in ("base", "swap")):
        train = Cell(setting, name, 1).config().train
        assert train.alpha == 2.0
        assert train.normalisation == ("segment" if name == "segment-loss" else "token")
        assert train.group_size == (8 if name == "group" else 2)


def test_quick_is_small_and_gives_way_to_what_is_asked_for() -> None:
    quick = tiny(quick=True).config
    assert (quick.train.steps, quick.train.rollouts_per_step, quick.evaluation.final_tasks) == (2, 8, 16)
    assert quick.context == tiny().config.context
    asked = tiny(quick=True, train__steps=1, train__alpha=2.0)
    assert (asked.config.train.steps, asked.config.train.alpha, asked.config.evaluation.final_tasks) == (1, 2.0, 16)
    check(grid([asked], 1, extra=True))


def test_the_report_shows_the_setting_with_what_was_changed(tmp_path: Path) -> None:
    assert tiny().toml == TINY.read_text()
    text = tiny(quick=True, train__steps=1, context__placeholder='a "b"\nc ü').toml
    assert text.startswith(TINY.read_text().rstrip())
    assert "# train.steps = 1\n" in text
    assert "# train.steps = 2\n" not in text
    assert "# warm_start.demonstrations = 32\n" in text
    (tmp_path / "again.toml").write_text(text)
    assert load_setting(str(tmp_path / "again.toml"), {}).config == tiny().config, "the changes are comments"


# Refusals


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"model.path": "demo"}, r"model\.path must be 'warm-start'"),
        ({"context.max_compactions": 0}, r"context\.max_compactions must be 1 or more"),
        ({"evaluation.modes": ["x1", "2C"]}, r"evaluation\.modes must hold x1 and x4"),
        ({"evaluation.modes": ["x4"]}, r"evaluation\.modes must hold x1 and x4"),
        ({"context.max_compactions": 7}, r"evaluation\.modes must hold x1 and x8"),
        ({"train.steps": 0}, r"train\.steps must be 1 or more"),
        ({"train.stepz": 3}, r"train\.stepz.*did you mean train\.steps"),
        ({"train.modes": ["x1"]}, r"--train\.modes.*every arm"),
        ({"run.seed": 3}, r"--run\.seed.*--seeds"),
        ({"warm_start.seed": 3}, r"--warm_start\.seed.*--seeds"),
        ({"run.folder": "x"}, r"--run\.folder.*--runs"),
        ({"evaluation.tasks": 3}, r"--evaluation\.tasks.*--evaluation\.final_tasks"),
    ],
)
def test_a_setting_that_cannot_be_studied_is_refused(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_setting(str(TINY), overrides)


def test_training_modes_in_the_file_are_refused_like_those_on_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text(TINY.read_text().replace("[train]", '[train]\nmodes = ["x1", "x4"]'))
    with pytest.raises(ConfigError, match=r"train\.modes must be left out"):
        load_setting(str(path), {})


@pytest.mark.parametrize("name", ["nowhere", "no/where", "nowhere.toml", "", ".", "../study"])
def test_an_unknown_setting_is_refused_with_the_choices(name: str) -> None:
    with pytest.raises(ConfigError, match=r"--setting .*choose one of .*TOML file"):
        load_setting(name, {})


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"train__rollouts_per_step": 12}, r"tiny/group/1: train\.rollouts_per_step must be a multiple"),
        ({"sampling__temperature": 0}, r"tiny/base/1: sampling\.temperature 0 cannot be trained"),
        ({"sampling__top_p": 0.5}, r"tiny/base/1: sampling\.top_p"),
        ({"train__estimator": "segment"}, r"tiny/full/1 and tiny/segment-gae/1 would be the same run"),
        ({"train__summaries": False}, r"tiny/full/1 and tiny/no-summary/1 would be the same run"),
        ({"train__critic_lambda": "policy"}, r"tiny/full/1 and tiny/coupled-lambda/1 would be the same run"),
    ],
)
def test_a_grid_that_could_not_be_compared_is_refused_before_it_runs(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(grid([tiny(**overrides)], 1, extra=True))


def test_with_two_windows_one_window_of_2c_is_the_whole_length() -> None:
    check(grid([windows(2)], 1, extra=False))
    with pytest.raises(ConfigError, match=r"tiny/rl-2c/1 and tiny/rl-total/1 would be the same run"):
        check(grid([windows(2)], 1, extra=True))


def test_two_settings_of_one_name_are_refused(tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(TINY.read_text())
    for overrides in ({}, {"train.alpha": 2.0}):
        with pytest.raises(ConfigError, match=r"two files are called tiny\.toml"):
            check(grid([tiny(), load_setting(str(tmp_path / "tiny.toml"), overrides)], 1, extra=False))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"evaluation.final_tasks": 65}, "final_tasks is 65, but there are 64 held-out tasks"),
        ({"evaluation.modes": ["x1", "x4", "long"]}, "such as 4C, in place of long"),
    ],
)
def test_what_would_only_fail_after_all_the_work_is_refused_before_it(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_setting(str(TINY), overrides)
