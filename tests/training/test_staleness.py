"""How old tokens are: by hand, and only those that are trained."""

import pytest

from compactionrl.rollout.ledger import Rollout, Segment, Window
from compactionrl.training.optimiser import TrainingError
from compactionrl.training.staleness import check_staleness, staleness, trained_versions


def rollout(*parts: tuple[list[int], str | None]) -> Rollout:
    """A window for each part: context, then tokens of these versions in a segment that is excluded for this reason."""
    made = Rollout("r", "t", end="submitted")
    for index, (versions, excluded) in enumerate(parts):
        window = Window()
        window.append_context([1, 2, 3], "user")
        segment = Segment("execution", index, excluded)
        for version in versions:
            window.append_sampled([5], [-1.0], [version], segment)
            window.append_context([4], "tool")
        made.windows.append(window)
    return made


def test_ages_by_hand() -> None:
    """The update from version 5; context counts for nothing, nor do tokens that are not trained, however old."""
    rollouts = [rollout(([3, 4], None), ([5], None)), rollout(([0, 0], "time"), ([5], None)), rollout(([1], "time"))]
    assert [trained_versions(r).tolist() for r in rollouts] == [[3, 4, 5], [5], []]
    found = staleness(rollouts, 5)
    assert found == pytest.approx(
        {"staleness/mean": (2 + 1 + 0 + 0) / 4, "staleness/max": 2, "staleness/spanning": 1 / 3}
    )


@pytest.mark.parametrize("rollouts", [[], [rollout()], [rollout(([1], "time"))]])
def test_where_nothing_is_trained_nothing_is_old(rollouts: list[Rollout]) -> None:
    assert staleness(rollouts, 7) == {}
    check_staleness({}, 0)


def test_too_old_is_an_error_that_says_what_is_wrong() -> None:
    found = staleness([rollout(([3, 5], None))], 5)
    check_staleness(found, 2)
    with pytest.raises(TrainingError, match=r"sampled 2 policy versions ago.*allows 1.*weights_changed"):
        check_staleness(found, 1)
