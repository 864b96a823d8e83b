"""Figures show what the ledger holds: hand-made cells, read back from the drawn lines."""

import io
import math
import random
import subprocess
import sys

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from PIL import Image
from study_ledgers import TITLES, cell, ledger_of, synthetic_ledger

from compactionrl.study.charts import COLOURS, Curve, Panel, Row, curves_chart, png, rows_chart
from compactionrl.study.figures import (
    FIGURES,
    behaviour_figure,
    credit_figure,
    difference_figure,
    dynamics_figure,
    figures,
    pass_figure,
    reward_figure,
    training,
)
from compactionrl.study.variants import VARIANTS

FULL = {"name": "full", "title": "CompactionRL", "extra": False}


def panel(figure: Figure | None, start: str) -> Axes:
    assert figure is not None
    return next(axis for axis in figure.axes if axis.get_title(loc="left").startswith(start))


def drawn(axis: Axes, variant: str) -> list[tuple[list[float], list[float]]]:
    """The lines of a variant, by its colour: horizontal and vertical places."""
    colour = COLOURS[variant].lower()
    lines = [line for line in axis.lines if to_hex(line.get_color()) == colour or rings(line) == colour]
    return [(list(line.get_xdata()), list(line.get_ydata())) for line in lines]


def rings(line: object) -> str | None:
    empty = line.get_markerfacecolor() == "none"  # type: ignore[attr-defined]
    return to_hex(line.get_markeredgecolor()) if empty else None  # type: ignore[attr-defined]


def labels(figure: Figure | None) -> list[str]:
    assert figure is not None
    return [" ".join(label.get_text().split()) for label in figure.axes[0].get_yticklabels()]


def outcomes(**by_mode: str) -> dict[str, str]:
    return {"x1": "0000", "x4": "0000", "2C": "0000", "4C": "0000", **by_mode}


def test_every_figure_is_a_png_of_readable_width() -> None:
    found = figures(synthetic_ledger(seeds=2, extra_seeds=1, tasks=8, settings=["hard"]), "hard")
    assert list(found) == list(FIGURES)
    for data in found.values():
        with Image.open(io.BytesIO(data)) as image:
            assert image.format == "PNG"
            assert image.width == 1260
            assert len(image.getcolors()) > 20


def test_pass_figure_shows_mean_interval_and_every_seed() -> None:
    cells = {
        "plain/full/1": cell("plain", "full", 1, outcomes(x4="1110")),
        "plain/full/2": cell("plain", "full", 2, outcomes(x4="10-0")),  # one of three
        "plain/base/1": cell("plain", "base", 1, outcomes(x4="1000")),
    }
    figure = pass_figure(ledger_of(cells), "plain")
    assert labels(figure) == [TITLES["base"], "CompactionRL"]  # in the ledger's order of variants, others left out
    interval, mean, seeds = drawn(panel(figure, "Pass@1, %: x4"), "full")
    assert seeds[0] == pytest.approx([75, 100 / 3])
    assert mean[0] == pytest.approx([(75 + 100 / 3) / 2])
    assert interval[0][0] < mean[0][0] < interval[0][1]
    assert interval[1] == [1, 1]  # the second row
    assert [axis.get_title(loc="left").split()[-1] for axis in figure.axes] == ["x1", "x4", "2C", "4C"]
    assert {axis.get_xlim() for axis in figure.axes} == {figure.axes[0].get_xlim()}  # one scale


def test_pass_figure_shows_what_a_perfect_player_reaches() -> None:
    cells = {"plain/full/1": cell("plain", "full", 1, outcomes(x4="1110"))}
    without = pass_figure(ledger_of(cells), "plain")
    cells["plain/perfect/1"] = cell("plain", "perfect", 1, {"x1": "10-0", "x4": "1111"})
    figure = pass_figure(ledger_of(cells), "plain")
    assert labels(figure) == labels(without) == ["CompactionRL"]  # no arm
    for mode, limit in (("x1", [100 / 3]), ("x4", [100]), ("2C", [])):
        dotted = [line for line in panel(figure, f"Pass@1, %: {mode}").lines if line.get_linestyle() == ":"]
        assert [line.get_xdata()[0] for line in dotted] == pytest.approx(limit)
    assert without is not None
    assert not [line for axis in without.axes for line in axis.lines if line.get_linestyle() == ":"]


def test_differences_are_paired_and_on_common_seeds() -> None:
    cells = {
        "plain/full/1": cell("plain", "full", 1, outcomes(x4="1100")),
        "plain/full/2": cell("plain", "full", 2, outcomes(x4="1110")),
        "plain/no-summary/1": cell("plain", "no-summary", 1, outcomes(x4="1000")),
        "plain/no-summary/3": cell("plain", "no-summary", 3, outcomes(x4="1111")),  # no partner
        "plain/base/3": cell("plain", "base", 3, outcomes(x4="1111")),  # no partner at all
    }
    figure = difference_figure(ledger_of(cells), "plain")
    assert labels(figure) == ["CompactionRL, summaries not trained"]
    interval, mean, seeds = drawn(panel(figure, "Pass@1 in x4"), "no-summary")
    assert mean[0] == seeds[0] == [-25]
    assert interval[0][0] <= -25 <= interval[0][1]
    assert any(list(line.get_xdata()) == [0, 0] for line in figure.axes[0].lines)


