"""Two kinds of chart that every figure of a study is made of: rows with intervals, and curves with bands."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Variant = Mapping[str, Any]

COLOURS = {
    "base": "#6B6B6B",
    "rl-c": "#E69F00",
    "rl-2c": "#8C510A",
    "no-summary": "#D55E00",
    "segment-loss": "#009E73",
    "segment-gae": "#CC79A7",
    "full": "#0072B2",
    "rl-total": "#999933",
    "concatenated": "#332288",
    "lambda-segment": "#882255",
    "lambda-window": "#DDAA33",
    "coupled-lambda": "#44AA99",
    "group": "#000000",
    "robust": "#56B4E9",
}
"""One colour per variant in every figure; from the palettes of Okabe and Ito and of Tol, made for colour-blind readers."""
OTHER = "#444444"
GREY = "#8A8A8A"
WIDTH = 8.4
"""Inches; with DPI 1260 pixels, so that the text is still read where a page shows the figure 800 pixels wide."""
DPI = 150


@dataclass(frozen=True)
class Row:
    """One variant's place in a panel of rows."""

    variant: Variant
    mean: float
    seeds: Sequence[float]
    """One value per seed."""
    ends: tuple[float, float] | None = None
    """Of the 95% interval of the mean."""


@dataclass(frozen=True)
class Curve:
    """One variant's values along the horizontal axis."""

    variant: Variant
    places: Sequence[int]
    values: np.ndarray
    """[seeds, places]; NaN where a seed has no value."""


@dataclass(frozen=True)
class Panel:
    """Curves over the same axis."""

    title: str
    curves: Sequence[Curve]
    label: str = "policy updates"
    ticks: Mapping[int, str] | None = None
    """Place -> its name; None: matplotlib's own."""


def rows_chart(
    panels: Mapping[str, Sequence[Row]],
    *,
    zero: bool = False,
    same_scale: bool = False,
    limits: Mapping[str, float | None] | None = None,
) -> Figure | None:
    """Panels side by side under their titles, one line per variant: mean, interval, and a ring for every seed.

    `zero` draws a line there; `same_scale` makes places in different panels comparable; `limits` are drawn as a dotted
    line in the panels that they name. None if there is no row at all.
    """
    from matplotlib.figure import Figure  # without pyplot: no display, no global state

    variants = {row.variant["name"]: row.variant for rows in panels.values() for row in rows}
    if not variants:
        return None
    heights = {name: height for height, name in enumerate(variants)}
    figure = Figure(figsize=(WIDTH, 0.8 + 0.42 * len(variants)), layout="constrained")
    axes = figure.subplots(1, len(panels), sharex=same_scale, sharey=True, squeeze=False)[0]
    for axis, (title, rows) in zip(axes, panels.items(), strict=True):
        style(axis, title)
        axis.grid(axis="y", visible=False)
        for row in rows:
            height, colour = heights[row.variant["name"]], colour_of(row.variant)
            if row.ends:
                axis.plot(row.ends, [height, height], color=colour, linewidth=2.2, solid_capstyle="butt")
            axis.plot(row.mean, height, marker="D" if row.variant["extra"] else "o", color=colour, markersize=6)
            below = [height + 0.28] * len(row.seeds)
            axis.plot(row.seeds, below, "o", markerfacecolor="none", markeredgecolor=colour, markersize=3.5)
        if zero:
            axis.axvline(0, color=GREY, linewidth=1, zorder=1)
        limit = (limits or {}).get(title)
        if limit is not None:
            axis.axvline(limit, color=GREY, linewidth=1, linestyle=":", zorder=1)
        axis.set_yticks(range(len(variants)), [wrapped(one["title"], 26) for one in variants.values()])
        axis.set_ylim(len(variants) - 0.4, -0.6)
    return figure


def curves_chart(panels: Sequence[Panel]) -> Figure | None:
    """Panels side by side: the mean over seeds, and a band from the lowest seed to the highest.

    A place where no seed has a value is left out, and so is a panel without curves. None if no panel is left.
    """
    from matplotlib.figure import Figure  # without pyplot: no display, no global state
    from matplotlib.ticker import MaxNLocator

    panels = [panel for panel in panels if panel.curves]
    if not panels:
        return None
    figure = Figure(layout="constrained")
    handles: dict[str, Any] = {}
    for axis, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        style(axis, panel.title)
        axis.set_xlabel(panel.label)
        if panel.ticks:
            axis.set_xticks([*panel.ticks], [*panel.ticks.values()])
        else:
            axis.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        for curve in panel.curves:
            handles.setdefault(curve.variant["title"], draw_curve(axis, curve))
    labels = [wrapped(title, 54) for title in handles]
    figure.set_size_inches(WIDTH, 3 + 0.2 * math.ceil(len(labels) / 2))
    figure.legend(handles.values(), labels, loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    return figure


def draw_curve(axis: Axes, curve: Curve) -> Any:
    """Mean and band; the mean's line, for the legend."""
    measured = ~np.isnan(curve.values).all(axis=0)
    places, values = np.array(curve.places)[measured], curve.values[:, measured]
    colour = colour_of(curve.variant)
    band = np.nanmin(values, axis=0), np.nanmax(values, axis=0)
    axis.fill_between(places, *band, color=colour, alpha=0.12, linewidth=0)
    (line,) = axis.plot(
        places,
        np.nanmean(values, axis=0),
        color=colour,
        linestyle="--" if curve.variant["extra"] else "-",
        linewidth=1.8,
        marker="o" if len(places) < 12 else "",
        markersize=4,
    )
    return line


def style(axis: Axes, title: str) -> None:
    axis.set_title(title, fontsize=9, loc="left")
    axis.tick_params(labelsize=8, length=0)
    axis.xaxis.label.set_fontsize(8)
    axis.spines[:].set_visible(False)
    axis.grid(color="#DDDDDD", linewidth=0.7)
    axis.set_axisbelow(True)


def colour_of(variant: Variant) -> str:
    return COLOURS.get(variant["name"], OTHER)


def wrapped(title: str, width: int) -> str:
    """A title in lines of so many characters; its dollar signs are no formulas."""
    return textwrap.fill(title, width).replace("$", r"\$")


def png(figure: Figure) -> bytes:
    """Equal figures give equal bytes, without date or version in them; 256 colours are enough and a third of the size."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from PIL import Image

    figure.set_dpi(DPI)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    image = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
    file = io.BytesIO()
    image.quantize(256, dither=Image.Dither.NONE).save(file, format="png", optimize=True)
    return file.getvalue()
