import pytest

from compactionrl.config import Config, ConfigError, parse_config
from compactionrl.evaluation.modes import for_mode


def config(**context: object) -> Config:
    base = {"budget": 1000, "threshold": 300, "response_tokens": 100, "min_response": 10, "summary_tokens": 100}
    return parse_config({"context": {**base, **context}})


def test_modes_change_the_budget_and_the_compactions_alone() -> None:
    trained = config(max_compactions=5, tail_steps=1).context
    changes = {mode: for_mode(config(max_compactions=5, tail_steps=1), mode) for mode in ("x1", "x4", "long")}
    assert changes["x1"] == trained.model_copy(update={"max_compactions": 0})
    assert changes["x4"] == trained.model_copy(update={"max_compactions": 3})
    assert changes["long"] == trained.model_copy(update={"max_compactions": 0, "budget": 4000})


def test_x4_compacts_also_where_training_did_not() -> None:
    """Otherwise the baseline trained without compaction would be measured in x1 twice."""
    assert for_mode(config(max_compactions=0), "x4").max_compactions == 3


def test_an_impossible_mode_names_itself_and_the_remedy() -> None:
    uncompactable = config(max_compactions=0, threshold=50)
    assert for_mode(uncompactable, "x1").max_compactions == 0
    with pytest.raises(ConfigError, match=r"x4 is impossible.*context\.threshold"):
        for_mode(uncompactable, "x4")


def test_unknown_mode() -> None:
    with pytest.raises(ConfigError, match=r"'x2'.*x1, x4, long"):
        for_mode(config(), "x2")
