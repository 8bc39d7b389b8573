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
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from farspan.context.base import Axes, Call, Gradients, Keys, Partial, Queries, Slots, part_of
from farspan.context.parcels import Parcel, Parcels, pack, rows_by_shift, unpack, unpack_rows
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
    brings_queries: ClassVar[bool] = True

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

    def parcels_out(self, queries: Queries, keys: Keys) -> Parcels:
        """See `Stage.parcels_out`: the heads of each device, from all of this one's tokens."""
        rows = [x.swapaxes(1, 2) for x in (queries.lse, queries.delta) if x is not None]
        arrays = [x for x in (queries.query, queries.dout) if x is not None]
        arrays += [jnp.repeat(x, self._replicas(x), axis=2) for x in keys.arrays] + rows
        me = lax.axis_index(self.axes)
        return {
            shift: pack(*(part_of(x, (me - shift) % self.degree, self.degree, 2) for x in arrays))
            for shift in range(self.degree)
        }

    def brought(self, arrived: Parcels, queries: Queries) -> tuple[Queries, Keys]:
        """See `Stage.brought`."""
        query, *others = unpack_rows(arrived)
        if queries.dout is None:
            return Queries(query, queries.slots), Keys(tuple(others), queries.slots)
        dout, *arrays, lse, delta = others
        rows = (x.swapaxes(1, 2) for x in (lse, delta))
        return Queries(query, queries.slots, dout, *rows), Keys(tuple(arrays), queries.slots)

    def parcels_home(self, found: Any, own: tuple[Queries, Keys]) -> tuple[Parcels, Any]:
        """See `Stage.parcels_home`: each device's tokens, from all of this one's heads."""
        queries, keys = own
        if isinstance(found, Gradients):
            arrays = [found.query.astype(queries.query.dtype)]
            arrays += [
                dx.astype(x.dtype) if self._replicas(x) == 1 else dx
                for dx, x in zip(found.keys, keys.arrays, strict=True)
            ]
        else:
            out, lse = found
            arrays = [out.astype(queries.query.dtype), lse.swapaxes(1, 2)]
        return rows_by_shift(arrays, range(self.degree)), None

    def taken_home(self, arrived: Parcels, stayed: Any, own: tuple[Queries, Keys]) -> Any:
        """See `Stage.taken_home`."""
        del stayed
        first, *others = self._heads_in_order(arrived)
        queries, keys = own
        if queries.dout is None:
            return first, others[0].swapaxes(1, 2)
        dkeys = tuple(self._sum_copies(dx, x) for dx, x in zip(others, keys.arrays, strict=True))
        return Gradients(first, dkeys, ())

    def _heads_in_order(self, arrived: Parcels) -> list[Array]:
        """Joins the heads of all devices; those of device r - shift came at `shift`."""
        me = lax.axis_index(self.axes)
        batch, length, width = arrived[0].wire.shape
        whole = jnp.zeros((batch, length, self.degree, width), arrived[0].wire.dtype)
        for shift, parcel in arrived.items():
            place = (me - shift) % self.degree
            whole = lax.dynamic_update_slice_in_dim(whole, parcel.wire[:, :, None], place, 2)
        flat = Parcel(whole.reshape(batch, length * self.degree, width), arrived[0].contents)
        return [
            x.reshape(batch, length, self.degree * x.shape[2], *x.shape[3:]) for x in unpack(flat)
        ]

    def _sum_copies(self, dx: Array, x: Array) -> Array:
        replicas = self._replicas(x)
        if replicas == 1:
            return dx
        return dx.reshape(*dx.shape[:2], -1, replicas, dx.shape[-1]).sum(3)

    def _return_keys(self, dx: Array, x: Array) -> Array:
        """Gradients of keys back to the devices that own them, summed over copies."""
        if self.degree == 1:
            return dx
        if x.ndim == 3:
            return lax.psum_scatter(dx, self.axes, scatter_dimension=1, tiled=True)
        if self._replicas(x) == 1:  # complete: the rounding to x's type may come before the wire
            dx = dx.astype(x.dtype)
        return self._sum_copies(self._join_heads(dx), x)

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
