"""Options of `eval` are other spellings of keys."""

from pathlib import Path
from typing import Any

import pytest
from conftest import DEMO
from hypothesis import given
from hypothesis import strategies as st

from compactionrl.config import ConfigError, load_config, parse_config
from compactionrl.environments.logbook import TOOLS
from compactionrl.eval_options import FAMILY, eval_keys, size, sizes
from compactionrl.evaluation.modes import for_mode
from compactionrl.rollout.budget import ContextBudget
from compactionrl.rollout.text_chat import TextFormat


def test_every_option_is_a_key() -> None:
    keys = eval_keys(
        None,
        {},
        tasks="logbook",
        limit=9,
        model="glm-5",
        url="http://a:1/v1,http://b:2/",
        api="vllm",
        tokenizer=Path("tok"),
        modes="x1,x4",
        runs=2,
        summariser="own,http://c:3",
        summariser_model="other",
        concurrency=5,
    )
    assert keys == {
        "environment.tasks": "compactionrl.environments.logbook:LogbookTasks",
        "environment.options": {},
        "evaluation.final_tasks": 9,
        "server.model": "glm-5",
        "server.urls": ["http://a:1", "http://b:2"],
        "sampling.sampler": "vllm",
        "model.path": "tok",
        "model.renderer": "auto",
        "evaluation.modes": ["x1", "x4"],
        "evaluation.runs": 2,
        "evaluation.summarisers": ["own", "http://c:3"],
        "evaluation.summariser_model": "other",
        "sampling.concurrency": 5,
    }
    load_config(None, keys)


def test_what_an_option_implies_counts_less_than_what_is_said() -> None:
    implied = {"tokenizer": Path("tok"), "budget": "8k"}
    assert load_config(None, eval_keys(None, {}, **implied)).model.renderer == "auto"
    said = load_config(None, eval_keys(None, {"model.renderer": "chatml", "context.summary_tokens": 99}, **implied))
    assert (said.model.renderer, said.context.summary_tokens, said.context.budget) == ("chatml", 99, 8192)


def test_no_option_changes_nothing() -> None:
    assert eval_keys(DEMO, {}) == {}
    assert eval_keys(DEMO, {"context.budget": 256}) == {"context.budget": 256}


def test_a_url_is_asked_what_it_speaks() -> None:
    assert eval_keys(None, {}, url="http://a:1")["sampling.sampler"] == "auto"


@pytest.mark.parametrize("name", FAMILY)
def test_embedded_families(name: str) -> None:
    from compactionrl import build

    assert build.build_tasks(load_config(None, eval_keys(None, {}, tasks=name))).size("heldout")


def test_options_of_another_family_are_not_passed_on() -> None:
    assert eval_keys(DEMO, {}, tasks="logbook")["environment.options"] == {}
    for said in ({"environment.options.calls": "text"}, {"environment.options": {"calls": "text"}}):
        asked = load_config(DEMO, eval_keys(DEMO, said, tasks="logbook"))
        assert asked.environment.options == {"calls": "text"}
    same = eval_keys(DEMO, {}, tasks="notes")
    assert "environment.options" not in same
    assert same["environment.tasks"] == load_config(DEMO).environment.tasks


@pytest.mark.parametrize(("text", "tokens"), [("64k", 65536), ("8K", 8192), ("1m", 1048576), ("640", 640)])
def test_sizes_are_read(text: str, tokens: int) -> None:
    assert size(text) == tokens


@pytest.mark.parametrize("text", ["", "0", "64kb", "6.4k", "-1", "k", "１"])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="64k"):
        size(text)


def test_sizes_follow_a_smaller_budget() -> None:
    """An eighth of the defaults, but for the threshold, which leaves room for a framed request."""
    keys = eval_keys(None, {}, budget="8k")
    assert keys == {
        "context.budget": 8192,
        "context.response_tokens": 1280,
        "context.summary_tokens": 1024,
        "context.min_response": 32,
        "context.threshold": 1024 + 32 + 512,
    }


@pytest.mark.parametrize("budget", ["2k", "8k", "32k", "64k"])
@pytest.mark.parametrize("asked", [{"api": "chat"}, {"api": "chat", "tokenizer": Path("tok")}, {}])
def test_an_endpoint_of_text_gets_room_for_requests_of_text(budget: str, asked: dict[str, Any]) -> None:
    """Which count more than tokens, and answer every call that they leave open."""
    config = load_config(None, eval_keys(None, {}, url="http://a", budget=budget, **asked))
    for mode in ("x1", "x4", "long"):
        ContextBudget.measure(for_mode(config, mode), TextFormat(), TOOLS)


def test_sizes_of_the_paper_stay_from_64k_on() -> None:
    for budget in ("64k", "80k", "128k"):
        assert eval_keys(None, {}, budget=budget).keys() == {"context.budget"}


def test_given_sizes_stay(tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    file.write_text("[context]\nthreshold = 2000\n")
    keys = eval_keys(file, {"context.summary_tokens": 700}, budget="8k")
    assert "context.threshold" not in keys
    assert keys["context.summary_tokens"] == 700
    assert load_config(file, keys).context.threshold == 2000
    assert eval_keys(DEMO, {}, budget="256") == {"context.budget": 256}  # this file gives them all


@given(st.integers(1024, 1 << 20))
def test_every_budget_from_1k_on_works_in_every_mode(budget: int) -> None:
    data: dict[str, Any] = {"context": {**sizes(budget), "budget": budget}}
    config = parse_config(data)
    for mode in ("x1", "x4", "long"):
        for_mode(config, mode)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"model": "glm-5"}, "--url"),
        ({"api": "vllm"}, "--url"),
        ({"checkpoint": Path("c"), "url": "http://a"}, "choose one"),
        ({"checkpoint": Path("c"), "tokenizer": Path("t")}, "choose one"),
        ({"url": "http://a", "api": "openai"}, "choose auto, vllm, sglang, chat"),
        ({"tasks": "chess"}, "notes, logbook, deliveries"),
    ],
)
def test_what_does_not_go_together(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        eval_keys(None, {}, **options)


def test_servers_of_a_file_count_as_a_url(tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    file.write_text('[server]\nurls = ["http://a"]\n')
    assert eval_keys(file, {}, model="m") == {"server.model": "m"}


def test_a_checkpoint_is_its_policy_wherever_a_link_points(tmp_path: Path) -> None:
    (tmp_path / "step-3" / "policy").mkdir(parents=True)
    (tmp_path / "best").symlink_to("step-3")
    assert eval_keys(None, {}, checkpoint=tmp_path / "best") == {"model.path": str(tmp_path / "step-3" / "policy")}
