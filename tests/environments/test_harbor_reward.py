"""Rewards come from what a verifier wrote; what is missing or malformed is an error, never a 0."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compactionrl.environments.reward import VerifierError, read_rewards, reward_of

FINITE = st.integers(-(10**300), 10**300) | st.floats(allow_nan=False, allow_infinity=False)


def test_json_counts_more_than_text():
    assert read_rewards('{"reward": 0.25, "tests": 3}', "1") == {"reward": 0.25, "tests": 3.0}
    assert read_rewards(None, " 0.5\n") == {"reward": 0.5}


@given(st.dictionaries(st.text(max_size=5), FINITE, max_size=4))
def test_every_object_of_finite_numbers_is_read(rewards):
    assert read_rewards(json.dumps(rewards), None) == {name: float(value) for name, value in rewards.items()}


@pytest.mark.parametrize("number", ["", " \n", "nan", "inf", "-Infinity", "1e999", "one", "1 2", "\ufffd", "0x1"])
def test_a_text_without_one_finite_number_is_an_error(number):
    with pytest.raises(VerifierError, match=r"reward\.txt"):
        read_rewards(None, number)


@pytest.mark.parametrize(
    "text",
    [
        "", " ", "{", "nan", "1.0", "[1]", "null", '"1"', '{"reward": "1"}', '{"reward": null}', '{"reward": true}',
        '{"reward": NaN}', '{"reward": Infinity}', '{"reward": 1e999}', '{"reward": {"a": 1}}', '{"a": 1, "b": []}',
        '{"reward": 1' + "0" * 400 + "}", '{"reward": 1' + "0" * 5000 + "}", "[" * 100_000,
    ],
)  # fmt: skip
def test_whatever_else_stands_in_the_json_is_an_error_even_beside_a_good_text(text):
    with pytest.raises(VerifierError, match=r"reward\.json"):
        read_rewards(text, "1")


def test_no_file_at_all_is_an_error():
    with pytest.raises(VerifierError, match="neither"):
        read_rewards(None, None)


def test_the_reward_is_the_one_that_was_asked_for():
    assert reward_of({"reward": 0.0, "tests": 3.0}, "tests") == 3.0
    assert reward_of({"reward": 0.0}, "reward") == 0.0
    with pytest.raises(VerifierError, match="'reward', but tests"):
        reward_of({"tests": 3.0}, "reward")
    with pytest.raises(VerifierError, match="none at all"):
        reward_of({}, "reward")
