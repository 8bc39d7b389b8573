"""What all figures are drawn with: colours, cells, and the marks of documents."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, StrMethodFormatter
from numpy.typing import NDArray

from farspan.cli.drawing.rows import Row

Colors = NDArray[np.float64]
"""Red, green and blue from 0 to 1 in the last axis."""

INK, FAINT = "#222222", "#777777"
MANY_SHARDS = 20
"""More than these are not named one by one."""

# Okabe and Ito's colours, which people with any colour vision can tell apart.
_PALETTE = (
    *("#0072B2", "#E69F00", "#009E73", "#CC79A7"),
    *("#56B4E9", "#D55E00", "#8C6D00", "#555555"),
)
_MANY_DOCUMENTS = 24
_ROOM_FOR_NAME = 0.014


def cells(axes: Axes, x: Any, y: Any, colors: Colors, edge: str = "face") -> None:
    """Draws a grid of rectangles, neighbours in a row of one colour as one.

    Args:
      axes: Where.
      x: Edges of the columns.
      y: Edges of the rows.
      colors: `[rows, columns, 3]`.
      edge: Colour of the rectangles' edges.
    """
    shapes: list[Sequence[tuple[float, float]]] = []
    fills: list[Colors] = []
    for row, line in enumerate(colors):
        begins = np.flatnonzero(np.any(np.diff(line, axis=0, prepend=-1) != 0, axis=1))
        for first, stop in itertools.pairwise([*begins, len(line)]):
            left, right, upper, lower = x[first], x[stop], y[row], y[row + 1]
            shapes.append([(left, upper), (right, upper), (right, lower), (left, lower)])
            fills.append(line[first])
    width = 0.2 if edge == "face" else 0.6
    axes.add_collection(
        PolyCollection(shapes, facecolors=fills, edgecolors=edge, linewidths=width, clip_on=False),
        autolim=False,
    )


def device_colors(count: int) -> Colors:
    """A colour for each device, `[devices, 3]`."""
    if count <= len(_PALETTE):
        return np.array([to_rgb(color) for color in _PALETTE[:count]])
    return mpl.colormaps["viridis"](np.linspace(0, 0.9, count))[:, :3]


def rows_height(shards: int) -> float:
    """Inches for the rows of so many shards."""
    return min(0.34 * shards, 0.34 * MANY_SHARDS)


def thousands(axes: Axes, which: str) -> None:
    """Writes the places along the axes `x`, `y` or `xy` as 1,000, few of them."""
    for name in which:
        axis = axes.xaxis if name == "x" else axes.yaxis
        axis.set_major_locator(MaxNLocator(5, integer=True))
        axis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))


def title_of(figure: Figure, title: str, subtitle: str) -> None:
    """Writes a title and a line below it."""
    width, height = figure.get_size_inches()
    figure.suptitle(title + "\n", weight="bold", size=fitting(title, 11.0, width))
    figure.text(0.5, 1 - 0.42 / height, subtitle, ha="center", color=FAINT,
                size=fitting(subtitle, 9.0, width))  # fmt: skip


def fitting(text: str, size: float, inches: float) -> float:
    """A font size, at most `size`, at which a text fits so many inches."""
    return min(size, 100 * inches / max(1, len(text)))


def mark_documents(axes: Axes, row: Row, *, both: bool = False) -> None:
    """Lines at the documents' bounds, and their numbers if there are not too many."""
    if len(row.documents) == 1 and not row.padding:
        return
    line: dict[str, Any] = {"color": INK, "linewidth": 0.6, "linestyle": (0, (3, 2))}
    for bound in row.bounds[1:]:
        axes.axvline(bound, **line)
        if both:
            axes.axhline(bound, **line)
    if len(row.documents) > _MANY_DOCUMENTS:
        return
    names = [(f"doc {n + 1}", f"{n + 1}") for n in range(len(row.documents))] + [("pad", "")]
    for (name, brief), (start, stop) in zip(
        names, itertools.pairwise([*row.bounds, row.seq_len]), strict=True
    ):
        share = (stop - start) / row.seq_len
        text = name if share > _ROOM_FOR_NAME * len(name) else brief
        axes.text((start + stop) / 2 / row.seq_len, 1.01, text, ha="center", va="bottom", size=7,
                  color=FAINT, transform=axes.transAxes)  # fmt: skip
