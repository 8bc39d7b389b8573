"""What every strategy is given, and what it must provide."""

from __future__ import annotations

import dataclasses
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Inexact

from farspan.kernels import Kernel, Scores
from farspan.layouts import Layout
from farspan.masks import Tokens, block_extents, classify
from farspan.types import Leaf

Axes = tuple[str, ...]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Metadata:
    """What a shard knows of its tokens beyond their slots; travels with the keys.

    Attributes:
      segment_ids: int32 `[B, Sl]`, or None: each row is one document without padding.
      positions: int32 `[B, Sl]`, or None: the layout says where tokens stand.
    """

    segment_ids: Leaf | None
    positions: Leaf | None


@dataclasses.dataclass(frozen=True)
class Call:
    """The static part of one attention call, as one device sees it. Hashable.

    Attributes:
      kernel: Computes blocks.
      scores: Mask, scale and soft cap.
      layout: Which tokens each sequence shard holds.
      sequence_axes: Mesh axes over which keys differ during attention (ring, all-gather).
      head_axes: Mesh axes over which heads differ during attention (Ulysses).
      sequence_degree, head_degree: Devices along each.
    """

    kernel: Kernel
    scores: Scores
    layout: Layout
    sequence_axes: Axes
    head_axes: Axes
    sequence_degree: int
    head_degree: int

    def shard(self) -> Array | int:
        """Number of this device's sequence shard."""
        return lax.axis_index(self.sequence_axes) if self.sequence_axes else 0

    def tokens(self, shard: Array | int, shard_len: int, metadata: Metadata) -> Tokens:
        """Tokens of a sequence shard of `shard_len` slots."""
        if metadata.positions is not None:
            return Tokens(metadata.positions, metadata.segment_ids)
        slots = jnp.arange(shard_len, dtype=jnp.int32)
        degree = self.sequence_degree
        index = self.layout.token_index(shard, shard_len * degree, degree, slots)
        return Tokens(jnp.asarray(index, jnp.int32)[None], metadata.segment_ids)

    def any_visible(self, query_tokens: Tokens, key_tokens: Tokens) -> Array:
        """False only if no query sees any of the keys: the step can be skipped."""
        query = block_extents(query_tokens, _coarse_block(query_tokens.length))
        key = block_extents(key_tokens, _coarse_block(key_tokens.length))
        query = jax.tree.map(lambda x: x[:, :, None], query)
        key = jax.tree.map(lambda x: x[:, None, :], key)
        possible, _ = classify(self.scores.mask, query, key)
        return possible.any()


@runtime_checkable
class Strategy(Protocol):
    """Brings keys and values to queries. Runs on each device, inside `jax.shard_map`.

    Arrays are this device's shards, `[B, Sl, H, D]`. Neither direction keeps anything for the
    other: backward fetches keys and values anew.
    """

    def forward(
        self,
        call: Call,
        query: Inexact[Array, "B Sl H D"],
        key: Inexact[Array, "B Sl K D"],
        value: Inexact[Array, "B Sl K Dv"],
        metadata: Metadata,
    ) -> tuple[Inexact[Array, "B Sl H Dv"], Float[Array, "B H Sl"]]:
        """Computes `(out, lse)` of this device's queries over every key of their rows."""
        ...

    def backward(
        self,
        call: Call,
        query: Inexact[Array, "B Sl H D"],
        key: Inexact[Array, "B Sl K D"],
        value: Inexact[Array, "B Sl K Dv"],
        dout: Inexact[Array, "B Sl H Dv"],
        lse: Float[Array, "B H Sl"],
        delta: Float[Array, "B H Sl"],
        metadata: Metadata,
    ) -> tuple[Inexact[Array, "B Sl H D"], Inexact[Array, "B Sl K D"], Inexact[Array, "B Sl K Dv"]]:
        """Computes `(dq, dk, dv)` of this device's tokens; arguments as in `Kernel.backward`."""
        ...


def _coarse_block(length: int) -> int:
    """Block length that cuts a shard into at most 64 equal blocks."""
    return next(length // n for n in range(min(64, length), 0, -1) if length % n == 0)
