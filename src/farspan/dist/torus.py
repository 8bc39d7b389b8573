"""Rings on the grid or torus in which TPU chips are linked.

A chip is a coordinate. It has a link to each neighbour along each axis, one that carries bytes both
ways at once, and where an axis wraps, its last chip is linked to its first.

Source: Google Cloud, "TPU v4", "TPU v5p", "TPU7x" (3D; slices of 4x4x4 and of multiples of it in
each dimension are tori, smaller ones are not); "How to Scale Your Model", jax-ml.github.io
/scaling-book/tpus (v5e, v6e: 2D, an axis wraps if it has the whole 16 chips). A slice that is
twisted, which its devices do not say, has its wrap links elsewhere.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence

Coordinate = tuple[int, ...]
Cycle = tuple[Coordinate, ...]
"""Every chip once, in the order of a ring; the last is followed by the first."""
Link = tuple[Coordinate, Coordinate]
"""One direction of the link between two neighbours: (from, to)."""

_CUBES_OF_FOUR = ("TPU v4", "TPU v5", "TPU v5p", "TPU7x", "TPU v7x")
_PODS_OF_SIXTEEN = ("TPU v5 lite", "TPU v5e", "TPU v6 lite", "TPU v6e")


def wrapped_axes(device_kind: str, shape: Sequence[int]) -> tuple[bool, ...]:
    """Says along which axes a whole slice has wrap links; none where that is not known.

    Args:
      device_kind: As a JAX device reports it.
      shape: Chips along each axis.
    """
    if device_kind in _PODS_OF_SIXTEEN:
        return tuple(size == 16 for size in shape)
    cubes = device_kind in _CUBES_OF_FOUR and all(size % 4 == 0 for size in shape)
    return (cubes,) * len(shape)


def hop_length(a: Coordinate, b: Coordinate, shape: Sequence[int], wrap: Sequence[bool]) -> int:
    """Links on the shortest way from chip `a` to chip `b`."""
    return sum(
        min(abs(x - y), size - abs(x - y)) if wraps else abs(x - y)
        for x, y, size, wraps in zip(a, b, shape, wrap, strict=True)
    )


def hop_lengths(
    cycle: Sequence[Coordinate], shape: Sequence[int], wrap: Sequence[bool]
) -> Counter[int]:
    """Counts the hops of a ring by their length in links."""
    following = itertools.chain(cycle[1:], cycle[:1])
    return Counter(hop_length(a, b, shape, wrap) for a, b in zip(cycle, following, strict=True))


def ring_order(shape: Sequence[int], wrap: Sequence[bool]) -> Cycle:
    """Orders all chips in a ring of hops as short as can be.

    Args:
      shape: Chips along each axis.
      wrap: Whether each axis wraps.

    Returns:
      A ring of one-link hops without wrap links, if two axes or more have a length above 1 and one
      of them is even; else one that uses the wrap links of an odd axis or of a line, if it has
      them; else one with as few hops of two links as there can be: one on a grid of odd sides, all
      but two on a line.
    """
    sizes = tuple(shape)
    axes = [axis for axis, size in enumerate(sizes) if size > 1]
    if not axes:
        return ((0,) * len(sizes),)
    even = [axis for axis in axes if sizes[axis] % 2 == 0]
    wrapping = [axis for axis in axes if wrap[axis] and sizes[axis] > 2]
    if even and (len(axes) > 1 or sizes[axes[0]] == 2):
        axis, build = even[-1], _comb
    elif wrapping:
        axis, build = wrapping[-1], _comb_of_wrapped
    elif len(axes) == 1:
        axis, build = axes[0], _there_and_back
    else:
        axis, build = axes[-1], _comb_of_odd
    columns = list(_snake(tuple(1 if a == axis else size for a, size in enumerate(sizes))))
    return tuple(
        tuple(row if a == axis else place for a, place in enumerate(columns[column]))
        for row, column in build(sizes[axis], len(columns))
    )


def link_bytes(
    transfers: Iterable[tuple[Coordinate, Coordinate, int]],
    shape: Sequence[int],
    wrap: Sequence[bool],
) -> Counter[Link]:
    """Counts the bytes that each direction of each link carries.

    A transfer between chips that are not neighbours goes along the first axis, then the second, and
    so on, the shorter way round; onward where both are as long.

    Args:
      transfers: Source, target and bytes of each.
      shape: Chips along each axis.
      wrap: Whether each axis wraps.

    Returns:
      Bytes by link, of those links that carry any.
    """
    carried: Counter[Link] = Counter()
    for source, target, size_bytes in transfers:
        here = source
        for axis, (size, wraps) in enumerate(zip(shape, wrap, strict=True)):
            distance = target[axis] - here[axis]
            if wraps and 2 * abs(distance) > size:
                distance -= math.copysign(size, distance)
            elif wraps and 2 * abs(distance) == size:
                distance = abs(distance)
            for _ in range(int(abs(distance))):
                step = 1 if distance > 0 else -1
                there = (*here[:axis], (here[axis] + step) % size, *here[axis + 1 :])
                carried[here, there] += size_bytes
                here = there
    return carried


def _snake(shape: tuple[int, ...]) -> Iterable[Coordinate]:
    """All chips along a path of one-link hops, the last axis running fastest."""
    if not shape:
        return [()]
    rest = list(_snake(shape[1:]))
    return [(i, *tail) for i in range(shape[0]) for tail in (reversed(rest) if i % 2 else rest)]


def _comb(rows: int, columns: int) -> list[tuple[int, int]]:
    """A ring on a grid with an even number of rows: back and forth, and home by column 0."""
    if columns == 1:  # two chips
        return [(row, 0) for row in range(rows)]
    teeth = [
        (row, column)
        for row in range(rows)
        for column in (range(columns - 1, 0, -1) if row % 2 else range(1, columns))
    ]
    return [(0, 0), *teeth, *((row, 0) for row in range(rows - 1, 0, -1))]


def _comb_of_wrapped(rows: int, columns: int) -> list[tuple[int, int]]:
    """A ring on a cylinder: back and forth over all rows but 0, column by column, home by row 0."""
    teeth = [
        (row, column)
        for column in range(columns)
        for row in (range(rows - 1, 0, -1) if column % 2 else range(1, rows))
    ]
    return [(0, 0), *teeth, *((0, column) for column in range(columns - 1, 0, -1))]


def _there_and_back(rows: int, _: int) -> list[tuple[int, int]]:
    """A ring on a line: out over the even places, back over the odd ones."""
    places = [*range(0, rows, 2), *reversed(range(1, rows, 2))]
    return [(row, 0) for row in places]


def _comb_of_odd(rows: int, columns: int) -> list[tuple[int, int]]:
    """A ring on a grid of odd sides: of all rows but the last, whose chips are visited in pairs.

    The chip left over costs one hop of two links. Chips of the two colours of a chessboard take
    turns in a ring of single links, and here there is one more of one colour.
    """
    last = rows - 1
    ring: list[tuple[int, int]] = []
    for row, column in _comb(last, columns):
        ring.append((row, column))
        # Row last - 1 runs from the highest column down to 0.
        if row == last - 1 and column % 2 and column < columns - 1:
            ring += [(last, column), (last, column - 1)]
        if row == last - 1 and column == columns - 1:
            ring.append((last, column))
    return ring
