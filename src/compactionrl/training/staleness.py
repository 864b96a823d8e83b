"""How old the tokens are that an update trains, in policy versions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from compactionrl.rollout.ledger import Rollout, Segment, Window
from compactionrl.training.optimiser import TrainingError


def trained_versions(rollout: Rollout) -> np.ndarray:
    """The version that sampled each trained token of a rollout."""
    parts = [np.empty(0, dtype=np.int64)]
    for window in rollout.windows:
        trained = [segment.index for segment in window.segments if segment.trainable]
        parts.append(np.asarray(window.versions, dtype=np.int64)[np.isin(window.segment_ids, trained)])
    return np.concatenate(parts)


def staleness(rollouts: Sequence[Rollout], version: int) -> dict[str, float]:
    """`staleness/mean` and `/max` over the tokens that the update of `version` trains: by how many versions their samplers
    were behind it. `staleness/spanning`: the share of rollouts whose trained tokens more than one version sampled.
    """
    versions = [trained_versions(rollout) for rollout in rollouts]
    ages = version - np.concatenate(versions) if versions else np.empty(0)
    if not len(ages):
        return {}
    spanning = [len(v) > 0 and v.min() != v.max() for v in versions]
    return {
        "staleness/mean": float(ages.mean()),
        "staleness/max": float(ages.max()),
        "staleness/spanning": float(np.mean(spanning)),
    }


def check_staleness(found: dict[str, float], bound: int) -> None:
    """Raise TrainingError if a token is older than allowed: the sampler does not have the weights that it was given."""
    if found.get("staleness/max", 0) > bound:
        raise TrainingError(
            f"a token was sampled {found['staleness/max']:.0f} policy versions ago, but train.staleness allows {bound}: "
            "the sampler did not take over new weights when it was told of them (weights_changed)"
        )


def recorded_staleness(run: Path) -> Iterator[tuple[str, dict[str, float]]]:
    """`staleness` of every batch in a run's folder, by its name, from the rollout files alone."""
    for path in sorted((run / "rollouts").glob("*.parquet")):
        phase, number = path.stem.split("-")
        yield path.stem, staleness(read_versions(path), int(number) - 1 if phase == "step" else 0)


def read_versions(path: Path) -> list[Rollout]:
    """The rollouts of a file that were not dropped, with no more of their windows than `trained_versions` needs."""
    rollouts: dict[str, Rollout] = {}
    columns = ["rollout_id", "rollout_end", "segment_ids", "versions", "segments"]
    for row in pq.read_table(path, columns=columns).to_pylist():
        if row["rollout_end"] != "error":
            segments = [Segment(**segment) for segment in row["segments"]]
            window = Window(segment_ids=row["segment_ids"], versions=row["versions"], segments=segments)
            rollouts.setdefault(row["rollout_id"], Rollout(row["rollout_id"], "")).windows.append(window)
    return list(rollouts.values())
