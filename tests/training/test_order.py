"""Tasks and seeds follow from the run's seed alone."""

import subprocess
import sys
from itertools import islice, pairwise

from hypothesis import given
from hypothesis import strategies as st

from compactionrl.training.order import derive, task_order, units


@given(st.integers(1, 30), st.integers(1, 4), st.integers(0, 100))
def test_each_task_once_per_epoch_from_any_start(size: int, group_size: int, seed: int) -> None:
    """Resuming at any unit gives what would have followed."""
    all_units = list(islice(units(seed, size, group_size), 3 * size))
    for start in (0, 1, size - 1, size, 2 * size - 1):
        assert list(islice(units(seed, size, group_size, start), size)) == all_units[start : start + size]
    for epoch in range(3):
        indices = [unit[0].index for unit in all_units[epoch * size : (epoch + 1) * size]]
        assert sorted(indices) == list(range(size))
    assert all(len(unit) == group_size and len({job.index for job in unit}) == 1 for unit in all_units)


def test_every_rollout_has_its_own_id_and_seed() -> None:
    jobs = [job for unit in islice(units(0, 50, 4), 200) for job in unit]
    assert len({job.rollout_id for job in jobs}) == len(jobs)
    seeds = sorted(job.seed for job in jobs)
    # retries count up from a rollout's seed: streams must be far apart, not merely different
    assert min(b - a for a, b in pairwise(seeds)) > 1000
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_epochs_and_runs_are_shuffled_apart() -> None:
    orders = {task_order(seed, epoch, 50) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9
    assert tuple(range(50)) not in orders


def test_another_process_derives_the_same() -> None:
    """No hash randomisation, no global state."""
    script = "from compactionrl.training.order import derive, task_order; print(derive('a', 1), task_order(7, 2, 9))"
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert out.strip() == f"{derive('a', 1)} {task_order(7, 2, 9)}"


def test_parts_do_not_run_into_each_other() -> None:
    assert len({derive("a", 1, 2), derive("a", 12), derive("a1", 2), derive("a", "1", 2)}) == 4
