"""Devices: the mesh, and where arrays lie on it."""

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

__all__ = [
    "AXES",
    "BATCH_AXES",
    "CONTEXT_AXES",
    "PARAMETER_AXES",
    "ContextSizes",
    "axis_product",
    "ensure_devices",
    "make_mesh",
    "present",
]
