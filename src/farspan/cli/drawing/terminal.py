"""Pictures in the terminal: shades that colours repeat, so that they can be read without."""

from __future__ import annotations

import itertools

import numpy as np
from rich.console import Console
from rich.text import Text

from farspan.cli.drawing import words
from farspan.cli.drawing.facts import (
    KINDS,
    Facts,
    LayoutFacts,
    MaskFacts,
    ScheduleFacts,
    mask_facts,
)
from farspan.cli.drawing.rows import Row

_LEAST_WIDTH, _WIDTH = 60, 100
_SHADES, _ASCII_SHADES = " ░▒▓█", " .:+#"
_PARTIAL, _FULL, _BAR = "#E69F00", "#0072B2", "#009E73"
_DIM = "bright_black"
_LABEL = 8


def draw(facts: Facts) -> None:
    """Draws on standard output, 60 to 100 columns wide."""
    console = Console(highlight=False, soft_wrap=True, markup=False)
    width = console.width if console.is_terminal else _WIDTH
    console.width = min(_WIDTH, max(_LEAST_WIDTH, width))
    match facts:
        case MaskFacts():
            _draw_mask(console, facts)
        case LayoutFacts():
            _draw_layout(console, facts)
        case ScheduleFacts():
            _draw_schedule(console, facts)


