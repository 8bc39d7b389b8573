"""Pictures as PNG and SVG, by matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from farspan.cli.drawing import words
from farspan.cli.drawing.canvas import (
    FAINT,
    INK,
    MANY_SHARDS,
    cells,
    device_colors,
    mark_documents,
    rows_height,
    thousands,
    title_of,
)
from farspan.cli.drawing.facts import Facts, LayoutFacts, MaskFacts, ScheduleFacts
from farspan.cli.drawing.schedule_figure import schedule_figure

_KIND_COLORS = ("#F2F2F2", "#E69F00", "#0072B2")
_MANY_RUNS, _ROOM_FOR_RUN = 50, 0.18
_STYLE: Any = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.edgecolor": FAINT,
    "axes.linewidth": 0.6,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "svg.hashsalt": "farspan",  # equal pictures are equal files
}


def save(facts: Facts, path: str) -> None:
    """Draws to a file; its suffix says the format."""
    with mpl.rc_context(_STYLE):
        match facts:
            case MaskFacts():
                figure = _mask(facts)
            case LayoutFacts():
                figure = _layout(facts)
            case ScheduleFacts():
                figure = schedule_figure(facts)
        kind = Path(path).suffix.lower().removeprefix(".")
        metadata = {"Date": None} if kind == "svg" else {}
        figure.savefig(path, format=kind, dpi=160, metadata=metadata)


def _mask(facts: MaskFacts) -> Figure:
    figure = Figure(figsize=(5.6, 6.5), layout="constrained")
    axes = figure.add_subplot()
    seq_len, count = facts.row.seq_len, len(facts.pairs)
    edges = np.minimum(np.arange(count + 1) * facts.block_tokens, seq_len).astype(float)
    palette = np.array([to_rgb(color) for color in _KIND_COLORS])
    cells(axes, edges, edges, palette[facts.kinds])
    axes.set(xlim=(0, seq_len), ylim=(seq_len, 0), aspect="equal")
    axes.set(xlabel="key (place in the row)", ylabel="query (place in the row)")
    mark_documents(axes, facts.row, both=True)
    thousands(axes, "xy")
    pairs = int(facts.pairs.sum())
    title_of(figure, facts.title, f"{facts.row.describe_tokens()}; {pairs:,} visible pairs")
    handles = [
        Patch(facecolor=color, edgecolor=FAINT, linewidth=0.5, label=f"{kind} ({number:,})")
        for color, (kind, number) in zip(_KIND_COLORS, facts.counts.items(), strict=True)
    ]
    blocks = f"blocks of {facts.block_tokens:,} x {facts.block_tokens:,} tokens"
    place = "outside lower center"
    figure.legend(handles=handles, loc=place, ncols=3, frameon=False, title=blocks)
    return figure


def _layout(facts: LayoutFacts) -> Figure:
    devices, seq_len = len(facts.held), facts.row.seq_len
    figure = Figure(figsize=(10, 1.9 + rows_height(devices)), layout="constrained")
    where, inside, work = figure.subplots(1, 3, sharey=True, width_ratios=(4, 3, 1.6))
    edges, colors = np.arange(devices + 1) - 0.5, device_colors(devices)
    shares = facts.shares(facts.blocks)
    shades = 1 - np.sqrt(shares)[..., None] * (1 - colors[:, None])
    cells(where, np.linspace(0, seq_len, shares.shape[1] + 1), edges, shades)
    where.set(xlabel="place in the text", ylabel="device", xlim=(0, seq_len))
    where.set_title("which tokens it holds (paler: a part of them)", pad=16)
    mark_documents(where, facts.row)
    places = facts.slot_places(facts.blocks)
    slots = facts.held.shape[1]
    cividis = mpl.colormaps["cividis"].resampled(48)
    cells(inside, np.linspace(0, slots, places.shape[1] + 1), edges, cividis(places)[..., :3])
    inside.set(xlabel="slot", xlim=(0, slots))
    inside.set_title("what lies in its slots", pad=16)
    for device in range(devices if devices <= MANY_SHARDS else 0):
        _name_runs(inside, facts, device)
    scale = ScalarMappable(Normalize(0, seq_len), cividis)
    bar = figure.colorbar(scale, ax=inside, location="bottom", aspect=30, shrink=0.9)
    bar.set_label("place in the text")
    for drawn in bar.ax.collections:  # the name of a clip path would differ from run to run
        drawn.set_clip_on(False)
    bar.ax.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    work.barh(np.arange(devices), facts.pairs, color=colors, height=0.75)
    work.axvline(float(facts.pairs.mean()), color=INK, linewidth=1, linestyle=(0, (4, 2)))
    work.set(xlabel="visible pairs per head", ylim=(devices - 0.5, -0.5))
    work.text(float(facts.pairs.mean()), -0.55, "mean", ha="center", va="bottom", size=7)
    work.set_title(f"work: max/mean {facts.max_over_mean:.2f}", pad=16)
    work.xaxis.set_major_formatter(lambda value, _: words.short(round(value)))
    work.xaxis.set_major_locator(MaxNLocator(4))
    work.spines[["top", "right"]].set_visible(False)
    where.yaxis.set_major_locator(MaxNLocator(min(devices, 16), integer=True))
    thousands(where, "x")
    thousands(inside, "x")
    title_of(figure, facts.title, facts.row.describe())
    return figure


def _name_runs(axes: Axes, facts: LayoutFacts, device: int) -> None:
    """Writes the places of a device's runs on its slots, where they have room."""
    runs, start = facts.runs(device), 0
    for first, stop in runs if len(runs) <= _MANY_RUNS else ():
        middle = (first + stop) / 2 / facts.row.seq_len
        if stop - first > _ROOM_FOR_RUN * facts.held.shape[1]:
            axes.text(start + (stop - first) / 2, device, f"{first:,}-{stop - 1:,}", ha="center",
                      va="center", size=6.5, color="white" if middle < 0.55 else INK)  # fmt: skip
        start += stop - first
