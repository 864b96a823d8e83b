"""Rollout files: the ledgers come back as they were, with the credit of every token beside them."""

from pathlib import Path

import pyarrow.parquet as pq
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from training_fakes import random_rollout, random_rollouts, small_learner

from compactionrl.rollout.ledger import Rollout
from compactionrl.training.batch import build_batch
from compactionrl.training.records import credit_by_window, read_rollouts, write_rollouts


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 1000))
def test_round_trip_with_credit(tmp_path_factory, seed: int) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path_factory.mktemp("records") / "step.parquet"
    learner = small_learner(summaries=seed % 2 == 0)
    rollouts = [*random_rollouts(3, seed), random_rollout(3, seed, end="time")]
    rollouts[0].details = {"facts": 3, "words": ["ü", "<|im_end|>"]}
    batch = build_batch(rollouts, learner.config)
    credit = learner.credit(batch)
    early = Rollout("early", "t", error="no sandbox")
    late = random_rollout(9, seed, end="error")
    rollouts += [early, late]
    write_rollouts(path, rollouts, credit_by_window(rollouts, batch, credit))
    assert read_rollouts(path) == rollouts

    rows = [row for row in pq.read_table(path).to_pylist() if row["window"] is not None]
    for column, flat in (("advantages", credit.estimate.advantages), ("values", credit.values)):
        stored = []
        for row in rows:
            excluded = {s["index"] for s in row["segments"] if s["excluded"]}
            if row["rollout_id"] == late.id:
                excluded = set(row["segment_ids"])
            for segment, value in zip(row["segment_ids"], row[column], strict=True):
                if segment >= 0 and segment not in excluded:
                    stored.append(value)
                else:
                    assert value == 0
        torch.testing.assert_close(torch.tensor(stored), flat[batch.layout.positions])
    assert [p.name for p in path.parent.iterdir()] == ["step.parquet"]


def test_a_batch_in_which_nothing_is_trained(tmp_path: Path) -> None:
    learner = small_learner()
    rollouts = [random_rollout(0, end="time")]
    batch = build_batch(rollouts, learner.config)
    write_rollouts(tmp_path / "f.parquet", rollouts, credit_by_window(rollouts, batch, learner.credit(batch)))
    assert read_rollouts(tmp_path / "f.parquet") == rollouts