def _draw_mask(console: Console, facts: MaskFacts) -> None:
    """Draws a mask by blocks."""
    room = max(2, console.width - _LABEL - 2)
    if len(facts.pairs) > room:
        facts = mask_facts(facts.row, room)
    across = 2 if 2 * len(facts.pairs) <= room else 1
    shades = _shades(console)
    glyphs = [(shades[0], ""), (shades[2], _PARTIAL), (shades[4], _FULL)]
    count, block = facts.kinds.shape[0], facts.block_tokens
    _say(console, facts.title, "bold")
    _say(console, facts.row.describe_tokens())
    starts = {bound // block: n + 1 for n, bound in enumerate(facts.row.bounds[:-1])}
    several = len(facts.row.documents) > 1
    if several:
        strip = _document_strip(facts.row, count * across)
        console.print(Text(f"{'keys':>{_LABEL - 1}}  {strip}", _DIM))
    for row in range(count):
        label = f"doc {starts[row]}" if several and row in starts else ""
        line = Text(f"{label:>{_LABEL - 1}} ", _DIM)
        line.append("|", _DIM)
        for kind in facts.kinds[row]:
            glyph, style = glyphs[kind]
            line.append(glyph * across, style)
        line.append("|", _DIM)
        console.print(line)
    legend = Text("    ")
    for kind, (glyph, style) in zip(KINDS, glyphs, strict=True):
        legend.append("[").append(glyph * 2, style).append(f"] {kind} {facts.counts[kind]:,}   ")
    console.print(legend)
    pairs, square = int(facts.pairs.sum()), facts.row.seq_len**2
    _say(
        console,
        f"blocks of {block:,} x {block:,} tokens; {pairs:,} visible pairs, "
        f"{pairs / square:.1%} of the square",
    )


def _draw_layout(console: Console, facts: LayoutFacts) -> None:
    """Draws who holds which tokens, and the work."""
    _say(console, facts.title, "bold")
    _say(console, facts.row.describe())
    tail = 25
    where = (console.width - _LABEL - tail - 4) * 3 // 5
    inside = console.width - _LABEL - tail - 4 - where
    shares, places = facts.shares(where), facts.slot_places(inside)
    where, inside = shares.shape[1], places.shape[1]
    shades = _shades(console)
    documents = _document_strip(facts.row, where)
    _line(
        console,
        Text(f"{'device':>{_LABEL - 1}}  ", _DIM),
        Text("its tokens in the text".ljust(where)[:where] + "  ", _DIM),
        Text("its slots, first to last".ljust(inside)[:inside] + "  ", _DIM),
        Text("pairs per head", _DIM),
    )
    if len(facts.row.documents) > 1:
        _line(console, Text(f"{'doc':>{_LABEL - 1}}  "), Text(documents, _DIM))
    top = max(1, int(facts.pairs.max()))
    for device, (share, place) in enumerate(zip(shares, places, strict=True)):
        line = Text(f"{device:>{_LABEL - 1}} |")
        line.append("".join(shades[_level(x)] for x in share), _FULL).append("| ")
        for part in place:
            line.append(shades[1 + min(3, int(part * 4))], _ramp(float(part)))
        bar = (shades[4]) * round(12 * int(facts.pairs[device]) / top)
        line.append(f"  {words.short(int(facts.pairs[device])):>6} ").append(bar, _BAR)
        console.print(line)
    _say(
        console,
        f"shade: share of the text held; slots: {shades[1]} start to {shades[4]} end of the text",
    )
    for device in range(min(4, len(facts.held))):
        runs = facts.runs(device)
        shown = ", ".join(f"{start:,}..{stop - 1:,}" for start, stop in runs[:4])
        more = f", ... ({len(runs):,} runs)" if len(runs) > 4 else ""
        _say(console, f"device {device}: {shown}{more}")
    _say(console, f"work max/mean {facts.max_over_mean:.3f}")


def _draw_schedule(console: Console, facts: ScheduleFacts) -> None:
    """Draws the work of each device at each step, and what travels."""
    _say(console, facts.title, "bold")
    _say(console, facts.row.describe())
    _say(
        console,
        "visible pairs that a device computes at each step, for each of its "
        f"{facts.heads} query heads",
    )
    label = max(_LABEL, len(facts.split.devices(len(facts.pairs) - 1)) + 1)
    room, count = console.width - label - 8, len(facts.schedule)
    whose = [["k" + words.spans(own).replace(" ", "") for own in step.sources]
             for step in facts.schedule]  # fmt: skip
    titled = 8 + max(len(name) for names in whose for name in names)
    if max(10, titled) * count <= room:
        _cells(console, facts, label, max(10, titled), whose)
        _say(console, "k3: with the keys of shard 3; -: nothing visible", _DIM)
    elif 7 * count <= room:
        _cells(console, facts, label, 7, None)
    else:
        _shade_cells(console, facts, label, room)
    for line in words.notes(facts):
        _say(console, line)


def _cells(
    console: Console,
    facts: ScheduleFacts,
    label: int,
    width: int,
    whose: list[list[str]] | None,
) -> None:
    """A cell of numbers for each step, with whose keys they are if there is room."""
    heads = "".join(f"{f'step {n}':>{width - 1}} " for n in range(len(facts.schedule)))
    console.print(Text(f"{'device':>{label - 1}} {heads}{'all':>7}", _DIM))
    top = max(1, int(facts.pairs.max()))
    for shard, work in enumerate(facts.pairs):
        line = Text(f"{facts.split.devices(shard):>{label - 1}} ")
        for n, pairs in enumerate(work):
            text = words.short(int(pairs)) if pairs else "-"
            name = whose[n][shard] if whose else ""
            line.append(f"{name}{text:>{width - 1 - len(name)}}", _heat(int(pairs) / top))
            line.append(" ")
        line.append(f"{words.short(int(work.sum())):>7}", "bold")
        console.print(line)


def _shade_cells(console: Console, facts: ScheduleFacts, label: int, room: int) -> None:
    """A shade for each step, or for a few where there are very many."""
    merged = -(-facts.pairs.shape[1] // room)
    firsts = np.arange(0, facts.pairs.shape[1], merged)
    pairs = np.add.reduceat(facts.pairs, firsts, axis=1)
    width, shades = room // len(firsts), _shades(console)
    steps = "steps" if merged == 1 else f"{merged} steps a column"
    console.print(
        Text(f"{'device':>{label - 1}} {f'{steps}, 0 first':<{width * len(firsts)}}{'all':>7}")
    )
    top = max(1, int(pairs.max()))
    for shard, work in enumerate(pairs):
        line = Text(f"{facts.split.devices(shard):>{label - 1}} ")
        for part in work / top:
            line.append(shades[_level(float(part))] * width, _ramp(1 - float(part)))
        line.append(f"{words.short(int(work.sum())):>7}", "bold")
        console.print(line)
    _say(console, f"{shades[1]} little to {shades[4]} {words.short(top)} pairs")


def _say(console: Console, line: str, style: str = "") -> None:
    for part in words.wrapped([line], console.width):
        console.print(Text(part, style))


def _line(console: Console, *parts: Text) -> None:
    console.print(Text.assemble(*parts))


def _shades(console: Console) -> str:
    return _ASCII_SHADES if console.options.ascii_only else _SHADES


def _level(share: float) -> int:
    """0 for nothing, 1 to 4 for a share from above 0 to 1."""
    return min(4, int(np.ceil(share * 4)))


def _ramp(part: float) -> str:
    """A colour from light yellow to dark blue, whose lightness tells its place as well."""
    stops = np.array(
        [[253, 231, 37], [122, 209, 81], [34, 168, 132], [42, 120, 142], [65, 68, 135]]
    )
    at = min(max(part, 0.0), 1.0) * (len(stops) - 1)
    low = min(int(at), len(stops) - 2)
    red, green, blue = (stops[low] + (at - low) * (stops[low + 1] - stops[low])).astype(int)
    return f"#{red:02x}{green:02x}{blue:02x}"


def _heat(part: float) -> str:
    """Style of a cell of numbers: the more work, the darker its ground."""
    if not part:
        return _DIM
    ink = "white" if part > 0.5 else "black"
    return f"{ink} on {_ramp(part)}"


def _document_strip(row: Row, width: int) -> str:
    """The row as characters, with the number of each document where it begins."""
    strip = ""
    for n, (start, stop) in enumerate(itertools.pairwise(row.bounds)):
        first, last = (place * width // row.seq_len for place in (start, stop))
        strip += f"{n + 1}"[: last - first].ljust(last - first, "-")
    return strip.ljust(width)
