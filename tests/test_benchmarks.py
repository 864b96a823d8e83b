"""What the benchmarks compare computes the same; what they measure is written down right. No test here times anything."""

import importlib.util
import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from conftest import DEMO
from hypothesis import given, settings
from hypothesis import strategies as st

from compactionrl.config import Config, load_config
from compactionrl.training.batch import Batch

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


update, estimator, logprob_memory, sampler, runner = map(
    load, ("update", "estimator", "logprob_memory", "sampler", "run")
)


@pytest.fixture(scope="module")
def config(base: Path) -> Config:
    """Micro-batches of a few windows, and clipping, entropy and values that matter."""
    options = {"train.micro_batch_tokens": 400, "train.rollouts_per_step": 4, "train.entropy_bonus": 0.01}
    return load_config(DEMO, {"model.path": str(base), **options})


def batch_of(config: Config, lengths: list[list[int]]) -> Batch:
    batch = update.synthetic_batch(config, lengths)
    noise = torch.randn(len(batch.behaviour), generator=torch.Generator().manual_seed(0)) * 0.2
    return replace(batch, behaviour=batch.behaviour + noise)  # some ratios are clipped


WINDOWS = st.lists(st.lists(st.integers(32, 150), min_size=1, max_size=4), min_size=2, max_size=4)


@settings(max_examples=10, deadline=None)
@given(WINDOWS)
def test_every_layout_gives_our_losses_and_gradients(config: Config, lengths: list[list[int]]) -> None:
    """Invariant 5, against layouts that are not ours."""
    batch = batch_of(config, lengths)
    ours = update.first_update(update.new_learner(config), batch)
    assert set(ours) == {"policy", "critic"}
    assert all(gradient.norm() > 0 for _, gradient in ours.values())
    rows = update.first_update(update.new_learner(config), update.row_per_segment(batch))
    padded = update.first_update(update.new_learner(config, update.PaddedLearner), batch)
    update.check_same(ours, rows)
    update.check_same(ours, padded)


def test_the_critic_is_compared_beyond_its_head(config: Config) -> None:
    learner = update.new_learner(config)
    update.first_update(learner, batch_of(config, [[64, 64], [40]]))
    assert learner.critic_optimiser is not None
    moments = {k: v for k, v in learner.critic_optimiser.tensors().items() if k.endswith("exp_avg")}
    assert all(moment.any() for moment in moments.values())


@pytest.mark.parametrize("wrong", ["a token that is lost", "another weight", "another context"])
def test_a_layout_that_is_not_the_same_is_refused(config: Config, wrong: str) -> None:
    batch = batch_of(config, [[64, 64], [96]])
    other = replace(batch, token_ids=batch.token_ids.clone())
    if wrong == "a token that is lost":
        segment = batch.layout.segment.clone()
        segment[batch.layout.positions[3]] = -1
        keep = torch.arange(len(batch.behaviour)) != 3
        other = replace(batch, layout=replace(batch.layout, segment=segment), behaviour=batch.behaviour[keep])
    elif wrong == "another context":
        other.token_ids[0] += 1
    ours = update.first_update(update.new_learner(config), batch)
    found = update.first_update(update.new_learner(config), other)
    if wrong == "another weight":
        loss, gradient = found["policy"]
        found["policy"] = (loss, gradient * 1.0001)
    with pytest.raises(AssertionError, match="differ"):
        update.check_same(ours, found)


def test_a_row_per_segment(config: Config) -> None:
    """Four windows, seven rows: the acting of a window up to its last response, the whole window for its summary."""
    batch = batch_of(config, [[64, 96, 64, 64]])
    rows = update.row_per_segment(batch)
    assert batch.lengths == [64, 96, 64, 64]
    # A window of 32 p tokens ends in an observation, a request and a summary of p tokens each.
    assert rows.lengths == [58, 64, 87, 96, 58, 64, 64]
    assert rows.layout.n_segments == batch.layout.n_segments == 7
    assert torch.equal(rows.layout.lengths, batch.layout.lengths)
    starts = rows.starts
    for number, (start, length) in enumerate(zip(starts, rows.lengths, strict=True)):
        segment = rows.layout.segment[start : start + length]
        assert set(segment.tolist()) == {-1, number}
        window = batch.layout.window[number]
        first = batch.starts[window]
        assert torch.equal(rows.token_ids[start : start + length], batch.token_ids[first : first + length])


@given(st.lists(st.integers(1, 90), min_size=1, max_size=30), st.integers(1, 300))
def test_padded_rows_fill_the_budget_in_order(lengths: list[int], budget: int) -> None:
    batches = list(update.rows_in_order(lengths, budget))
    assert [length for rows in batches for length in rows] == lengths
    assert all(len(rows) == 1 or max(rows) * len(rows) <= budget for rows in batches)
    for rows, following in pairwise(batches):
        assert max(*rows, following[0]) * (len(rows) + 1) > budget


def test_update_measures_all_ratios(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("WINDOW", 64), ("SHORTEST", 32), ("LONGEST", 96)):
        monkeypatch.setattr(update, name, value)
    short = load_config(DEMO, {"model.path": config.model.path, "train.rollouts_per_step": 3, "limits.turns": 8})
    results = update.measure(3, 512, short)
    assert set(results) == {key for key in runner.FIGURES if key.startswith("update")}
    for result in results.values():
        low, high = result["spread"]
        assert 0 < low <= result["median"] <= high
        assert result["tokens"] > 0


