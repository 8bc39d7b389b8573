"""The only mesh constructor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypedDict

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from farspan.dist.placement import order_devices
from farspan.platform import skip_absent_tpu

AXES = ("data", "pipe", "fsdp", "cp_ring_outer", "cp_ring", "cp_ulysses", "tensor")
"""Mesh axes, outermost first."""

BATCH_AXES = ("data", "fsdp")
"""Axes over which rows are split."""

CONTEXT_AXES = ("cp_ring_outer", "cp_ring", "cp_ulysses")
"""Axes over which a row is split; shard order is (outer ring, ring, ulysses)."""

PARAMETER_AXES = ("data", "fsdp", *CONTEXT_AXES)
"""Axes over which parameters, gradients and optimizer state are split together."""


class ContextSizes(TypedDict, total=False):
    """Sizes of the axes that split a row, as `make_mesh` takes them."""

    cp_ring_outer: int
    cp_ring: int
    cp_ulysses: int


def make_mesh(
    *,
    data: int = 1,
    pipe: int = 1,
    fsdp: int = 1,
    cp_ring_outer: int = 1,
    cp_ring: int = 1,
    cp_ulysses: int = 1,
    tensor: int = 1,
    devices: Sequence[Any] | None = None,
) -> Mesh:
    """Makes a device mesh with Farspan's axes.

    Args:
      data: Replicas of the batch.
      pipe: Pipeline stages.
      fsdp: Shards of batch and parameters.
      cp_ring_outer: Shards of the sequence in a ring over slow links, around the following.
      cp_ring: Shards of the sequence in a ring.
      cp_ulysses: Shards of the sequence that exchange heads, innermost.
      tensor: Shards of heads and feed-forward width.
      devices: JAX devices to use, in order; by default those of `jax.devices()`, on TPU in an
        order in which ring neighbours are linked (`farspan.dist.placement`).

    Returns:
      A mesh with all axes of `AXES`, with automatic sharding on each.

    Raises:
      ValueError: If a size is below 1 or there are too few devices.
    """
    sizes = (data, pipe, fsdp, cp_ring_outer, cp_ring, cp_ulysses, tensor)
    named = ", ".join(f"{axis}={size}" for axis, size in zip(AXES, sizes, strict=True) if size != 1)
    if min(sizes) < 1:
        raise ValueError(f"make_mesh: every axis size must be at least 1, got {named}")
    if devices is None:
        skip_absent_tpu()
    available = list(jax.devices() if devices is None else devices)
    needed = math.prod(sizes)
    if needed > len(available):
        remedy = (
            "use smaller sizes, or on CPU make virtual devices before JAX starts with "
            f'jax.config.update("jax_num_cpu_devices", {needed})'
        )
        raise ValueError(
            f"make_mesh: the product of the axis sizes must not exceed the devices, got {named} = "
            f"{needed} with {len(available)} {available[0].platform} device(s); {remedy}"
        )
    chosen = available[:needed]
    if devices is None:
        chosen = order_devices(available, dict(zip(AXES, sizes, strict=True)))
    grid = np.array(chosen, dtype=object).reshape(sizes)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def axis_product(mesh: Mesh, axes: Sequence[str]) -> int:
    """Devices along some axes together; an axis that the mesh lacks counts 1."""
    return math.prod(mesh.shape.get(axis, 1) for axis in axes)


def present(mesh: Mesh, axes: Sequence[str]) -> tuple[str, ...]:
    """Those of `axes` that the mesh has."""
    return tuple(axis for axis in axes if axis in mesh.shape)
