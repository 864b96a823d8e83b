import pytest

from compactionrl.config import Config, ConfigError, parse_config
from compactionrl.evaluation.modes import for_mode, longest_window, training_contexts


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


@pytest.mark.parametrize(
    ("mode", "compactions", "budget"),
    [
        ("x1", 0, 1000),
        ("x2", 1, 1000),
        ("x8", 7, 1000),
        ("1C", 0, 1000),
        ("2C", 0, 2000),
        ("12C", 0, 12000),
        ("4C", 0, 4000),
    ],
)
def test_a_mode_is_so_many_windows_or_one_window_so_long(mode: str, compactions: int, budget: int) -> None:
    context = for_mode(config(), mode)
    assert (context.max_compactions, context.budget) == (compactions, budget)
    assert for_mode(config(), "long") == for_mode(config(), "4C")


@pytest.mark.parametrize("mode", ["", "x0", "x", "0C", "C", "2c", "x4 ", "x100", "longer"])
def test_unknown_mode(mode: str) -> None:
    with pytest.raises(ConfigError, match=r"unknown mode.*x1, x4"):
        for_mode(config(), mode)
    for key in ("evaluation", "train"):
        with pytest.raises(ConfigError, match=rf"{key}\.modes.*unknown mode.*x1, x4"):
            parse_config({key: {"modes": ["x1", mode]}})


def test_training_contexts_are_the_configured_one_or_those_of_the_modes() -> None:
    plain = config()
    assert training_contexts(plain) == [plain.context]
    drawn = parse_config({**plain.model_dump(), "train": {"modes": ["x1", "2C"]}})
    assert [(c.max_compactions, c.budget) for c in training_contexts(drawn)] == [(0, 1000), (0, 2000)]


def test_a_training_mode_that_this_context_cannot_do_is_refused() -> None:
    uncompactable = config(max_compactions=0, threshold=50)
    drawn = parse_config({**uncompactable.model_dump(), "train": {"modes": ["x1", "x3"]}})
    with pytest.raises(ConfigError, match=r"mode x3 is impossible.*context\.threshold"):
        training_contexts(drawn)


@pytest.mark.parametrize(("mode", "compactions", "budget"), [("x1", 0, 1000), ("x4", 3, 1000), ("2C", 0, 2000)])
def test_a_mode_is_the_same_in_training_and_in_evaluation(mode: str, compactions: int, budget: int) -> None:
    drawn = parse_config({**config(max_compactions=5).model_dump(), "train": {"modes": [mode]}})
    assert training_contexts(drawn) == [for_mode(drawn, mode)]
    assert (for_mode(drawn, mode).max_compactions, for_mode(drawn, mode).budget) == (compactions, budget)


def test_the_longest_window_covers_training_and_evaluation() -> None:
    def longest(train: list[str], evaluation: list[str]) -> int:
        data = config().model_dump()
        data["train"]["modes"], data["evaluation"]["modes"] = train, evaluation
        return longest_window(parse_config(data))

    assert longest([], ["x1", "x4"]) == 1000
    assert longest(["x1", "3C"], ["2C"]) == 3000
    assert longest(["x1"], ["long", "2C"]) == 4000
