"""All-gather: every device fetches all keys and values, and keeps its own queries.

    forward   gather k, v        ->  attend: my queries x all keys
    backward  gather k, v again  ->  dq is mine; dk, dv of all keys are summed and scattered

Any number of heads works. Each device holds the keys and values of the whole row for the time of
one layer, which is what bounds the sequence: all heads', or, if heads are cut into groups, those of
two groups in forward; in backward, where keys come as they are met, four shards' of a group. Sends
(P - 1) / P * 2 S K D elements per device in forward; twice that in backward, the gradients in
float32.

Source: Llama 3, arXiv:2407.21783, section 3.3.2.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from farspan.context.base import Axes, Call, Gradients, Keys, Partial, Queries, Slots
from farspan.context.parcels import Parcels, pack, unpack_rows


@dataclasses.dataclass(frozen=True)
class Gather:
    """The stage of all-gather: keys come, queries stay.

    Attributes:
      axes: Mesh axes over which the sequence is split.
      degree: Devices along them.
    """

    axes: Axes
    degree: int
    brings_queries: ClassVar[bool] = False

    def bring_slots(self, call: Call, slots: Slots) -> tuple[Slots, Slots]:
        """See `Stage.bring_slots`."""
        del call
        arrays = jax.tree.map(self._gather, slots.of_keys())
        shards = jnp.arange(self.degree, dtype=jnp.int32)
        return slots, dataclasses.replace(arrays, shards=shards)

    def bring_queries(self, queries: Queries) -> Queries:
        """See `Stage.bring_queries`."""
        return queries

    def bring_keys(self, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
        """See `Stage.bring_keys`: every shard's, in shard order."""
        return tuple(self._gather(x) for x in arrays)

    def inside(self, call: Call, num_heads: int) -> Call:
        """See `Stage.inside`."""
        del num_heads
        return call

    def return_results(self, results: Partial, dtype: Any) -> Partial:
        """See `Stage.return_results`."""
        del dtype
        return results

    def return_gradients(
        self, call: Call, found: Gradients, queries: Queries, keys: Keys
    ) -> Gradients:
        """See `Stage.return_gradients`: sums over devices, in float32, and leaves each its own."""
        del call, queries, keys
        return dataclasses.replace(found, keys=tuple(self._sum_and_scatter(x) for x in found.keys))

    def parcels_out(self, queries: Queries, keys: Keys) -> Parcels:
        """See `Stage.parcels_out`: the same for all."""
        del queries
        return dict.fromkeys(range(self.degree), pack(*keys.arrays))

    def brought(self, arrived: Parcels, queries: Queries) -> tuple[Queries, Keys]:
        """See `Stage.brought`."""
        return queries, Keys(unpack_rows(arrived), queries.slots)

    def parcels_home(self, found: Any, own: tuple[Queries, Keys]) -> tuple[Parcels, Any]:
        """See `Stage.parcels_home`: results stay."""
        del own
        return {}, found

    def taken_home(self, arrived: Parcels, stayed: Any, own: tuple[Queries, Keys]) -> Any:
        """See `Stage.taken_home`."""
        del arrived, own
        return stayed

    def _gather(self, x: Array) -> Array:
        if self.degree == 1 or x.ndim == 1:  # numbers of shards are known
            return x
        return lax.all_gather(x, self.axes, axis=1, tiled=True)

    def _sum_and_scatter(self, x: Array) -> Array:
        if self.degree == 1:
            return x
        return lax.psum_scatter(x, self.axes, scatter_dimension=1, tiled=True)
