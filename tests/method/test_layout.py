import pytest
import torch
from hypothesis import given, settings

from compactionrl.method import SPANS, Layout

from . import brute


def test_by_hand() -> None:
    layout = brute.make_layout(
        [
            [[(False, [False, True, True]), (True, [True])], [(False, [True, False, True, True])]],
            [],
            [[(False, [False])]],
            [[(False, [True])]],
        ]
    )
    assert layout.count == 7
    assert layout.n_segments == 5
    assert layout.positions.tolist() == [1, 2, 3, 4, 6, 7, 9]
    assert layout.of_token.tolist() == [0, 0, 1, 2, 2, 2, 4]
    assert layout.lengths.tolist() == [2, 1, 3, 0, 1]
    assert layout.rollout_lengths.tolist() == [6, 0, 0, 1]
    assert layout.later.tolist() == [4, 3, 0, 0, 0]
    assert layout.index.tolist() == [0, 1, 2, 0, 0]
    assert layout.span_lengths("rollout").tolist() == [6, 6, 6, 0, 1]
    assert layout.span_lengths("window").tolist() == [3, 3, 3, 0, 1]
    assert layout.span_lengths("segment").tolist() == [2, 1, 3, 0, 1]


@given(brute.layouts())
@settings(max_examples=40, deadline=None)
def test_counts_agree(layout: Layout) -> None:
    tokens = brute.positions(layout)
    assert layout.lengths.tolist() == [len(own) for own in tokens]
    assert layout.count == int(layout.mask.sum()) == int(layout.rollout_lengths.sum())
    for s in range(layout.n_segments):
        mates = [other for other in range(layout.n_segments) if layout.rollout[other] == layout.rollout[s]]
        assert int(layout.later[s]) == sum(len(tokens[other]) for other in mates if other > s)
        assert mates[int(layout.index[s])] == s
    for span in SPANS:
        assert bool((layout.span_lengths(span) >= layout.lengths).all())


def build(segment: list[int], rollout: list[int], window: list[int], n_rollouts: int = 2) -> Layout:
    return Layout(
        torch.tensor(segment), torch.tensor(rollout), torch.tensor(window), torch.zeros(len(window)).bool(), n_rollouts
    )


@pytest.mark.parametrize(
    ("message", "segment", "rollout", "window"),
    [
        ("segment .* must lie in 0..1", [0, 2], [0, 1], [0, 1]),
        ("segment numbers start at 0", [0, -2], [0, 1], [0, 1]),
        ("segment .* must not decrease", [1, 0], [0, 1], [0, 1]),
        ("rollout: numbers must not decrease", [0, 1], [1, 0], [0, 1]),
        ("rollout: numbers must lie in 0..1", [0, 1], [0, 2], [0, 1]),
        ("window: numbers must not decrease", [0, 1], [0, 0], [1, 0]),
        ("two rollouts", [0, 1], [0, 1], [0, 0]),
        ("one entry per segment", [0, 1], [0, 1], [0]),
    ],
)
def test_bad_layouts_are_refused(message: str, segment: list[int], rollout: list[int], window: list[int]) -> None:
    with pytest.raises(ValueError, match=message):
        build(segment, rollout, window)
