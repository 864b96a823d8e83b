"""Tasks and seeds follow from the run's seed alone."""

import subprocess
import sys
from dataclasses import replace
from itertools import islice, pairwise

from hypothesis import given
from hypothesis import strategies as st

from compactionrl.config import ContextConfig, LimitsConfig
from compactionrl.rollout.loop import RolloutSettings
from compactionrl.training.order import derive, task_order, units

SETTINGS = [RolloutSettings(ContextConfig(max_compactions=n), LimitsConfig()) for n in range(4)]


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


@given(st.integers(1, 30), st.integers(1, 4), st.integers(0, 100), st.integers(1, 4))
def test_a_group_shares_the_settings_that_it_draws(size: int, group_size: int, seed: int, choices: int) -> None:
    """The draw depends on the seed and the unit alone: any start gives what would have followed, with the same tasks."""
    settings = SETTINGS[:choices]
    drawn = list(islice(units(seed, size, group_size, 0, settings), 60))
    assert all(len({job.settings for job in unit}) == 1 for unit in drawn)
    for start in (1, 7, 31):
        assert list(islice(units(seed, size, group_size, start, settings), 20)) == drawn[start : start + 20]
    plain = list(islice(units(seed, size, group_size), 60))
    assert [[replace(job, settings=None) for job in unit] for unit in drawn] == plain


def test_settings_are_drawn_evenly_and_apart_from_the_tasks() -> None:
    drawn = [unit[0].settings for unit in islice(units(3, 10, 1, 0, SETTINGS[:2]), 4000)]
    assert abs(drawn.count(SETTINGS[0]) - 2000) < 5 * 1000**0.5  # 5 standard deviations
    # The same task meets both, in other epochs; and neighbours are independent.
    assert {drawn[epoch * 10] for epoch in range(40)} == set(SETTINGS[:2])
    changes = sum(a != b for a, b in pairwise(drawn))
    assert abs(changes - 2000) < 5 * 1000**0.5
    others = [unit[0].settings for unit in islice(units(4, 10, 1, 0, SETTINGS[:2]), 4000)]
    assert abs(sum(a == b for a, b in zip(drawn, others, strict=True)) - 2000) < 5 * 1000**0.5


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
