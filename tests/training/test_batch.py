"""From ledgers to a batch: positions, accounting (invariant 1), exclusions, packing."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from training_fakes import random_rollout, random_rollouts

from compactionrl.config import TrainConfig
from compactionrl.rollout.ledger import Rollout, Segment, Window
from compactionrl.training.batch import build_batch, pack


def example() -> Rollout:
    """The worked example of the module's docstring; token ids count from 10."""
    first, second = Window(), Window()
    act, summarise, go_on = Segment("execution", 0), Segment("summary", 1), Segment("execution", 2)
    first.append_context([10, 11], "user")
    first.append_sampled([12, 13], [-0.2, -0.3], [0, 0], act)
    first.append_context([14], "tool")
    first.append_sampled([15], [-0.5], [0], act)
    first.append_context([16], "user")
    first.append_sampled([17, 18], [-0.7, -0.8], [0, 0], summarise)
    second.append_context([20, 21, 22], "user")
    second.append_sampled([23, 24], [-1.3, -1.4], [0, 0], go_on)
    return Rollout("r", "t", [first, second], reward=1.0, end="submitted")


def test_the_worked_example() -> None:
    batch = build_batch([example()], TrainConfig())
    assert batch.token_ids.tolist() == [10, 11, 12, 13, 14, 15, 16, 17, 18, 20, 21, 22, 23, 24]
    assert batch.lengths == [9, 5]
    assert batch.layout.segment.tolist() == [-1, -1, 0, 0, -1, 0, -1, 1, 1, -1, -1, -1, 2, 2]
    assert batch.layout.positions.tolist() == [2, 3, 5, 7, 8, 12, 13]
    assert batch.layout.window.tolist() == [0, 0, 1]
    assert batch.layout.is_summary.tolist() == [False, True, False]
    assert batch.behaviour.tolist() == [-0.2, -0.3, -0.5, -0.7, -0.8, -1.3, -1.4]
    assert batch.rewards.tolist() == [1.0]


def test_a_micro_batch_points_at_the_state_before_each_optimised_token() -> None:
    (part,) = build_batch([example()], TrainConfig()).micro_batches(100)
    assert part.targets.tolist() == [12, 13, 15, 17, 18, 23, 24]
    assert part.states.tolist() == [1, 2, 4, 6, 7, 11, 12]
    assert part.index.tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert part.lengths == [9, 5]


def test_windows_are_not_mixed_up_when_the_longest_comes_first() -> None:
    rollout = example()
    rollout.windows[0], rollout.windows[1] = rollout.windows[1], rollout.windows[0]
    for index, segment in enumerate(rollout.segments):
        window = next(w for w in rollout.windows if segment in w.segments)
        window.segment_ids = [100 + index if s == segment.index else s for s in window.segment_ids]
        segment.index = 100 + index
    for window in rollout.windows:
        window.segment_ids = [s - 100 if s >= 100 else s for s in window.segment_ids]
    for segment in rollout.segments:
        segment.index -= 100
    first, second = build_batch([rollout], TrainConfig()).micro_batches(9)
    assert first.targets.tolist() == [12, 13, 15, 17, 18]
    assert first.index.tolist() == [2, 3, 4, 5, 6]
    assert second.targets.tolist() == [23, 24]
    assert second.states.tolist() == [2, 3]
    assert second.index.tolist() == [0, 1]


def test_untrained_summaries_leave_the_batch_with_a_reason() -> None:
    rollout = example()
    batch = build_batch([rollout], TrainConfig(summaries=False))
    assert batch.layout.segment.tolist() == [-1, -1, 0, 0, -1, 0, -1, -1, -1, -1, -1, -1, 2, 2]
    assert batch.accounting == {"sampled": 7, "trained": 5, "excluded: summaries not trained": 2}
    assert rollout.segments[1].excluded == "summaries not trained"


