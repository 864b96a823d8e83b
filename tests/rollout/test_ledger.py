"""What a ledger says of itself."""

from __future__ import annotations

from compactionrl.rollout.ledger import Rollout, Segment, Window
from compactionrl.rollout.stream import Collected


def long_rollout(turns: int = 100) -> Rollout:
    window = Window()
    for _ in range(turns):
        window.append_context([7] * 100, "user")
        window.append_sampled([8] * 100, [-0.5] * 100, [0] * 100, Segment("execution", 0))
    return Rollout("r-1", "task", [window, Window()], reward=0.5, end="submitted", details={"log": "x" * 10**5})


def test_a_rollout_is_one_line_however_long_it_is() -> None:
    rollout = long_rollout()
    assert repr(rollout) == "<Rollout r-1: submitted, reward 0.5, 2 windows of 20000 tokens>"
    assert repr(rollout.windows) == "[<Window of 20000 tokens, 200 turns>, <Window of 0 tokens, 0 turns>]"


def test_what_is_collected_is_one_line_however_much_it_is() -> None:
    collected = Collected([long_rollout(1)] * 96, [long_rollout(1)] * 4, units=100)
    assert repr(collected) == "<Collected: 96 rollouts, 4 dropped, of 100 units>"
