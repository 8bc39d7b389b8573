"""Where parameters lie: one small table."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from farspan.dist.mesh import PARAMETER_AXES, axis_product, present

RULES: dict[str, tuple[str, ...]] = {
    "vocab": (),
    "model": PARAMETER_AXES,
    "heads": (),
    "head": (),
    "ffn": (),
    "norm": (),
    "layer": (),
}
"""Logical axis to mesh axes. Parameters split over batch and context axes together."""


def parameter_spec(shape: tuple[int, ...], axes: tuple[str, ...], mesh: Mesh) -> PartitionSpec:
    """Partitioning of one parameter.

    Args:
      shape: Its shape.
      axes: Its logical axes, one per dimension.
      mesh: The mesh.

    Returns:
      The partitioning that `RULES` gives. A dimension that the devices do not divide is split over
      as many of the trailing mesh axes as do divide it.
    """
    spec: list[tuple[str, ...] | None] = []
    for size, axis in zip(shape, axes, strict=True):
        names = tuple(n for n in present(mesh, RULES[axis]) if mesh.shape[n] > 1)
        while names and size % axis_product(mesh, names):
            names = names[1:]
        spec.append(names or None)
    return PartitionSpec(*spec)


def parameter_shardings(params: Any, axes: Any, mesh: Mesh) -> Any:
    """Shardings of a tree of parameters (arrays or shapes), given the tree of their axes."""
    return jax.tree.map(
        lambda x, names: NamedSharding(mesh, parameter_spec(x.shape, names, mesh)), params, axes
    )
