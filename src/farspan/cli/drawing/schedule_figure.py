"""The figure of a schedule."""

from __future__ import annotations

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from numpy.typing import NDArray

from farspan.cli.drawing import words
from farspan.cli.drawing.canvas import FAINT, INK, MANY_SHARDS, Colors, cells, fitting, rows_height
from farspan.cli.drawing.facts import ScheduleFacts

_WAITED, _HIDDEN, _LONG = "#D55E00", "#444444", "#009E73"
_EDGE = "#BBBBBB"
_CELL = 0.68  # width of a step's cells; the rest is left for what travels
_INCHES_PER_LETTER = 0.069  # of the monospaced notes


def schedule_figure(facts: ScheduleFacts) -> Figure:
    """Draws the work of each device at each step, and what travels."""
    shards, count = facts.pairs.shape
    width = max(8.0, min(13.0, 2.2 + 1.15 * count))
    lines = words.wrapped(words.notes(facts), int((width - 1) / _INCHES_PER_LETTER))
    below = 0.155 * len(lines) + 0.1
    height = 1.7 + max(1.2, rows_height(shards)) + below
    figure = Figure(figsize=(width, height))
    bottom, above = (below + 0.45) / height, 1.1 / height
    axes = figure.add_axes((0.85 / width, bottom, 1 - 2.0 / width, 1 - above - bottom))
    detailed = max(shards, count) <= MANY_SHARDS
    cell = _CELL if detailed else 1.0
    _draw_work(axes, facts, cell, detailed)
    steps = range(count) if detailed else range(0, count, -(-count // 16))
    axes.set_xticks([step + cell / 2 for step in steps], [f"step {n}" for n in steps])
    shown = range(shards) if detailed else range(0, shards, -(-shards // 16))
    axes.set_yticks(list(shown), [facts.split.devices(shard) for shard in shown])
    axes.set(xlim=(cell - 1, count - 1 + cell), ylim=(shards - 0.5, -0.5), ylabel="device")
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    _legend_of_moves(axes, facts, detailed)
    per_head = f"visible pairs computed at each step, for each of {facts.heads} query heads"
    figure.text(0.5, 1 - 0.25 / height, facts.title, ha="center", weight="bold",
                size=fitting(facts.title, 11.0, width))  # fmt: skip
    for line, text in enumerate((facts.row.describe(), per_head)):
        figure.text(0.5, 1 - (0.46 + 0.18 * line) / height, text, ha="center", color=FAINT,
                    size=fitting(text, 9.0, width))  # fmt: skip
    figure.text(0.85 / width, below / height, "\n".join(lines), va="top", size=8,
                family="monospace", linespacing=1.35)  # fmt: skip
    return figure


def _draw_work(axes: Axes, facts: ScheduleFacts, cell: float, detailed: bool) -> None:
    """Draws a column of cells for each step; in detail, numbers and what travels as well."""
    shards, count = facts.pairs.shape
    top = max(1, int(facts.pairs.max()))
    blues = _blues(facts.pairs / top)
    rows = np.arange(shards + 1) - 0.5
    if not detailed:
        cells(axes, np.arange(count + 1), rows, blues)
        return
    for step in range(count):
        cells(axes, (step, step + cell), rows, blues[:, step : step + 1], edge=_EDGE)
        _name_cells(axes, facts, step, top)
        _draw_moves(axes, facts, step)
    right = count - 1 + cell + 0.12 * (count + 2) / 10
    for shard, work in enumerate(facts.pairs.sum(1)):
        axes.text(right, shard, words.short(int(work)), va="center", weight="bold")
    axes.text(right, -0.62, "all", va="bottom")


def _draw_moves(axes: Axes, facts: ScheduleFacts, step: int) -> None:
    """Arrows into a column, from the shard that sends to the one that computes with the keys."""
    found = facts.arrivals[step]
    alpha = 0.9 if len(found) <= 3 * len(facts.pairs) else 0.35
    for move, _ in found:
        color = _move_color(move.steps_under)
        axes.annotate(
            "",
            xy=(step - 0.01, move.receiver),
            xytext=(step - 1 + _CELL + 0.01, move.sender),
            arrowprops={"arrowstyle": "->", "color": color, "alpha": alpha, "linewidth": 0.9,
                        "shrinkA": 0, "shrinkB": 0, "mutation_scale": 7},
            annotation_clip=False,
        )  # fmt: skip


def _legend_of_moves(axes: Axes, facts: ScheduleFacts, detailed: bool) -> None:
    """Says what the colours of arrows mean."""
    names: dict[str, str] = {}
    for step in facts.schedule if detailed else ():
        for move in step.moves:
            under = f"{move.steps_under} step{'s' * (move.steps_under > 1)}"
            names[_move_color(move.steps_under)] = (
                f"keys sent while {under} compute{'s' * (move.steps_under == 1)}"
                if move.steps_under
                else "keys that are waited for"
            )
    handles: list[Line2D | Patch] = [
        Line2D([], [], color=color, linewidth=1.2, label=name) for color, name in names.items()
    ]
    top = int(facts.pairs.max())
    for share, label in ((0.0, "nothing visible"), (1.0, f"{words.short(top)} pairs")):
        color = to_hex(tuple(_blues(np.array(share)).tolist()))
        handles.append(Patch(facecolor=color, edgecolor=_EDGE, label=label))
    axes.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, 0.0), ncols=4,
                frameon=False, fontsize=8, borderaxespad=0.3)  # fmt: skip


def _move_color(steps_under: int) -> str:
    return (_WAITED, _HIDDEN, _LONG)[min(steps_under, 2)]


def _name_cells(axes: Axes, facts: ScheduleFacts, step: int, top: int) -> None:
    """Writes into each cell whose keys it computes with, and how many pairs."""
    shards = len(facts.pairs)
    for shard in range(shards):
        pairs = int(facts.pairs[shard, step])
        sources = facts.schedule[step].sources[shard]
        whose = "all keys" if len(sources) == shards else "keys " + words.spans(sources)
        ink = "white" if pairs > 0.55 * top else INK
        axes.text(step + _CELL / 2, shard - 0.06, words.short(pairs) if pairs else "0",
                  ha="center", va="bottom", size=8, color=ink)  # fmt: skip
        axes.text(step + _CELL / 2, shard + 0.06, whose, ha="center", va="top", size=6, color=ink)


def _blues(shares: NDArray[np.float64]) -> Colors:
    """Colours of shares of the most work; white for none."""
    found = np.asarray(mpl.colormaps["Blues"](0.08 + 0.82 * shares))[..., :3]
    return np.where(shares[..., None] == 0, 1.0, found)
