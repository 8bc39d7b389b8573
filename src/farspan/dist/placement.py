"""Which chip stands where in a mesh, so that ring neighbours are linked.

The rule of `order_devices`. A slice is a box of chips. Each mesh axis gets a factor of each side of
the box, so that the factors along a side multiply to its length; the two cores of a chip count as a
side of length 2 with hops of no length. Along one side the mesh axes are nested, ring axes
innermost, so a ring fills a block of neighbours, and `data`, `pipe` and `fsdp` outermost, so that
they carve the slice in blocks. Of all such ways the one is taken with

1. the fewest hops of `cp_ring`, then of `cp_ring_outer`, longer than one link,
2. `tensor`, then `cp_ulysses` groups of the nearest devices,
3. the most sides of the ring's block whole, whose wrap links give more rings,
4. the fewest links crossed by rings over `cp_ring`, `cp_ring_outer`, `pipe`, `fsdp`, `data`, in
   this order.

Devices of several slices are first split over the outermost axes that divide. A mesh of fewer
devices than there are takes a box at the corner of the slice. Where sizes do not factor along the
sides, devices follow one ring over the slice in the order of the mesh; where devices have no
coordinates, or are not a box, they keep their order.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh
from numpy.typing import NDArray

from farspan.dist.torus import (
    Coordinate,
    Link,
    hop_length,
    hop_lengths,
    link_bytes,
    ring_order,
    wrapped_axes,
)

_INNERMOST_FIRST: tuple[str, ...] = (
    "cp_ring",
    "cp_ring_outer",
    "tensor",
    "cp_ulysses",
    "fsdp",
    "pipe",
    "data",
)
"""Mesh axes as they are nested along one side of a slice."""


@dataclasses.dataclass(frozen=True)
class Torus:
    """A box of linked chips.

    Attributes:
      shape: Chips along each axis.
      wrap: Whether each axis wraps.
      cores: JAX devices per chip.
      origin: Coordinates of its first chip, as devices report them.
    """

    shape: Coordinate
    wrap: tuple[bool, ...]
    cores: int
    origin: Coordinate

    def chip(self, device: Any) -> Coordinate:
        """The chip of a device."""
        return tuple(x - o for x, o in zip(device.coords, self.origin, strict=True))


def find_torus(devices: Sequence[Any]) -> Torus | None:
    """The slice that devices belong to; None if they are not chips of one TPU slice.

    Its shape is that of all devices of their client: a part of a slice does not wrap.
    """
    if not all(_is_chip(device) for device in devices):
        return None
    client = getattr(devices[0], "client", None)
    everything = devices if client is None else client.devices()
    named = {_slice_index(d) for d in devices}
    if len(named) != 1:
        return None
    everything = [d for d in everything if _slice_index(d) in named]
    places = np.array([d.coords for d in everything])
    origin = tuple(int(x) for x in places.min(0))
    shape = tuple(int(x) for x in places.max(0) - places.min(0) + 1)
    cores = max(Counter(tuple(d.coords) for d in everything).values())
    return Torus(shape, wrapped_axes(devices[0].device_kind, shape), cores, origin)


def order_devices(devices: Sequence[Any], sizes: Mapping[str, int]) -> list[Any]:
    """Orders devices for a mesh, so that ring neighbours are linked. See the module's docstring.

    Args:
      devices: JAX devices, at least as many as the product of `sizes`.
      sizes: Size of each mesh axis of `AXES`, in that order.

    Returns:
      As many devices as the mesh has, in row-major order of its axes.
    """
    needed = math.prod(sizes.values())
    by_slice: dict[Any, list[Any]] = {}
    for device in devices:
        by_slice.setdefault(_slice_index(device), []).append(device)
    if len(by_slice) > 1:
        return _order_slices(list(by_slice.values()), sizes) or list(devices[:needed])
    return _order_slice(list(devices), sizes)


def ring_hops(mesh: Mesh, axes: Sequence[str] = ("cp_ring",)) -> dict[int, int]:
    """Counts the hops of all rings along some mesh axes by the links that they cross.

    Args:
      mesh: The mesh.
      axes: Mesh axes that make one ring, outermost first.

    Returns:
      Hops by length in links, shortest first; 0 is from core to core on a chip. Rings of one
      device, over several slices, or of other devices than TPU chips count as nothing.
    """
    groups = ring_groups(mesh, axes)
    tori = ring_tori(groups)
    if tori is None or groups.shape[1] == 1:
        return {}
    counts = Counter(
        hop_length(found.chip(a), found.chip(b), found.shape, found.wrap)
        for ring, found in zip(groups, tori, strict=True)
        if found is not None
        for a, b in zip(ring, np.roll(ring, -1), strict=True)
    )
    return dict(sorted(counts.items()))


def mesh_link_bytes(
    mesh: Mesh, axes: Sequence[str], sends: Iterable[tuple[Sequence[tuple[int, int]], int]]
) -> Counter[Link]:
    """Counts the bytes on each direction of each link of a slice while permutes run at once.

    Args:
      mesh: A mesh of one TPU slice.
      axes: Mesh axes of the permutes, outermost first.
      sends: Of each permute its pairs (source, target), as `lax.ppermute` takes them over `axes`,
        and the bytes that each device sends.

    Returns:
      Bytes by link (`farspan.dist.link_bytes`), all groups of devices together.

    Raises:
      ValueError: If the devices are no TPU slice.
    """
    groups = ring_groups(mesh, axes)
    found = find_torus(list(groups.flat))
    if found is None:
        raise ValueError(
            "mesh_link_bytes: the devices must be chips of one TPU slice, got "
            f"{groups.flat[0].platform}; use a mesh of TPU devices"
        )
    transfers = (
        (found.chip(ring[source]), found.chip(ring[target]), size_bytes)
        for pairs, size_bytes in sends
        for ring in groups
        for source, target in pairs
    )
    return link_bytes(transfers, found.shape, found.wrap)


def ring_groups(mesh: Mesh, axes: Sequence[str]) -> NDArray[Any]:
    """Devices of all rings along some mesh axes: objects `[rings, devices of a ring]`."""
    places = [mesh.axis_names.index(axis) for axis in axes if axis in mesh.shape]
    last = range(mesh.devices.ndim - len(places), mesh.devices.ndim)
    moved = np.moveaxis(mesh.devices, places, list(last))
    degree = math.prod(mesh.devices.shape[place] for place in places)
    return moved.reshape(-1, degree)


def ring_tori(groups: NDArray[Any]) -> list[Torus | None] | None:
    """The slice in which each ring of `ring_groups` lies.

    Returns:
      One entry a ring, None for one that spans slices; None if devices are not TPU chips.
    """
    if not all(_is_chip(device) for device in groups.flat):
        return None
    by_slice: dict[Any, list[Any]] = {}
    for device in groups.flat:
        by_slice.setdefault(_slice_index(device), []).append(device)
    found = {index: find_torus(devices) for index, devices in by_slice.items()}
    return [
        found[_slice_index(ring[0])] if len({_slice_index(d) for d in ring}) == 1 else None
        for ring in groups
    ]


def shared_block(
    groups: NDArray[Any], tori: Sequence[Torus | None]
) -> tuple[tuple[Coordinate, ...], Torus] | None:
    """Where the devices of each ring stand in the block of chips that they fill.

    Args:
      groups: From `ring_groups`.
      tori: From `ring_tori`.

    Returns:
      Chip, counted from the block's corner, and core of each device, and the slice; None if a ring
      fills no block, or two fill blocks in different ways.
    """
    blocks = {
        None if found is None else _block(list(ring), found)
        for ring, found in zip(groups, tori, strict=True)
    }
    block, found = blocks.pop(), tori[0]
    return None if blocks or block is None or found is None else (block, found)


def _block(ring: list[Any], found: Torus) -> tuple[Coordinate, ...] | None:
    on_chip: dict[Coordinate, list[Any]] = {}
    for device in ring:
        on_chip.setdefault(found.chip(device), []).append(device)
    corner, end = (tuple(pick(x) for x in zip(*on_chip, strict=True)) for pick in (min, max))
    chips = math.prod(b - a + 1 for a, b in zip(corner, end, strict=True))
    if chips != len(on_chip) or len({len(cores) for cores in on_chip.values()}) > 1:
        return None
    for cores in on_chip.values():
        cores.sort(key=lambda device: device.core_on_chip)
    return tuple(
        (
            *(x - c for x, c in zip(found.chip(device), corner, strict=True)),
            on_chip[found.chip(device)].index(device),
        )
        for device in ring
    )


def _is_chip(device: Any) -> bool:
    return device.platform == "tpu" and hasattr(device, "coords")


def _slice_index(device: Any) -> Any:
    return getattr(device, "slice_index", None)


def _order_slices(parts: list[list[Any]], sizes: Mapping[str, int]) -> list[Any] | None:
    """Orders devices of several slices; None if they cannot be split evenly over mesh axes."""
    slices = len(parts)
    outer: dict[str, int] = {}
    for axis, size in sizes.items():
        outer[axis] = math.gcd(size, slices)
        slices //= outer[axis]
    inner = {axis: size // outer[axis] for axis, size in sizes.items()}
    if slices > 1 or any(len(part) < math.prod(inner.values()) for part in parts):
        return None
    grid = np.array([_order_slice(part, inner) for part in parts], dtype=object)
    # Each mesh axis is its part over slices and its part inside one, side by side.
    sides = np.arange(2 * len(sizes)).reshape(2, -1).T.reshape(-1)
    grid = grid.reshape(*outer.values(), *inner.values()).transpose(sides)
    return list(grid.reshape(-1))


def _order_slice(devices: list[Any], sizes: Mapping[str, int]) -> list[Any]:
    needed = math.prod(sizes.values())
    found = find_torus(devices)
    if found is None:
        return devices[:needed]
    on_chip: dict[Coordinate, list[Any]] = {}
    for device in sorted(devices, key=lambda d: (d.core_on_chip, d.id)):
        on_chip.setdefault(found.chip(device), []).append(device)
    whole = math.prod(found.shape) == len(on_chip)
    if not whole or any(len(cores) != found.cores for cores in on_chip.values()):
        return devices[:needed]
    if places := _arrange(found, tuple(sizes.items())):
        return [on_chip[place[:-1]][place[-1]] for place in places]
    ring = ring_order(found.shape, found.wrap)
    return [core for chip in ring for core in on_chip[chip]][:needed]


@dataclasses.dataclass(frozen=True)
class _Level:
    """How one mesh axis lies on the sides of a box (the last: the cores of a chip).

    Attributes:
      sizes: Its factor of each side.
      strides: Chips from one of its places to the next.
    """

    sizes: Coordinate
    strides: Coordinate

    def places(self, found: Torus) -> list[Coordinate]:
        """Its devices in order, a ring where one can be had, all cores of a chip in turn."""
        *chips, cores = self.sizes
        wrap = [
            wraps and size * stride == side
            for wraps, size, stride, side in zip(
                found.wrap, self.sizes, self.strides, found.shape, strict=False
            )
        ]
        return [
            tuple(x * stride for x, stride in zip((*chip, core), self.strides, strict=True))
            for chip in ring_order(chips, wrap)
            for core in range(cores)
        ]


@functools.lru_cache(maxsize=64)
def _arrange(found: Torus, sizes: tuple[tuple[str, int], ...]) -> tuple[Coordinate, ...] | None:
    """Places (chip and core) in row-major order of the mesh axes; None if sizes do not factor."""
    named = dict(sizes)
    levels = [named[axis] for axis in _INNERMOST_FIRST]
    sides = (*found.shape, found.cores)
    boxes = _factors(math.prod(levels), sides, dividing=False)
    candidates = (found_levels for box in boxes for found_levels in _nest(levels, box))
    best = min(candidates, key=lambda chosen: _cost(found, chosen), default=None)
    if best is None:
        return None
    by_axis = dict(zip(_INNERMOST_FIRST, best, strict=True))
    places = (by_axis[axis].places(found) for axis in named)
    return tuple(
        tuple(sum(parts) for parts in zip(*chosen, strict=True))
        for chosen in itertools.product(*places)
    )


def _factors(product: int, sides: Coordinate, *, dividing: bool) -> Iterator[Coordinate]:
    """All ways to write `product` with one factor a side, none longer than its side.

    Args:
      product: What the factors multiply to.
      sides: Lengths of the sides.
      dividing: Whether each factor must divide its side.
    """
    if not sides:
        if product == 1:
            yield ()
        return
    for factor in range(min(product, sides[0]), 0, -1):
        if product % factor == 0 and not (dividing and sides[0] % factor):
            for rest in _factors(product // factor, sides[1:], dividing=dividing):
                yield (factor, *rest)


def _nest(
    sizes: Sequence[int], sides: Coordinate, strides: Coordinate | None = None
) -> Iterator[tuple[_Level, ...]]:
    """All ways to fill a box with mesh axes of these sizes, innermost first."""
    strides = strides or (1,) * len(sides)
    if not sizes:
        yield ()
        return
    for factors in _factors(sizes[0], sides, dividing=True):
        left = tuple(side // factor for side, factor in zip(sides, factors, strict=True))
        onward = tuple(s * factor for s, factor in zip(strides, factors, strict=True))
        for rest in _nest(sizes[1:], left, onward):
            yield (_Level(factors, strides), *rest)


def _cost(found: Torus, levels: tuple[_Level, ...]) -> tuple[int, ...]:
    """What `order_devices` makes least, the weightiest first."""
    ring, outer, tensor, ulysses, fsdp, pipe, data = levels
    long, links = _ring_links(found, ring)
    outer_long, outer_links = _ring_links(found, outer)
    whole = sum(
        wraps and size == side
        for wraps, size, side in zip(found.wrap, ring.sizes, found.shape, strict=False)
    )
    near = [_ring_links(found, level)[1] for level in (pipe, fsdp, data)]
    spread = (_spread(found, tensor), _spread(found, ulysses))
    return long, outer_long, *spread, -whole, links, outer_links, *near


@functools.lru_cache(maxsize=4096)
def _ring_links(found: Torus, level: _Level) -> tuple[int, int]:
    """Links that the hops of a ring cross: those beyond the first of each hop, and all."""
    chips = [place[:-1] for place in level.places(found)]
    hops = hop_lengths(chips, found.shape, found.wrap)
    return sum(max(0, n - 1) * count for n, count in hops.items()), sum(
        n * count for n, count in hops.items()
    )


@functools.lru_cache(maxsize=4096)
def _spread(found: Torus, level: _Level) -> int:
    """Links between the devices of a group, summed over all pairs."""
    group = math.prod(level.sizes)
    total = 0
    for axis, side in enumerate(found.shape):
        size, stride = level.sizes[axis], level.strides[axis]
        line = [(place * stride,) for place in range(size)]
        pairs = itertools.product(line, line)
        between = sum(hop_length(a, b, (side,), (found.wrap[axis],)) for a, b in pairs)
        total += between * (group // size) ** 2
    return total
