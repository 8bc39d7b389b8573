"""Several rings at once: a visitor is cut into streams, and each goes round in an order of its own.

A chip of a 3D torus has six links, and a plain ring uses one of them. Stream 0 goes round one ring
of links, stream 1 the same ring the other way, which is the other direction of the same links;
streams 2 and 3 another ring that shares no link with the first, streams 4 and 5 a third.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh
from numpy.typing import NDArray

from farspan.dist.cycles import complete_cycles, hamiltonian_cycles
from farspan.dist.placement import Torus, ring_groups, ring_tori, shared_block
from farspan.dist.torus import Coordinate

Order = tuple[int, ...]
"""Every index along a ring's axes once; each device sends to the next, the last to the first."""


@dataclasses.dataclass(frozen=True)
class Streams:
    """The orders in which the parts of a visitor go round. Static and hashable.

    Attributes:
      orders: One for each stream.
    """

    orders: tuple[Order, ...]

    def __post_init__(self) -> None:
        for order in self.orders:
            if sorted(order) != list(range(self.degree)):
                raise ValueError(
                    "Streams: each order must hold every index of the ring once, got "
                    f"{order} in a ring of {self.degree}; make them with ring_cycles(mesh, count)"
                )

    @property
    def count(self) -> int:
        """Streams."""
        return len(self.orders)

    @property
    def degree(self) -> int:
        """Devices of the ring."""
        return len(self.orders[0])

    def pairs(self, stream: int, distance: int = 1) -> tuple[tuple[int, int], ...]:
        """What `lax.ppermute` takes: (source, target) for a move along the stream.

        Args:
          stream: The stream.
          distance: Places to move by; negative ones go home.
        """
        order = self.orders[stream]
        return tuple(
            (source, order[(place + distance) % self.degree]) for place, source in enumerate(order)
        )

    def visitor(self, stream: int, step: int) -> NDArray[np.int32]:
        """Says whose shard visits each device after `step` moves, int32 `[degree]`."""
        order = np.array(self.orders[stream], np.int32)
        visitors = np.empty_like(order)
        visitors[order] = np.roll(order, step)
        return visitors


def ring_cycles(mesh: Mesh, count: int, axes: Sequence[str] = ("cp_ring",)) -> Streams:
    """Chooses the orders of a ring's streams.

    One or two streams are the ring of the mesh, and the same the other way. More are rings of links
    that share none (`hamiltonian_cycles`), where the devices are TPU chips; the cores of a chip
    follow each other in every stream. Other devices count as linked each with each, so any orders
    in which no two devices are neighbours twice will do (`complete_cycles`).

    Args:
      mesh: The mesh.
      count: Streams wanted.
      axes: Mesh axes that make one ring, outermost first.

    Returns:
      The streams, in indices along `axes`.

    Raises:
      ValueError: If there are not as many rings.
    """
    groups = ring_groups(mesh, axes)
    orders = _orders(groups, count)
    if not 1 <= count <= len(orders):
        raise ValueError(
            f"ring_cycles: streams must be 1 to two for each ring that shares no link, got "
            f"{count} with {len(orders) // 2} of them over {groups.shape[1]} devices; use "
            f"{len(orders)} streams or fewer"
        )
    return Streams(orders[:count])


def most_streams(mesh: Mesh, axes: Sequence[str] = ("cp_ring",)) -> int:
    """Streams that each have a direction of a link to themselves; 1 in a ring of two devices."""
    groups = ring_groups(mesh, axes)
    return len(_orders(groups, count=None)) if groups.shape[1] > 2 else 1


def _orders(groups: NDArray[Any], count: int | None) -> tuple[Order, ...]:
    """Both ways round each ring, for `count` streams at least if they can be had; None: for all."""
    degree = groups.shape[1]
    cycles: tuple[Order, ...] = (tuple(range(degree)),)
    if degree > 2 and (count is None or count > 2):
        tori = ring_tori(groups)
        cycles = complete_cycles(degree) if tori is None else _linked(groups, tori) or cycles
    return tuple(order for cycle in cycles for order in (cycle, (cycle[0], *cycle[:0:-1])))


def _linked(groups: NDArray[Any], tori: Sequence[Torus | None]) -> tuple[Order, ...]:
    """Rings of links in the block of chips that each group fills; none where blocks differ."""
    shared = shared_block(groups, tori)
    if shared is None:
        return ()
    block, found = shared
    on_chip: dict[Coordinate, list[int]] = {}
    for place, (*chip, _) in enumerate(block):
        on_chip.setdefault(tuple(chip), []).append(place)
    shape = tuple(max(side) + 1 for side in zip(*on_chip, strict=True))
    wrap = [w and a == b for w, a, b in zip(found.wrap, shape, found.shape, strict=True)]
    return tuple(
        tuple(place for chip in cycle for place in on_chip[chip])
        for cycle in hamiltonian_cycles(shape, wrap, len(shape))
    )