def test_behaviour_is_the_compacting_modes() -> None:
    one, two = (cell("plain", "full", seed, outcomes(x4="1100")) for seed in (1, 2))
    one["evaluation"]["x4"] |= {"compactions": 1.0, "tool_calls": 5.0, "compacted": {"n": 4, "pass_at_1": 0.25}}
    two["evaluation"]["x4"] |= {"compactions": 2.0, "tool_calls": 8.0, "compacted": {"n": 0, "pass_at_1": None}}
    figure = behaviour_figure(ledger_of({"plain/full/2": two, "plain/full/1": one}), "plain")  # shown by seed
    for start, mean, seeds in (
        ("compactions", 1.5, [1.0, 2.0]),
        ("tool calls", 6.5, [5.0, 8.0]),
        ("Pass@1 of compacted", 25, [25]),  # nothing compacted: nothing to show
    ):
        points, below = drawn(panel(figure, start), "full")
        assert points[0] == [mean]
        assert below[0] == seeds


def test_curves_show_the_mean_and_the_range_of_the_seeds() -> None:
    values = [{"summary_tokens": row, "entropy": [None] * 3} for row in ([None, 4.0, 6.0], [None, 2.0, None])]
    cells = {
        f"plain/full/{seed}": cell("plain", "full", seed, outcomes(), curves=curves)
        for seed, curves in enumerate(values, 1)
    }
    figure = dynamics_figure(ledger_of(cells), "plain")
    assert figure is not None
    assert [axis.get_title(loc="left") for axis in figure.axes] == ["tokens per summary"]  # no panel without values
    (line,) = drawn(figure.axes[0], "full")
    assert line == ([2, 3], [3.0, 6.0])  # policy updates count from 1; what no seed has is left out
    corners = {tuple(point) for point in figure.axes[0].collections[0].get_paths()[0].vertices}
    assert {(2.0, 2.0), (2.0, 4.0), (3.0, 6.0)} <= corners


def test_seeds_of_unequal_length_are_not_cut() -> None:
    cells = {
        f"plain/full/{seed}": cell("plain", "full", seed, outcomes(), curves={"reward": row})
        for seed, row in enumerate(([0.5], [0.1, 0.3]), 1)
    }
    (curve,) = training(ledger_of(cells), "plain", "reward")
    assert [*curve.places] == [1, 2]
    assert np.array_equal(curve.values, [[0.5, math.nan], [0.1, 0.3]], equal_nan=True)


def test_arms_beyond_the_paper_have_a_panel_of_their_own() -> None:
    curves = {"reward": [0.1, 0.2]}
    cells = {
        f"plain/{name}/1": cell("plain", name, 1, outcomes(), curves=curves) for name in ("full", "rl-c", "robust")
    }
    figure = reward_figure(ledger_of(cells), "plain")
    assert drawn(panel(figure, "reward in training: the paper's"), "robust") == []
    beyond = panel(figure, "reward in training: beyond")
    assert len(drawn(beyond, "full")) == len(drawn(beyond, "robust")) == 1
    assert drawn(beyond, "rl-c") == []
    del cells["plain/robust/1"]
    assert len(reward_figure(ledger_of(cells), "plain").axes) == 1


def test_segments_are_in_order_and_the_last_is_open() -> None:
    explained = {"segment_6+": 0.7, "segment_0": 0.1, "segment_2": 0.3}
    cells = {"plain/full/1": cell("plain", "full", 1, outcomes(), explained_variance=explained)}
    axis = panel(credit_figure(ledger_of(cells), "plain"), "the same by segment")
    assert drawn(axis, "full") == [([0, 2, 6], [0.1, 0.3, 0.7])]
    assert {tick.get_text() for tick in axis.get_xticklabels()} == {"0", "2", "6+"}


def test_nothing_finished_draws_nothing() -> None:
    assert figures(ledger_of({}), "plain") == {}
    base = {"plain/base/1": cell("plain", "base", 1, outcomes())}
    assert [*figures(ledger_of(base), "plain")] == ["pass", "behaviour"]


def test_the_same_data_gives_the_same_bytes() -> None:
    ledger = synthetic_ledger(seeds=2, extra_seeds=1, tasks=8, settings=["plain"])
    items = [(key, found) for key, found in ledger["cells"].items() if found["variant"] in ("base", "full", "robust")]
    ledger["cells"] = dict(items)
    random.Random(0).shuffle(items)
    assert figures(ledger, "plain") == figures({**ledger, "cells": dict(items)}, "plain")


def test_every_variant_has_a_colour_of_its_own() -> None:
    assert COLOURS.keys() == {one.name for one in VARIANTS}
    assert len(set(COLOURS.values())) == len(COLOURS)


def test_titles_are_text() -> None:
    row = Row({"name": "other", "title": r"costs $5 \frac{ and $6_", "extra": False}, 1.0, [1.0])
    figure = rows_chart({"panel": [row]})
    assert figure is not None
    assert png(figure).startswith(b"\x89PNG")
    curve = Curve({**FULL, "title": "$$"}, [1], np.array([[1.0]]))
    assert png(curves_chart([Panel("panel", [curve])])).startswith(b"\x89PNG")


def test_no_display_and_no_global_state() -> None:
    code = (
        "import sys, compactionrl.study.report\n"
        "from compactionrl.study.charts import Row, png, rows_chart\n"
        "assert not {'torch', 'matplotlib'} & set(sys.modules), 'imported before anything is drawn'\n"
        "png(rows_chart({'a': [Row({'name': 'full', 'title': 'b', 'extra': False}, 1.0, [1.0])]}))\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
