"""`ContextParallel`: the user's choice of mesh, strategy and layout."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from farspan import schedules
from farspan.context.all_gather import AllGather
from farspan.context.base import Strategy
from farspan.context.ring import Ring
from farspan.context.ulysses import Ulysses
from farspan.context.usp import usp
from farspan.dist import BATCH_AXES, CONTEXT_AXES, axis_product, present
from farspan.layouts import Layout, get_layout

_STRATEGIES: dict[str, Strategy] = {
    "all_gather": AllGather(),
    "ulysses": Ulysses(),
    "ring": Ring(),
    "usp": usp(),
}


@dataclasses.dataclass(frozen=True)
class ContextParallel:
    """How a sequence is split over devices, and how keys and values meet queries.

    Attributes:
      mesh: A mesh with the axes named below; one that it lacks counts as size 1.
        `farspan.make_mesh` makes such a mesh.
      strategy: `all_gather`, `ulysses`, `ring` or `usp`. `usp` rings over the first context axis
        and exchanges heads over the second; the others use both axes as one.
      layout: `contiguous`, `zigzag` or `striped`: which tokens each device holds. Arrays that are
        passed to `farspan.attention` must lie in its order (`farspan.shard_sequence`).
      context_axes: The mesh's axes that split the sequence, (ring, ulysses).
      batch_axes: Axes that split the batch.
      head_axis: Axis that splits the heads (tensor parallelism).

    Raises:
      ValueError: If the strategy or the layout is unknown, or no context axis is in the mesh.

    Source: strategies: arXiv:2407.21783, 2309.14509, 2310.01889, 2405.07719.
    """

    mesh: Mesh
    strategy: str = "ring"
    layout: str = "zigzag"
    context_axes: tuple[str, str] = CONTEXT_AXES
    batch_axes: tuple[str, ...] = BATCH_AXES
    head_axis: str = "tensor"

    def __post_init__(self) -> None:
        get_layout(self.layout)
        schedules.degrees(self.strategy, 1, 1)
        if not present(self.mesh, self.context_axes):
            raise ValueError(
                f"ContextParallel: the mesh must have a context axis, {self.context_axes}, got a "
                f"mesh with axes {self.mesh.axis_names}; make one with farspan.make_mesh(cp_ring=N)"
                ", or name yours with context_axes=(ring, ulysses)"
            )

    @property
    def layout_object(self) -> Layout:
        """The layout that the name selects."""
        return get_layout(self.layout)

    @property
    def strategy_object(self) -> Strategy:
        """The strategy that the name selects."""
        return _STRATEGIES[self.strategy]

    @property
    def degrees(self) -> schedules.Degrees:
        """Devices per role; `degrees.sequence` is the number of shards the layout cuts."""
        ring, ulysses = (self.mesh.shape.get(axis, 1) for axis in self.context_axes)
        return schedules.degrees(self.strategy, ring, ulysses)

    @property
    def sequence_axes(self) -> tuple[str, ...]:
        """Mesh axes over which keys differ during attention."""
        if self.strategy == "ulysses":
            return ()
        axes = self.context_axes[:1] if self.strategy == "usp" else self.context_axes
        return present(self.mesh, axes)

    @property
    def exchange_axes(self) -> tuple[str, ...]:
        """Mesh axes over which heads differ during attention."""
        axes = {"ulysses": self.context_axes, "usp": self.context_axes[1:]}
        return present(self.mesh, axes.get(self.strategy, ()))

    @property
    def split(self) -> str:
        """The strategy and its sizes in words, such as `usp = ring 4 x ulysses 2`."""
        degrees = self.degrees
        if self.strategy == "usp":
            return f"usp = ring {degrees.sequence} x ulysses {degrees.heads}"
        return f"{self.strategy} {degrees.total}"

    @property
    def tensor(self) -> int:
        """Size of the axis that splits heads outside attention, too."""
        return self.mesh.shape.get(self.head_axis, 1)

    @property
    def batch_shards(self) -> int:
        """Devices over which the batch is split."""
        return axis_product(self.mesh, self.batch_axes)

    @property
    def sequence_multiple(self) -> int:
        """The number that the sequence length must be a multiple of."""
        return schedules.sequence_multiple(self.layout_object, self.degrees)

    def partition_spec(self, ndim: int, head_dim: int | None = None) -> PartitionSpec:
        """Partitioning of an array `[B, S, ...]`.

        Args:
          ndim: Number of dimensions, at least 2.
          head_dim: The dimension that holds heads, if one does.
        """
        spec: list[Sequence[str] | str | None] = [None] * ndim
        spec[0] = present(self.mesh, self.batch_axes)
        spec[1] = present(self.mesh, self.context_axes)
        if head_dim is not None and self.head_axis in self.mesh.shape:
            spec[head_dim] = self.head_axis
        return PartitionSpec(*spec)

    def sharding(self, ndim: int) -> NamedSharding:
        """Sharding of an array `[B, S, ...]`: batch over its axes, sequence over the context's."""
        return NamedSharding(self.mesh, self.partition_spec(ndim))

    def constrain(self, x: jax.Array) -> jax.Array:
        """Keeps an activation `[B, S, ...]` split over batch and context inside jit."""
        return jax.lax.with_sharding_constraint(x, self.sharding(x.ndim))