@pytest.mark.parametrize(("train_timed_out", "trained"), [(False, 0), (True, 7)])
def test_timed_out_rollouts(train_timed_out: bool, trained: int) -> None:
    rollout = example()
    rollout.end = "time"
    batch = build_batch([rollout], TrainConfig(train_timed_out=train_timed_out))
    assert batch.accounting.get("trained") == trained
    assert batch.accounting.get("excluded: time", 0) == 7 - trained
    assert batch.layout.n_rollouts == 1
    assert batch.rewards.tolist() == [1.0]
    assert len(batch.lengths) == (2 if train_timed_out else 0)


def test_a_window_without_optimised_tokens_is_not_in_the_forward_pass() -> None:
    rollout = example()
    rollout.segments[2].excluded = "for the test"
    batch = build_batch([rollout], TrainConfig())
    assert batch.lengths == [9]
    assert batch.layout.n_segments == 3
    assert sum(len(part.token_ids) for part in batch.micro_batches(1)) == 9


@given(st.integers(0, 10_000), st.booleans(), st.booleans(), st.integers(1, 60))
def test_accounting_and_coverage(seed: int, summaries: bool, train_timed_out: bool, budget: int) -> None:
    """Invariant 1: every sampled token is trained once, or excluded or rejected with a reason."""
    rollouts = [*random_rollouts(4, seed), random_rollout(4, seed, end="time")]
    batch = build_batch(rollouts, TrainConfig(summaries=summaries, train_timed_out=train_timed_out))
    counts = dict(batch.accounting)
    sampled = sum(s >= 0 for r in rollouts for w in r.windows for s in w.segment_ids)
    rejected = sum(len(a.token_ids) for r in rollouts for w in r.windows for a in w.rejected)
    assert counts["sampled"] == sampled + rejected
    assert counts.pop("sampled") == sum(counts.values())

    trained = [
        (w.token_ids[t], w.logprobs[t])
        for r in rollouts
        for w in r.windows
        for t, s in enumerate(w.segment_ids)
        if s >= 0 and r.segments[s].trainable
    ]
    assert list(zip(batch.token_ids[batch.layout.positions].tolist(), batch.behaviour.tolist(), strict=True)) == trained
    parts = list(batch.micro_batches(budget))
    order = torch.cat([part.index for part in parts]) if parts else torch.empty(0)
    assert sorted(order.tolist()) == list(range(len(trained)))
    assert [i for part in parts for i in part.targets.tolist()] == [trained[int(k)][0] for k in order]


def test_groups_are_consecutive_rollouts() -> None:
    batch = build_batch(random_rollouts(6), TrainConfig(rollouts_per_step=6, group_size=2, estimator="group"))
    assert batch.groups.tolist() == [0, 0, 1, 1, 2, 2]


def test_broken_rollouts_are_refused() -> None:
    broken = example()
    broken.end, broken.error = "error", "sandbox died"
    with pytest.raises(ValueError, match=r"broke down \(sandbox died\)"):
        build_batch([broken], TrainConfig())
    unrewarded = example()
    unrewarded.reward = float("nan")
    with pytest.raises(ValueError, match="finite"):
        build_batch([unrewarded], TrainConfig())
    headless = Rollout("r", "t", [Window()], end="submitted")
    headless.windows[0].append_sampled([1], [-1.0], [0], Segment("execution", 0))
    with pytest.raises(ValueError, match="first token"):
        build_batch([headless], TrainConfig())
    misnumbered = example()
    misnumbered.windows.reverse()
    with pytest.raises(ValueError, match="numbered"):
        build_batch([misnumbered], TrainConfig())


@given(st.lists(st.integers(1, 30), max_size=25), st.integers(1, 40))
def test_pack(lengths: list[int], budget: int) -> None:
    bins = pack(lengths, budget)
    assert sorted(i for bin in bins for i in bin) == list(range(len(lengths)))
    assert all(len(bin) == 1 or sum(lengths[i] for i in bin) <= budget for bin in bins)
    totals = [sum(lengths[i] for i in bin) for bin in bins]
    assert all(a + b > budget for i, a in enumerate(totals) for b in totals[i + 1 :]), "two bins would fit into one"