def test_a_ratio_is_theirs_over_ours(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    learner = update.new_learner(config)
    batch = batch_of(config, [[40]])
    times = iter([2.0, 3.0, 1.0, 4.0, 1.0, 2.0])
    monkeypatch.setattr(update, "seconds", lambda *_: next(times))
    monkeypatch.setattr(update, "check_same", lambda *_: None)
    result = update.compare((learner, batch), (learner, batch), repeats=3)
    assert (result["median"], result["spread"]) == (2.0, [1.5, 4.0])


def test_a_timed_update_is_all_that_a_batch_takes(config: Config) -> None:
    """Its values and advantages, the updates of policy and critic as configured."""
    learner = update.new_learner(config)
    assert update.seconds(learner, batch_of(config, [[40]])) >= 0
    for optimiser, updates in ((learner.policy_optimiser, 1), (learner.critic_optimiser, 2)):
        assert {int(step) for key, step in optimiser.tensors().items() if key.endswith(".step")} == {updates}


def test_the_estimator_equals_its_loop() -> None:
    batch = estimator._batch(3, 70)
    for found, expected in zip(estimator._ours(*batch), estimator._loop(*batch), strict=True):
        assert found.any()
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_log_probabilities_equal_the_naive_ones() -> None:
    hidden, head = torch.randn(300, 8).requires_grad_(), torch.randn(50, 8).requires_grad_()
    targets = torch.randint(50, (300,))
    logprobs, gradients = {}, {}
    for how in ("ours", "naive"):
        hidden.grad = head.grad = None
        logprobs[how] = logprob_memory.differentiate(how, hidden, head, targets)
        gradients[how] = [hidden.grad, head.grad]
    torch.testing.assert_close(logprobs["ours"], logprobs["naive"])
    logp = (hidden @ head.T).log_softmax(1)
    of_entropy = torch.autograd.grad(-0.01 * (logp.exp() * logp).sum(1).mean(), [hidden, head])
    expected = [naive + extra for naive, extra in zip(gradients["naive"], of_entropy, strict=True)]
    torch.testing.assert_close(gradients["ours"], expected, rtol=1e-4, atol=1e-6)


def test_sampler_and_bare_loop_are_the_same_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both go from the prompt to the same length, and report the log-probabilities of one forward over everything."""
    monkeypatch.setattr(sampler, "CONTEXT", 24)
    torch.manual_seed(0)
    model = sampler.Transformer(sampler.CONFIG)
    prompts = torch.randint(sampler.CONFIG.vocab_size, (3, sampler.PROMPT))
    ids, logprobs = (torch.cat(column, 1) for column in zip(*sampler.bare_loop(model, prompts), strict=True))
    ours = sampler.sampler_loop(model, prompts)
    for row, prompt in enumerate(prompts):
        for generated, recorded in (
            (ids[row], logprobs[row]),
            (torch.tensor(ours[row].token_ids), torch.tensor(ours[row].logprobs)),
        ):
            assert len(generated) == 24 - sampler.PROMPT
            tokens = torch.cat([prompt, generated])
            with torch.no_grad():
                logp = (model(tokens, [24]) @ model.head_weight.T).log_softmax(1)
            expected = logp[sampler.PROMPT - 1 : -1].gather(1, generated[:, None]).squeeze(1)
            torch.testing.assert_close(recorded, expected, rtol=1e-4, atol=1e-4)


def measured(key: str, median: float = 1.23456) -> dict[str, Any]:
    return {key: {"median": median, "spread": [1.0, 2.0], "tokens": 5}}


def test_the_page_and_the_figures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def run_script(name: str) -> dict[str, Any]:
        return {k: v for key in runner.FIGURES if key.startswith(name) for k, v in measured(key).items()}

    monkeypatch.setattr(runner, "run_script", run_script)
    monkeypatch.setattr("sys.argv", ["run.py", "--output", str(tmp_path)])
    runner.main()
    found = json.loads((tmp_path / "benchmarks.json").read_text())
    assert {
        "update_vs_row_per_segment", "update_vs_padded", "update_vs_padded_demo", "sampler_vs_bare_loop_1",
        "sampler_vs_bare_loop_16", "sampler_vs_bare_loop_64", "estimator_vs_loop", "logprob_memory_vs_naive",
        "logprob_memory_8k_vs_2k",
    } <= set(found)  # fmt: skip
    assert all(value == {"median": 1.2346, "spread": [1.0, 2.0]} for value in found.values())
    page = (tmp_path / "benchmarks.md").read_text()
    assert page.count("| **1.23** | 1.00 | 2.00 |") == len(found)
    for name in runner.SCRIPTS:
        assert f"### `benchmarks/{name}.py`" in page
    assert torch.__version__ in page
    assert str(Path.home()) not in page


def test_a_figure_that_was_not_measured_is_missed() -> None:
    with pytest.raises(KeyError, match="update_vs_padded"):
        runner.figures([measured("update_vs_row_per_segment")])


def test_a_script_runs_in_a_process_with_one_thread(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(runner, "HERE", tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    (tmp_path / "fine.py").write_text("import os, json; print(json.dumps(os.environ['OMP_NUM_THREADS']))")
    (tmp_path / "broken.py").write_text("raise SystemExit(1)")
    assert runner.run_script("fine") == "1"
    with pytest.raises(runner.subprocess.CalledProcessError):
        runner.run_script("broken")
