"""`ContextParallel`: the user's choice of mesh, strategy and layout."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from farspan import schedules
from farspan.context.all_gather import Gather
from farspan.context.base import Local, Strategy
from farspan.context.halo import Halo
from farspan.context.head_groups import HeadGroups
from farspan.context.ring import Ring
from farspan.context.staged import Staged
from farspan.context.ulysses import Exchange
from farspan.dist import BATCH_AXES, CONTEXT_AXES, axis_product, present, ring_cycles
from farspan.layouts import Layout, get_layout
from farspan.masks import Mask


@dataclasses.dataclass(frozen=True)
class ContextParallel:
    """How a sequence is split over devices, and how keys and values meet queries.

    Attributes:
      mesh: A mesh with the axes named below; one that it lacks counts as size 1.
        `farspan.make_mesh` makes such a mesh.
      strategy: `all_gather`, `ulysses`, `ring`, `usp`, or `halo` for masks of bounded reach. `usp`
        and `halo` exchange heads over the last context axis; the others use all axes as one.
        `ring` and `usp` make a ring of rings where there is an outer ring.
      layout: `contiguous`, `zigzag`, `striped` or `balanced`: which tokens each device holds.
        Arrays that are passed to `farspan.attention` must lie in its order
        (`farspan.shard_sequence`).
      head_groups: Groups into which `all_gather` and `ulysses` cut the heads: the next group's keys
        are fetched while one group attends, and only two groups' are held. 1: all heads at once.
        Under `ulysses` a group of fewer kv heads than devices sends copies of them. With the latent
        of MLA, any strategy takes groups: one latent is sent, and expanded group by group.
      ring_streams: Parts into which `ring` and `usp` cut the tokens of what travels; each goes
        round a ring of links of its own (`farspan.dist.ring_cycles`): 2 use both directions of the
        links of one ring, 4 and 6 those of two and three rings of a torus. All travel all the way
        round, whatever the mask needs. In a ring of rings, this is of the inner rings.
      context_axes: The mesh's axes that split the sequence, (outer ring, ring, ulysses) or (ring,
        ulysses).
      batch_axes: Axes that split the batch.
      head_axis: Axis that splits the heads (tensor parallelism).

    Raises:
      ValueError: If the strategy or the layout is unknown, no context axis is in the mesh, or a
        number is out of range.

    Source: strategies: arXiv:2407.21783, 2309.14509, 2310.01889, 2405.07719.
    """

    mesh: Mesh
    strategy: str = "ring"
    layout: str = "zigzag"
    head_groups: int = 1
    ring_streams: int = 1
    context_axes: tuple[str, ...] = CONTEXT_AXES
    batch_axes: tuple[str, ...] = BATCH_AXES
    head_axis: str = "tensor"

    def __post_init__(self) -> None:
        get_layout(self.layout)
        schedules.degrees(self.strategy, 1, 1)
        if len(self.context_axes) not in (2, 3):
            raise ValueError(
                "ContextParallel: context_axes must be (ring, ulysses) or (outer ring, ring, "
                f"ulysses), got {self.context_axes}"
            )
        for name in ("head_groups", "ring_streams"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"ContextParallel: {name} must be at least 1, got {getattr(self, name)}"
                )
        if not present(self.mesh, self.context_axes):
            raise ValueError(
                f"ContextParallel: the mesh must have a context axis, {self.context_axes}, got a "
                f"mesh with axes {self.mesh.axis_names}; make one with farspan.make_mesh(cp_ring=N)"
                ", or name yours with context_axes=(ring, ulysses)"
            )

    def with_strategy(self, strategy: str) -> ContextParallel:
        """Another strategy on the same mesh and the same layout, for some of a model's layers.

        Raises:
          ValueError: If the two would not cut a row into the same shards.
        """
        other = dataclasses.replace(self, strategy=strategy)
        if other.degrees.sequence != self.degrees.sequence:
            raise ValueError(
                "with_strategy: both must cut a row into as many sequence shards, got "
                f"{self.split} with {self.degrees.sequence} and {other.split} with "
                f"{other.degrees.sequence}; use another split of the context axes"
            )
        return other

    @property
    def orders_collectives(self) -> bool:
        """Whether collectives that share no data must be kept apart by data.

        XLA's CPU runtime orders a loop of collectives by its data alone, so it may run beside
        another collective; then devices wait for one another in vain, or receive what is not
        theirs.
        """
        return self.mesh.devices.flat[0].platform == "cpu"

    @property
    def layout_object(self) -> Layout:
        """The layout that the name selects."""
        return get_layout(self.layout)

    def strategy_object(
        self, hops: schedules.Hops | None = None, *, latent: bool = False
    ) -> Strategy:
        """Composes the strategy that the name selects.

        Args:
          hops: How far keys must travel in a ring, integers or arrays; None: all the way round.
          latent: Whether keys and values come from a latent. Then groups of heads share what is
            sent, and are expanded one after the other.
        """
        degrees = self.degrees
        inner: Strategy = Local()
        if latent and self.head_groups > 1:
            inner = HeadGroups(inner, self.head_groups)
        groups = 1 if latent else self.head_groups
        if self.strategy == "all_gather":
            return Staged(Gather(self.sequence_axes, degrees.sequence), inner, groups)
        if self.strategy == "ring":
            return self._ring(inner, hops)
        if self.strategy == "usp":
            inner = self._ring(inner, hops)
        elif self.strategy == "halo":
            inner = Halo(self.sequence_axes, degrees.sequence, inner)
        return Staged(Exchange(self.exchange_axes, degrees.heads), inner, groups)

    def _ring(self, inside: Strategy, hops: schedules.Hops | None) -> Strategy:
        degrees, axes = self.degrees, self.sequence_axes
        streams = None
        if self.ring_streams > 1:
            streams = ring_cycles(self.mesh, self.ring_streams, axes[degrees.outer > 1 :])
        if degrees.outer == 1:
            hops = None if streams else hops
            return Ring(axes, degrees.sequence, inside, hops, streams=streams)
        inner = degrees.sequence // degrees.outer
        if hops is not None:
            hops = schedules.group_hops(hops, inner, degrees.outer)
        inside = Ring(axes[1:], inner, inside, streams=streams)
        return Ring(axes[:1], degrees.outer, inside, hops, stride=inner)

    @property
    def degrees(self) -> schedules.Degrees:
        """Devices per role; `degrees.sequence` is the number of shards the layout cuts."""
        *outer, ring, ulysses = (self.mesh.shape.get(axis, 1) for axis in self.context_axes)
        return schedules.degrees(self.strategy, ring, ulysses, *outer)

    @property
    def sequence_axes(self) -> tuple[str, ...]:
        """Mesh axes over which keys differ during attention, outermost first."""
        if self.strategy == "ulysses":
            return ()
        exchanged = self.strategy in ("usp", "halo")
        return present(self.mesh, self.context_axes[:-1] if exchanged else self.context_axes)

    @property
    def exchange_axes(self) -> tuple[str, ...]:
        """Mesh axes over which heads differ during attention."""
        last = self.context_axes[-1:]
        axes = {"ulysses": self.context_axes, "usp": last, "halo": last}
        return present(self.mesh, axes.get(self.strategy, ()))

    @property
    def split(self) -> str:
        """The strategy and its sizes in words, such as `usp = ring 4 x ulysses 2`."""
        groups = f" in {self.head_groups} groups of heads" if self.head_groups > 1 else ""
        streams = f" in {self.ring_streams} streams" if self.ring_streams > 1 else ""
        return schedules.split_in_words(self.strategy, self.degrees) + groups + streams

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
        return schedules.sequence_multiple(self.layout_object, self.degrees, self.ring_streams)

    def traffic_options(
        self, mask: Mask, seq_len: int, *, places_given: bool = False
    ) -> schedules.Options:
        """What the bytes that a layer sends depend on beside its sizes (`schedules.collectives`).

        Args:
          mask: The mask.
          seq_len: Tokens in a row.
          places_given: Whether the places of tokens are data, so that no bound on hops is known.

        Returns:
          Halos, groups and streams, and the hops that the mask needs whatever the documents;
          documents may need fewer.
        """
        degrees, layout = self.degrees, self.layout_object
        tokens = seq_len // degrees.sequence
        halo: tuple[int, ...] = ()
        if self.strategy == "halo":
            transfers = schedules.halo_transfers(layout, degrees.sequence, tokens, mask)
            halo = tuple(transfer.tokens for transfer in transfers)
        hops = None
        if not places_given:
            hops = schedules.reach_hops(layout, degrees.sequence, tokens, mask)
        return schedules.Options(hops, self.head_groups, halo, streams=self.ring_streams)

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
