"""`farspan show mask|layout|schedule [--flag value ...]`: pictures of who sees, holds and sends."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from farspan.cli.flags import parse_flags
from farspan.errors import unknown_choice

if TYPE_CHECKING:
    from farspan.cli.drawing.facts import Facts, Split
    from farspan.cli.drawing.rows import Row

_SUFFIXES = (".png", ".svg")
_MAX_BLOCKS = 512


@dataclass(frozen=True)
class RowOptions:
    """The row.

    Attributes:
      mask: Masks joined by & and |, such as "Causal() & SlidingWindow(1023, 0)".
      seq_len: Tokens in the row.
      documents: Lengths such as 100,300,50, the rest of the row being padding; "one" for a row of
        one document, "mixed" for five of different lengths.
    """

    mask: str = "Causal()"
    seq_len: int = 8192
    documents: str = "mixed"


@dataclass(frozen=True)
class SplitOptions:
    """How the row is split.

    Attributes:
      strategy: How keys and values meet queries.
      layout: Which tokens each device holds.
      cp_ring: Size of the mesh axis of that name.
      cp_ulysses: Size of the mesh axis of that name.
      cp_ring_outer: Size of the mesh axis of that name.
    """

    strategy: Literal["all_gather", "ulysses", "ring", "usp", "halo"] = "ring"
    layout: Literal["contiguous", "zigzag", "striped", "balanced"] = "zigzag"
    cp_ring: int = 8
    cp_ulysses: int = 1
    cp_ring_outer: int = 1


@dataclass(frozen=True)
class HeadOptions:
    """The layer.

    Attributes:
      heads: Query heads.
      kv_heads: Key and value heads.
      head_dim: Width of a head.
    """

    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128


@dataclass(frozen=True)
class OutputOptions:
    """Where pictures go besides the terminal.

    Attributes:
      out: Also write the picture to this file, .png or .svg.
      json: Print the numbers as one JSON object in the last line.
    """

    out: str = ""
    json: bool = False


@dataclass(frozen=True)
class MaskOptions:
    """Options of the picture of a mask.

    Attributes:
      blocks: Blocks along each side.
    """

    row: RowOptions = field(default_factory=RowOptions)
    blocks: int = 32
    output: OutputOptions = field(default_factory=OutputOptions)


@dataclass(frozen=True)
class LayoutOptions:
    """Options of the picture of a layout.

    Attributes:
      blocks: Parts of the row that are told apart in a file.
    """

    row: RowOptions = field(default_factory=RowOptions)
    split: SplitOptions = field(default_factory=SplitOptions)
    blocks: int = 128
    output: OutputOptions = field(default_factory=OutputOptions)


@dataclass(frozen=True)
class ScheduleOptions:
    """Options of the picture of a schedule."""

    row: RowOptions = field(default_factory=RowOptions)
    split: SplitOptions = field(default_factory=SplitOptions)
    layer: HeadOptions = field(default_factory=HeadOptions)
    output: OutputOptions = field(default_factory=OutputOptions)


def main(arguments: list[str]) -> int:
    """Draws a picture.

    Args:
      arguments: What to draw, then flags.

    Returns:
      0.

    Raises:
      ValueError: The arguments do not fit.
    """
    if arguments and arguments[0] in ("-h", "--help"):
        sys.stdout.write(_help())
        return 0
    if not arguments or arguments[0].startswith("-"):
        raise ValueError(
            f"show needs to know first what to draw, one of {', '.join(_PICTURES)}, got "
            f"{shlex.join(arguments[:1]) or 'nothing'}; use for example `farspan show mask`"
        )
    name, *flags = arguments
    if name not in _PICTURES:
        raise unknown_choice("show: picture", name, _PICTURES)
    picture = _PICTURES[name]
    description = f"Draw {picture.description}. Needs no devices."
    options = parse_flags(
        picture.default, flags, prog=f"farspan show {name}", description=description
    )
    _check(options)
    facts = picture.measure(options)
    _draw(facts, options.output.out)
    if options.output.json:
        sys.stdout.write(json.dumps({"picture": name, **facts.facts()}) + "\n")
    return 0


def _draw(facts: Facts, out: str) -> None:
    if out:
        from farspan.cli.drawing import figures

        figures.save(facts, out)
    from farspan.cli.drawing import terminal

    terminal.draw(facts)
    if out:
        sys.stdout.write(f"written: {out}\n")


def _measure_mask(options: MaskOptions) -> Facts:
    from farspan.cli.drawing.facts import mask_facts

    return mask_facts(_row(options.row), options.blocks)


def _measure_layout(options: LayoutOptions) -> Facts:
    from farspan.cli.drawing.facts import layout_facts

    split = options.split
    # Heads do not show: take as many as any split allows.
    heads = split.cp_ring * split.cp_ulysses * split.cp_ring_outer
    row = _row(options.row)
    return layout_facts(row, _split(split, row, heads, heads), options.blocks)


def _measure_schedule(options: ScheduleOptions) -> Facts:
    from farspan.cli.drawing.facts import schedule_facts

    row, layer = _row(options.row), options.layer
    split = _split(options.split, row, layer.heads, layer.kv_heads)
    return schedule_facts(row, split, layer.heads, layer.kv_heads, layer.head_dim)


class _Picture(NamedTuple):
    description: str
    default: Any
    measure: Callable[[Any], Facts]


_PICTURES = {
    "mask": _Picture("the mask by blocks: empty, partial or full", MaskOptions(), _measure_mask),
    "layout": _Picture(
        "who holds which tokens, and the work of each device", LayoutOptions(), _measure_layout
    ),
    "schedule": _Picture(
        "who computes what at each step, and what travels", ScheduleOptions(), _measure_schedule
    ),
}


def _row(options: RowOptions) -> Row:
    from farspan.cli.drawing.rows import make_row

    return make_row(options.mask, options.seq_len, options.documents)


def _split(options: SplitOptions, row: Row, heads: int, kv_heads: int) -> Split:
    from farspan import schedules
    from farspan.cli.drawing.facts import Split
    from farspan.layouts import get_layout

    layout = get_layout(options.layout)
    degrees = schedules.degrees(
        options.strategy, options.cp_ring, options.cp_ulysses, options.cp_ring_outer
    )
    schedules.check_combination(
        options.strategy,
        degrees,
        layout,
        num_heads=heads,
        num_kv_heads=kv_heads,
        seq_len=row.seq_len,
        mask=row.mask,
    )
    return Split(options.strategy, layout, degrees)


def _check(options: Any) -> None:
    """Refuses numbers out of range and files of unknown kind."""
    for part in (getattr(options, "split", None), getattr(options, "layer", None)):
        for name, value in vars(part).items() if part else ():
            if isinstance(value, int) and value < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    blocks = getattr(options, "blocks", 1)
    if not 1 <= blocks <= _MAX_BLOCKS:
        raise ValueError(f"--blocks must be in 1..{_MAX_BLOCKS}, got {blocks}")
    out = options.output.out
    if out and Path(out).suffix.lower() not in _SUFFIXES:
        raise ValueError(
            f"--out must end in {' or '.join(_SUFFIXES)}, got {out}; use for example --out "
            f"{Path(out).stem or 'picture'}.svg"
        )


def _help() -> str:
    width = max(map(len, _PICTURES))
    pictures = "\n".join(f"  {name:<{width}}  {p.description}" for name, p in _PICTURES.items())
    return (
        "usage: farspan show PICTURE [--flag value ...]\n\n"
        "Draw, in the terminal and with --out as PNG or SVG, what attention over a split row does. "
        "Needs no devices.\n"
        f"\npictures:\n{pictures}\n\n"
        "`farspan show PICTURE --help` lists the flags.\n"
    )
