"""Ulysses: an all-to-all turns "all heads of my tokens" into "my heads of all tokens".

    forward   q, k, v in (heads split, tokens joined)  ->  attend  ->  out, lse back
    backward  q, k, v, dout, lse, delta in             ->  attend  ->  dq, dk, dv back

The degree must divide the query heads. Where it does not divide the kv heads, each is sent to as
many devices as need it, and their gradients are summed in float32. A latent, which has no heads, is
gathered. Sends (2 H + 2 K) D S / P * (P - 1) / P elements per device in forward.

The attention in the middle is itself a strategy: the kernel alone, or a ring (`usp`): the layout's
chunks then belong to the ring, and a group of devices that exchange heads splits a ring chunk
evenly; shard order is (ring, ulysses), ring outermost. The degree is not capped by the heads, as
with Ulysses alone, and a ring of R devices makes R - 1 hops of K / U heads each, where a ring alone
would make P - 1.

Source: DeepSpeed-Ulysses, arXiv:2309.14509; USP, arXiv:2405.07719.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from farspan.context.base import Axes, Call, Gradients, Keys, Partial, Queries, Slots
from farspan.schedules import kv_replicas


@dataclasses.dataclass(frozen=True)
class Exchange:
    """The stage of Ulysses: tokens come, heads go.

    Attributes:
      axes: Mesh axes whose devices exchange heads.
      degree: Devices along them.
    """

    axes: Axes
    degree: int

    def bring_slots(self, call: Call, slots: Slots) -> tuple[Slots, Slots]:
        """See `Stage.bring_slots`: those of all tokens that the group's devices hold."""
        del call
        joined = jax.tree.map(self._gather, slots)
        return joined, joined.of_keys()

    def bring_queries(self, queries: Queries) -> Queries:
        """See `Stage.bring_queries`."""
        return dataclasses.replace(
            queries,
            query=self._split_heads(queries.query),
            dout=None if queries.dout is None else self._split_heads(queries.dout),
            lse=None if queries.lse is None else self._split_rows(queries.lse),
            delta=None if queries.delta is None else self._split_rows(queries.delta),
        )

    def bring_keys(self, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
        """See `Stage.bring_keys`."""
        return tuple(
            self._split_heads(jnp.repeat(x, self._replicas(x), axis=2))
            if x.ndim == 4
            else self._gather(x)
            for x in arrays
        )

    def inside(self, call: Call, num_heads: int) -> Call:
        """See `Stage.inside`: the call for this device's heads."""
        if self.degree == 1:
            return call
        count = num_heads // self.degree
        return call.heads(lax.axis_index(self.axes) * count, count)

    def return_results(self, results: Partial, dtype: Any) -> Partial:
        """See `Stage.return_results`."""
        out, lse = results
        return self._join_heads(out.astype(dtype)), self._exchange(lse, 2, 1)

    def return_gradients(
        self, call: Call, found: Gradients, queries: Queries, keys: Keys
    ) -> Gradients:
        """See `Stage.return_gradients`."""
        dquery = self._join_heads(found.query.astype(queries.query.dtype))
        dkeys = tuple(
            self._return_keys(dx, x) for dx, x in zip(found.keys, keys.arrays, strict=True)
        )
        if self.degree == 1:
            return Gradients(dquery, dkeys, found.weights)
        first = lax.axis_index(self.axes) * (queries.query.shape[2] // self.degree)
        dweights = tuple(
            lax.dynamic_update_slice_in_dim(jnp.zeros(x.shape, dx.dtype), dx, first, axis=1)
            for dx, x in zip(found.weights, call.expansion.weights, strict=True)
        )
        return Gradients(dquery, dkeys, dweights)

    def _return_keys(self, dx: Array, x: Array) -> Array:
        """Gradients of keys back to the devices that own them, summed over copies."""
        if self.degree == 1:
            return dx
        if x.ndim == 3:
            return lax.psum_scatter(dx, self.axes, scatter_dimension=1, tiled=True)
        replicas = self._replicas(x)
        if replicas == 1:  # complete: the rounding to the input's dtype may come before the wire
            return self._join_heads(dx.astype(x.dtype))
        dx = self._join_heads(dx)
        return dx.reshape(*dx.shape[:2], -1, replicas, dx.shape[-1]).sum(3)

    def _replicas(self, x: Array) -> int:
        """Copies of each kv head, so that every device's query heads find theirs beside them."""
        return kv_replicas(x.shape[2], self.degree)

    def _exchange(self, x: Array, split_axis: int, join_axis: int) -> Array:
        if self.degree == 1:
            return x
        return lax.all_to_all(x, self.axes, split_axis, join_axis, tiled=True)

    def _split_heads(self, x: Array) -> Array:
        """`[B, Sl, H, D]` to `[B, Sl * degree, H / degree, D]`."""
        return self._exchange(x, 2, 1)

    def _join_heads(self, x: Array) -> Array:
        """The inverse of `_split_heads`."""
        return self._exchange(x, 1, 2)

    def _split_rows(self, x: Array) -> Array:
        """`[B, H, Sl]` to `[B, H / degree, Sl * degree]`."""
        return self._exchange(x, 1, 2)

    def _gather(self, x: Array) -> Array:
        """Joins the tokens of the group's devices; the numbers of their shards are the same."""
        if self.degree == 1 or x.ndim == 1:
            return x
        return lax.all_gather(x, self.axes, axis=1, tiled=True)
