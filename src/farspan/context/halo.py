"""Halo: under a sliding window, a shard needs only the edges of its neighbours.

    forward   receive the keys within the window's reach of each of my runs  ->  attend
    backward  receive them again  ->  attend  ->  their dk, dv go back and are summed

A layout cuts a row into runs of neighbouring tokens, one a shard (contiguous) or two (zigzag). For
each run a device receives the last `left` keys before it and the first `right` keys after it: one
transfer a side where the window fits a run, more where it does not. So layers with a window and
layers without share one layout, and a zigzag that balances the others serves these as well. Sends
2 W K D elements per device and run in forward, whatever the number of devices.

Source: neighbour exchange as in Mistral's sliding window, arXiv:2310.06825, and halo exchange in
context-parallel training, arXiv:2411.01783.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from farspan.context.base import (
    Axes,
    Call,
    Gradients,
    Keys,
    Local,
    Partial,
    Queries,
    Slots,
    Strategy,
)
from farspan.schedules import HaloTransfer, halo_transfers

_NOWHERE = -(2**30)
"""Place of a key that is not there: further from every query than any window reaches."""


@dataclasses.dataclass(frozen=True)
class Halo:
    """See the module's docstring.

    Attributes:
      axes: Mesh axes over which the sequence is split.
      degree: Devices along them.
      inner: Attends once the edges are there.
    """

    axes: Axes
    degree: int
    inner: Strategy = dataclasses.field(default_factory=Local)

    def forward(self, call: Call, queries: Queries, keys: Keys, partial: Partial | None) -> Partial:
        """See `Strategy.forward`."""
        transfers = self._transfers(call, keys)
        return self.inner.forward(call, queries, self._extended(call, keys, transfers), partial)

    def backward(
        self, call: Call, queries: Queries, keys: Keys, sums: Gradients | None
    ) -> Gradients:
        """See `Strategy.backward`."""
        assert sums is None, "a halo brings all keys: there are no other sums"
        transfers = self._transfers(call, keys)
        found = self.inner.backward(call, queries, self._extended(call, keys, transfers), None)
        length = keys.arrays[0].shape[1]

        def give_back(dx: Array) -> Array:
            own, start = dx[:, :length], length
            for transfer in transfers:
                stop = start + transfer.tokens
                back = [(target, source) for source, target in transfer.pairs]
                part = lax.ppermute(dx[:, start:stop], self.axes, back)
                own = own.at[:, transfer.slot : transfer.slot + transfer.tokens].add(part)
                start = stop
            return own

        return dataclasses.replace(found, keys=tuple(give_back(dx) for dx in found.keys))

    def _transfers(self, call: Call, keys: Keys) -> tuple[HaloTransfer, ...]:
        length = keys.arrays[0].shape[1]
        return halo_transfers(call.layout, self.degree, length, call.scores.mask)

    def _extended(self, call: Call, keys: Keys, transfers: tuple[HaloTransfer, ...]) -> Keys:
        """This shard's keys, and after them those that it receives."""

        def extend(x: Array) -> Array:
            parts = [
                lax.ppermute(x[:, t.slot : t.slot + t.tokens], self.axes, t.pairs)
                for t in transfers
            ]
            return jnp.concatenate([x, *parts], axis=1)

        shard = keys.slots.shards[0]
        index = [call.tokens(Slots(keys.slots.shards), keys.arrays[0].shape[1]).index[0]]
        for transfer in transfers:
            first = [_NOWHERE if place is None else place for place in transfer.first_index]
            here = jnp.asarray(first, jnp.int32)[shard]
            run = here + jnp.arange(transfer.tokens, dtype=jnp.int32)
            index.append(jnp.where(here == _NOWHERE, _NOWHERE, run))
        segment_ids = keys.slots.segment_ids
        segment_ids = None if segment_ids is None else extend(segment_ids)
        slots = Slots(keys.slots.shards, segment_ids, jnp.concatenate(index)[None])
        return Keys(tuple(extend(x) for x in keys.arrays), slots)
