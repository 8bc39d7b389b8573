"""Rings that share no link: edge-disjoint Hamiltonian cycles.

A product of two rings of links is two such cycles (Kotzig 1973), one of three rings is three
(Foregger 1978). They are found by switching squares: at first each set of links holds one axis,
many small rings. Where two opposite links of a square belong to one set and the other two to
another, the sets may exchange them: every chip keeps two links of each set, and rings are joined.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import random
from collections.abc import Sequence

from farspan.dist.torus import Coordinate, Cycle, hop_lengths, ring_order

_SPARE = -1
"""Owner of the links that belong to no cycle."""
_ATTEMPTS = 20
_IDLE_SWITCHES = 400
"""Switches that join no ring before an attempt is given up."""


def hamiltonian_cycles(shape: Sequence[int], wrap: Sequence[bool], count: int) -> tuple[Cycle, ...]:
    """Finds rings over all chips, of one-link hops, that share no link.

    Args:
      shape: Chips along each axis.
      wrap: Whether each axis wraps.
      count: Rings wanted, at least 1.

    Returns:
      As many as were found, at most `count`: one for each axis of three chips or more that wraps,
      and one for the other axes together if they are a grid that has a ring. No more than three
      on a slice. The same for the same arguments. Each begins at chip 0, 0, 0.

    Cost:
      Seconds at most up to 8x8x8; kept for the life of the process.
    """
    sizes, wraps = tuple(shape), tuple(bool(w) for w in wrap)
    if math.prod(sizes) < 3:
        return ()
    plain = ring_order(sizes, wraps)
    if count == 1 and set(hop_lengths(plain, sizes, wraps)) == {1}:
        return (plain,)
    return _all_cycles(sizes, wraps)[:count]


def complete_cycles(nodes: int) -> tuple[tuple[int, ...], ...]:
    """Rings over all of `nodes` nodes, any two of them linked, that share no link.

    Args:
      nodes: Nodes, at least 3.

    Returns:
      All (nodes - 1) // 2 that there can be, the first of them 0, 1, 2, ...

    Source: Walecki's construction, in Alspach, "The wonderful Walecki construction", 2008.
    """
    around = nodes - 1 - (nodes % 2 == 0)  # nodes on a circle; one hub, or two, stand outside
    zigzag = [(i + 1) // 2 if i % 2 else -(i // 2) for i in range(around)]
    found = []
    for turn in range(around // 2):
        path = [(place + turn) % around for place in zigzag]
        if nodes % 2 == 0:
            path.insert(around // 2, nodes - 2)
        found.append([*path, nodes - 1])
    name = {node: place for place, node in enumerate(found[0])}
    return tuple(tuple(name[node] for node in cycle) for cycle in found)


@functools.lru_cache(maxsize=64)
def _all_cycles(shape: tuple[int, ...], wrap: tuple[bool, ...]) -> tuple[Cycle, ...]:
    """As many cycles as are found, each checked."""
    rings, paths = _dimensions(shape, wrap)
    best: list[list[int]] = []
    grid = _Grid(tuple(map(len, rings)), tuple(map(len, paths)))
    for seed in range(_ATTEMPTS):
        found = _Switching(grid, random.Random(seed)).run()
        best = max(best, found, key=len)
        if len(best) == len(rings):
            break
    places = [
        tuple(sum(parts) for parts in zip(*chosen, strict=True))
        for chosen in itertools.product(*rings, *paths)
    ]
    cycles = tuple(tuple(places[node] for node in cycle) for cycle in best)
    _check(cycles, shape, wrap)
    return cycles


def _dimensions(
    shape: tuple[int, ...], wrap: tuple[bool, ...]
) -> tuple[list[Sequence[Coordinate]], list[Sequence[Coordinate]]]:
    """Splits the axes into rings and paths, given as the chips on them, other coordinates 0."""

    def along(axes: set[int]) -> Cycle:
        sizes = [size if axis in axes else 1 for axis, size in enumerate(shape)]
        return ring_order(sizes, [w and axis in axes for axis, w in enumerate(wrap)])

    wrapping = [axis for axis, size in enumerate(shape) if wrap[axis] and size > 2]
    rings: list[Sequence[Coordinate]] = [along({axis}) for axis in wrapping]
    rest = [axis for axis, size in enumerate(shape) if size > 1 and axis not in wrapping]
    if len(rest) > 1 and any(shape[axis] % 2 == 0 for axis in rest):
        return [*rings, along(set(rest))], []
    lines = [
        [tuple(i * (a == axis) for a in range(len(shape))) for i in range(shape[axis])]
        for axis in rest
    ]
    return rings, [*lines]


def _check(cycles: tuple[Cycle, ...], shape: tuple[int, ...], wrap: tuple[bool, ...]) -> None:
    links: set[frozenset[Coordinate]] = set()
    for cycle in cycles:
        assert len(set(cycle)) == math.prod(shape), "a ring misses a chip"
        assert set(hop_lengths(cycle, shape, wrap)) == {1}, "a hop is longer than a link"
        links |= {frozenset(link) for link in zip(cycle, (*cycle[1:], cycle[0]), strict=True)}
    assert len(links) == len(cycles) * math.prod(shape), "two rings share a link"


@dataclasses.dataclass(frozen=True)
class _Grid:
    """A product of rings and paths; nodes are counted in row-major order.

    Attributes:
      rings: Lengths of the rings.
      paths: Lengths of the paths.
    """

    rings: tuple[int, ...]
    paths: tuple[int, ...]

    @property
    def nodes(self) -> int:
        return math.prod((*self.rings, *self.paths))

    def onward(self) -> list[list[int]]:
        """By dimension and node: the next node along the dimension; -1 at the end of a path."""
        sizes = (*self.rings, *self.paths)
        strides = [math.prod(sizes[d + 1 :]) for d in range(len(sizes))]
        result: list[list[int]] = []
        for dimension, (size, stride) in enumerate(zip(sizes, strides, strict=True)):
            row: list[int] = []
            for node in range(self.nodes):
                last = node // stride % size == size - 1
                if last and dimension >= len(self.rings):
                    row.append(-1)
                else:
                    row.append(node - (size - 1) * stride if last else node + stride)
            result.append(row)
        return result


class _Switching:
    """One attempt at joining the rings of each set of links into one.

    Set number r holds at first the links along ring r; links along paths are spare.
    """

    def __init__(self, grid: _Grid, draw: random.Random) -> None:
        self.draw = draw
        self.onward = grid.onward()
        self.sets = range(len(grid.rings))
        self.owner = [[r] * grid.nodes for r in self.sets]
        self.owner += [[_SPARE] * grid.nodes for _ in grid.paths]
        self.linked: list[list[set[int]]] = []
        for row in self.onward[: len(grid.rings)]:
            linked: list[set[int]] = [set() for _ in row]
            for a, b in enumerate(row):
                linked[a].add(b)
                linked[b].add(a)
            self.linked.append(linked)
        self.rings: list[list[list[int]]] = [[] for _ in self.sets]
        self.ring_of = [[0] * grid.nodes for _ in self.sets]
        self.after = [[0] * grid.nodes for _ in self.sets]
        for r in self.sets:
            self._walk(r)

    def run(self) -> list[list[int]]:
        """The sets that have become one ring, all of them if the attempt succeeds."""
        squares = [
            (node, i, j)
            for i, j in itertools.combinations(range(len(self.onward)), 2)
            for node, (a, b) in enumerate(zip(self.onward[i], self.onward[j], strict=True))
            if a >= 0 and b >= 0
        ]
        idle = 0
        while idle < _IDLE_SWITCHES and any(len(rings) > 1 for rings in self.rings):
            self.draw.shuffle(squares)
            before = idle
            for node, i, j in squares:
                gained = self._gain(node, i, j)
                if gained is None or gained > 0:
                    continue
                idle = 0 if gained < 0 else idle + 1
                self._switch(node, i, j)
                if all(len(rings) == 1 for rings in self.rings):
                    break
            if idle == before:
                break
        return [rings[0] for rings in self.rings if len(rings) == 1]

    def _gain(self, node: int, i: int, j: int) -> int | None:
        """How many rings more a switch makes; None if it cannot be made."""
        right, up = self.onward[i][node], self.onward[j][node]
        across = self.onward[i][up]
        a, b = self.owner[i][node], self.owner[j][node]
        if a == b or a != self.owner[i][up] or b != self.owner[j][right]:
            return None
        return self._change(a, (node, right), (up, across)) + self._change(
            b, (node, up), (right, across)
        )

    def _change(self, r: int, one: tuple[int, int], other: tuple[int, int]) -> int:
        """Rings more in a set that gives two opposite links for the links across."""
        if r == _SPARE:
            return 0
        if self.ring_of[r][one[0]] != self.ring_of[r][other[0]]:
            return -1
        same_way = (self.after[r][one[0]] == one[1]) == (self.after[r][other[0]] == other[1])
        return 0 if same_way else 1

    def _switch(self, node: int, i: int, j: int) -> None:
        right, up = self.onward[i][node], self.onward[j][node]
        across = self.onward[i][up]
        a, b = self.owner[i][node], self.owner[j][node]
        self.owner[i][node] = self.owner[i][up] = b
        self.owner[j][node] = self.owner[j][right] = a
        sides, ends = ((node, right), (up, across)), ((node, up), (right, across))
        for r, gives, takes in ((a, sides, ends), (b, ends, sides)):
            if r == _SPARE:
                continue
            for x, y in gives:
                self.linked[r][x].discard(y)
                self.linked[r][y].discard(x)
            for x, y in takes:
                self.linked[r][x].add(y)
                self.linked[r][y].add(x)
            self._walk(r)

    def _walk(self, r: int) -> None:
        """Lists the rings of a set anew."""
        linked, after, ring_of = self.linked[r], self.after[r], self.ring_of[r]
        self.rings[r] = []
        seen = [False] * len(linked)
        for start in range(len(linked)):
            if seen[start]:
                continue
            ring, node, came_from = [], start, -1
            while not seen[node]:
                seen[node] = True
                ring.append(node)
                ring_of[node] = len(self.rings[r])
                ways = linked[node]
                onward = max(ways) if came_from < 0 else next(w for w in ways if w != came_from)
                after[node] = onward
                came_from, node = node, onward
            self.rings[r].append(ring)
