"""Gathers and sums of shards over a whole torus of chips, by all of its links.

Mesh axes follow a ring through the torus (`farspan.dist.placement`). The TPU compiler gathers along
all axes of a torus at once, but only over devices in row-major order of their coordinates, with the
axes in any order; over devices in the order of a ring it moves twice the bytes, as an all-reduce of
the whole. So each shard first goes to the device whose place in row-major order is that of the
shard in the mesh. A sum over a whole 3D torus is an all-reduce in any order of the devices; cut in
two, over square planes and then over lines, it is scattered. Then shards go home. Of the orders of
the axes the one is taken in which fewest of the shards on their way meet on a link.

Found with libtpu 0.0.50 for v4, v5p, v5e, v6e and TPU7x.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence

from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Inexact

from farspan.dist.placement import ring_groups, ring_tori, shared_block
from farspan.dist.torus import Coordinate, link_bytes

Groups = tuple[tuple[int, ...], ...]
"""Indices along the mesh axes of a split, in groups."""

_SUMS_IN_ONE = ("TPU7x", "TPU v7x")
"""Devices for which the compiler scatters a sum over a whole torus as it stands."""


@dataclasses.dataclass(frozen=True)
class Route:
    """How shards go over a torus. Static. Devices are named by their index along the mesh axes.

    Attributes:
      order: Devices in row-major order of the torus, in which shards are gathered.
      stages: Groups in which sums are scattered, one stage after the other; empty for one sum over
        all devices in the order of the mesh.
    """

    order: tuple[int, ...]
    stages: tuple[Groups, ...] = ()

    @property
    def scattered(self) -> tuple[int, ...]:
        """The shard that each device holds after all stages."""
        held = [0] * len(self.order)
        for stage in self.stages:
            for group in stage:
                for place, device in enumerate(group):
                    held[device] = held[device] * len(group) + place
        return tuple(held)


def gather_shards(
    shard: Array, mesh: Mesh, names: Sequence[str], axis: int, route: Route | None = None
) -> Array:
    """Inside shard_map: all shards along some mesh axes, side by side.

    Args:
      shard: This device's.
      mesh: The mesh.
      names: Mesh axes of the split, outermost first.
      axis: The dimension that is split.
      route: How they go; by default what `find_route` finds.

    Returns:
      As `lax.all_gather(shard, names, axis=axis, tiled=True)`.
    """
    names = tuple(names)
    route = route or find_route(mesh, names)
    if route is None:
        return lax.all_gather(shard, names, axis=axis, tiled=True)
    away = tuple(enumerate(route.order))
    return lax.all_gather(
        _send(shard, names, away), names, axis=axis, tiled=True, axis_index_groups=[route.order]
    )


def scatter_sum(
    x: Inexact[Array, ...],
    mesh: Mesh,
    names: Sequence[str],
    axis: int,
    route: Route | None = None,
) -> Array:
    """Inside shard_map: this device's shard of a sum over some mesh axes.

    Args:
      x: This device's summand, whole.
      mesh: The mesh.
      names: Mesh axes of the split, outermost first.
      axis: The dimension to split.
      route: As in `gather_shards`.

    Returns:
      As `lax.psum_scatter(x, names, scatter_dimension=axis, tiled=True)`.
    """
    names = tuple(names)
    route = route or find_route(mesh, names)
    if route is None or not route.stages:
        return lax.psum_scatter(x, names, scatter_dimension=axis, tiled=True)
    for stage in route.stages:
        x = lax.psum_scatter(x, names, scatter_dimension=axis, tiled=True, axis_index_groups=stage)
    return _send(x, names, tuple(enumerate(route.scattered)))


@functools.lru_cache(maxsize=64)
def find_route(mesh: Mesh, names: tuple[str, ...]) -> Route | None:
    """The route over some mesh axes; None where they fill no torus of one TPU slice."""
    groups = ring_groups(mesh, names)
    tori = ring_tori(groups)
    if tori is None or groups.shape[1] < 3:
        return None
    shared = shared_block(groups, tori)
    if shared is None:
        return None
    block, found = shared
    sides = tuple(max(side) + 1 for side in zip(*block, strict=True))
    whole = [
        size == 1 or (size == side and (wraps or size == 2))
        for size, side, wraps in zip(sides, found.shape, found.wrap, strict=False)
    ]
    if not all(whole):
        return None
    core = len(found.shape)
    orders = [(*axes, core) for axes in itertools.permutations(range(core))]

    def crowding(axes: tuple[int, ...], direction: int) -> int:
        """Shards on the fullest link on their way to row-major order (1) or home (-1)."""
        ordered = _along(block, axes)[0]
        ways = [(block[a][:core], block[b][:core])[::direction] for a, b in enumerate(ordered)]
        carried = link_bytes(((a, b, 1) for a, b in ways), found.shape, found.wrap)
        return max(carried.values(), default=0)

    order = _along(block, min(orders, key=lambda axes: crowding(axes, 1)))[0]
    squares = [axes for axes in orders if sides[axes[0]] == sides[axes[1]]]
    in_one = groups[0, 0].device_kind in _SUMS_IN_ONE
    if in_one or core < 3 or not (all(found.wrap) and squares):
        return Route(order)
    best = min(squares, key=lambda axes: (-sides[axes[0]], crowding(axes, -1)))
    stages = [best[:2], *((axis,) for axis in best[2:] if sides[axis] > 1)]
    return Route(order, tuple(_along(block, axes) for axes in stages))


def _along(block: Sequence[Coordinate], axes: tuple[int, ...]) -> Groups:
    """Groups of devices that differ along these axes only, in row-major order of them."""
    groups: dict[Coordinate, list[int]] = {}
    for device in sorted(range(len(block)), key=lambda d: [block[d][axis] for axis in axes]):
        rest = tuple(x for axis, x in enumerate(block[device]) if axis not in axes)
        groups.setdefault(rest, []).append(device)
    return tuple(tuple(group) for group in groups.values())


def _send(x: Array, names: tuple[str, ...], pairs: tuple[tuple[int, int], ...]) -> Array:
    return x if all(a == b for a, b in pairs) else lax.ppermute(x, names, pairs)
