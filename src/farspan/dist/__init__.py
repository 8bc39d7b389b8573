"""Devices: the mesh, and where arrays lie on it."""

from farspan.dist.cycles import complete_cycles, hamiltonian_cycles
from farspan.dist.devices import ensure_devices
from farspan.dist.mesh import (
    AXES,
    BATCH_AXES,
    CONTEXT_AXES,
    PARAMETER_AXES,
    ContextSizes,
    axis_product,
    make_mesh,
    present,
)
from farspan.dist.placement import Torus, find_torus, mesh_link_bytes, order_devices, ring_hops
from farspan.dist.routes import Route, find_route, gather_shards, scatter_sum
from farspan.dist.streams import Streams, most_streams, ring_cycles
from farspan.dist.torus import (
    Coordinate,
    hop_length,
    hop_lengths,
    link_bytes,
    ring_order,
    wrapped_axes,
)

__all__ = [
    "AXES",
    "BATCH_AXES",
    "CONTEXT_AXES",
    "PARAMETER_AXES",
    "ContextSizes",
    "Coordinate",
    "Route",
    "Streams",
    "Torus",
    "axis_product",
    "complete_cycles",
    "ensure_devices",
    "find_route",
    "find_torus",
    "gather_shards",
    "hamiltonian_cycles",
    "hop_length",
    "hop_lengths",
    "link_bytes",
    "make_mesh",
    "mesh_link_bytes",
    "most_streams",
    "order_devices",
    "present",
    "ring_cycles",
    "ring_hops",
    "ring_order",
    "scatter_sum",
    "wrapped_axes",
]
