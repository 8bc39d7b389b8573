"""What one training step works on: all that its cost depends on, without a device."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from numpy.typing import NDArray

from farspan import schedules
from farspan.context import ContextParallel
from farspan.masks import Mask
from farspan.models import DecoderConfig


@dataclasses.dataclass(frozen=True)
class AttentionLayers:
    """Layers that attend alike.

    Attributes:
      mask: Which keys a query sees, within its document.
      context: How keys and values meet queries.
      count: Number of such layers.
    """

    mask: Mask
    context: ContextParallel
    count: int


@dataclasses.dataclass(frozen=True)
class UpdateCost:
    """What the update of one parameter costs one device, beside work on single elements.

    Attributes:
      flops: Of matrix products.
      collectives: What it takes part in.
    """

    flops: int = 0
    collectives: tuple[schedules.Collective, ...] = ()


@dataclasses.dataclass(frozen=True)
class Workload:
    """One training step.

    Attributes:
      model: The decoder.
      context: The mesh (of `NoDevice`s, if need be), and how rows are split over it.
      attention: Its layers by how they attend; the counts add up to the model's layers.
      seq_len: Tokens in a row as it lies on the devices.
      rows: Rows in one optimizer step, over all devices.
      accumulation: Parts into which the rows are cut, computed one after another.
      kept_dtypes: Types of the arrays that are kept for each parameter and have its shape (moments
        of the optimizer, a running mean), given the names of its axes.
      update_cost: What the optimizer's update of a parameter costs, given its shape, the names of
        its axes, and over how many devices each axis is split.
      document_tokens: Length of each document of a row, the last one cut short; 0: one document a
        row.

    Raises:
      ValueError: If the rows of a part cannot be shared out evenly.
    """

    model: DecoderConfig
    context: ContextParallel
    attention: tuple[AttentionLayers, ...]
    seq_len: int
    rows: int
    accumulation: int = 1
    kept_dtypes: Callable[[tuple[str, ...]], tuple[str, ...]] = lambda _: ("float32",) * 2
    update_cost: Callable[[tuple[int, ...], tuple[str, ...], tuple[int, ...]], UpdateCost] = (
        lambda *_: UpdateCost()
    )
    document_tokens: int = 0

    def __post_init__(self) -> None:
        groups = self.context.batch_shards * self.accumulation
        if self.rows % groups:
            raise ValueError(
                "rows must be a multiple of the groups that read rows times the parts of gradient "
                f"accumulation, got {self.rows} rows, {self.context.batch_shards} groups and "
                f"{self.accumulation} parts; use {-(-self.rows // groups) * groups} rows"
            )
        if self.document_tokens < 0:
            raise ValueError(f"document_tokens must be at least 0, got {self.document_tokens}")

    @property
    def num_devices(self) -> int:
        """Devices of the mesh."""
        return math.prod(self.context.mesh.shape.values())

    @property
    def part_rows(self) -> int:
        """Rows of one part on one group of devices."""
        return self.rows // self.accumulation // self.context.batch_shards

    @property
    def part_tokens(self) -> int:
        """Token slots of one part on one device."""
        return self.part_rows * (self.seq_len // self.context.degrees.total)

    @property
    def itemsize(self) -> int:
        """Bytes of an element of an activation."""
        return jnp.dtype(self.model.dtype).itemsize

    def segment_ids(self) -> NDArray[np.int32]:
        """Document of each token of one row, int32 `[S]`."""
        length = self.document_tokens or self.seq_len
        return (np.arange(self.seq_len) // length + 1).astype(np.int32)

    def attention_shape(self) -> schedules.AttentionShape:
        """Sizes of one layer's attention on one group of devices, as its traffic depends on."""
        model = self.model
        return schedules.AttentionShape(
            self.part_rows, self.seq_len, model.num_heads, model.num_kv_heads, model.head_dim,
            model.head_dim, self.itemsize, segments=True,
            positions=self.context.layout == "balanced",
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class NoDevice:
    """Holds a place in a mesh that is only reasoned about.

    Attributes:
      id: Its place.
      platform: That of no devices.
    """

    id: int
    platform: str = "none"


def shard_bytes(tree: Any, specs: Any, mesh: Mesh) -> int:
    """Bytes of one device's shards of arrays.

    Args:
      tree: Arrays, or their shapes.
      specs: The tree of their partitionings.
      mesh: The mesh.
    """

    def one(x: Any, spec: jax.sharding.PartitionSpec) -> int:
        size = x.dtype.itemsize
        names = [*spec, *[None] * (len(x.shape) - len(spec))]
        for length, axes in zip(x.shape, names, strict=True):
            along = (axes,) if isinstance(axes, str) else tuple(axes or ())
            size *= -(-length // math.prod(mesh.shape[axis] for axis in along))
        return size

    return sum(jax.tree.leaves(jax.tree.map(one, tree, specs)))
