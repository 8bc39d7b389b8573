"""Ring: keys and values travel from device to device, while each computes with those it has.

    forward   at distance d, device r computes with the keys of device r - d and passes them on;
              partial outputs are merged in float32 through their log-sum-exp
    backward  visitors start at their greatest distance and walk home, and their gradients with
              them, in float32: each device on the way adds its share

In backward the visitors are keys and values with (dk, dv), or queries with (dout, lse, delta) and
dq, whichever is fewer bytes. Around a whole ring of P devices, greatest distance is one step
backwards: P - 1 transfers of each. Where the documents of a batch are short, keys need not travel
all the way: `hops` says how far, to either side, and may be data (one program for every batch).

Any number of heads works, and a device never holds more than its own, one visiting and one
arriving shard. Sends (P - 1) / P * 2 S K D elements per device in forward.

A ring over slow links can hold a ring over fast ones: keys then cross a slow link once for all the
steps of the ring inside, and under them.

Source: Ring Attention, arXiv:2310.01889; DoubleRing in LoongTrain, arXiv:2406.18485, section 4.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
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
    Strategy,
    no_gradients,
    nothing_seen,
)
from farspan.schedules import Hops, jumps, ring_backward_visitor

Meet = Callable[[Any, Any, Any], tuple[Any, Any]]
"""A visitor, its gradients and the host's, before and after they have met."""


@dataclasses.dataclass(frozen=True)
class Ring:
    """See the module's docstring.

    Attributes:
      axes: Mesh axes of the ring.
      degree: Devices along them.
      inner: Attends at each step.
      hops: How far keys travel; by default all the way round.
      stride: Sequence shards from one device of the ring to the next.
    """

    axes: Axes
    degree: int
    inner: Strategy = dataclasses.field(default_factory=Local)
    hops: Hops | None = None
    stride: int = 1

    def forward(self, call: Call, queries: Queries, keys: Keys, partial: Partial | None) -> Partial:
        """See `Strategy.forward`."""
        start = nothing_seen(call, queries, keys) if partial is None else partial
        before, after = self._hops()

        def step(keys: Keys, partial: Partial) -> Partial:
            return self.inner.forward(call, queries, keys, partial)

        def onward(_: Array, carry: tuple[Keys, Partial]) -> tuple[Keys, Partial]:
            visiting, found = carry
            arriving = self._shift(visiting, 1)
            return arriving, step(self._not_before(call, visiting, arriving), found)

        def backward(_: Array, carry: tuple[Keys, Partial]) -> tuple[Keys, Partial]:
            visiting, found = carry
            visiting = self._shift(visiting, -1)
            return visiting, step(visiting, found)

        visiting, found = lax.fori_loop(0, before, onward, (keys, start))
        found = step(visiting, found)
        if _is_zero(after):
            return found
        return lax.fori_loop(0, after, backward, (keys, found))[1]

    def backward(
        self, call: Call, queries: Queries, keys: Keys, sums: Gradients | None
    ) -> Gradients:
        """See `Strategy.backward`."""
        if sums is None:
            sums = no_gradients(call, queries, keys)
        sums = self.inner.backward(call, queries, keys, sums)
        before, after = self._hops()
        if _is_zero(before) and _is_zero(after):
            return sums

        def meet_keys(visitor: Keys, gradients: Any, host: Any) -> tuple[Any, Any]:
            dquery, dweights = host
            found = self.inner.backward(
                call, queries, visitor, Gradients(dquery, gradients, dweights)
            )
            return found.keys, (found.query, found.weights)

        def meet_queries(visitor: Queries, gradients: Any, host: Any) -> tuple[Any, Any]:
            dkeys, dweights = host
            found = self.inner.backward(call, visitor, keys, Gradients(gradients, dkeys, dweights))
            return found.query, (found.keys, found.weights)

        if _visitor(queries, keys) == "keys":
            home, host = sums.keys, (sums.query, sums.weights)
            for direction, hops in ((1, before), (-1, after)):
                dkeys, host = self._tour(call, keys, home, host, direction, hops, meet_keys)
                home = jax.tree.map(jnp.add, home, dkeys)
            return Gradients(host[0], home, host[1])
        home, host = sums.query, (sums.keys, sums.weights)
        for direction, hops in ((1, after), (-1, before)):
            dquery, host = self._tour(call, queries, home, host, direction, hops, meet_queries)
            home = home + dquery
        return Gradients(home, *host)

    def _tour(
        self, call: Call, visitor: Any, like: Any, host: Any, direction: int, hops: Any, meet: Meet
    ) -> tuple[Any, Any]:
        """Visitors jump `hops` away and walk home.

        Args:
          call: The call.
          visitor: What travels.
          like: Arrays of the shapes of its gradients.
          host: Sums of those who are visited.
          direction: 1: device r is visited from r - 1, r - 2, ...; -1: from r + 1, r + 2, ...
          hops: Greatest distance.
          meet: Adds one visit to the visitor's and the host's sums.

        Returns:
          `(gradients, host)`: what the visitors bring home, and the hosts' sums.
        """
        nothing = jax.tree.map(jnp.zeros_like, like)
        if _is_zero(hops):
            return nothing, host
        visitor = self._jump(self._not_before(call, visitor, host, always=True), direction, hops)

        def body(_: Array, carry: Any) -> Any:
            visitor, gradients, host = carry
            arriving = self._shift(visitor, -direction)
            visitor = self._not_before(call, visitor, arriving)
            gradients, host = meet(visitor, gradients, host)
            return arriving, self._shift(gradients, -direction), host

        def last(carry: Any) -> Any:
            visitor, gradients, host = carry
            gradients, host = meet(visitor, gradients, host)
            return self._shift(gradients, -direction), host

        carry = lax.fori_loop(0, hops - 1, body, (visitor, nothing, host))
        if isinstance(hops, int):
            return last(carry)
        return lax.cond(hops > 0, last, lambda carry: carry[1:], carry)

    def _hops(self) -> Hops:
        return Hops(self.degree - 1, 0) if self.hops is None else self.hops

    def _shift(self, x: Any, distance: int) -> Any:
        """Sends to the device `distance` further along the ring; receives likewise."""
        pairs = [(r, (r + distance) % self.degree) for r in range(self.degree)]

        def send(x: Array) -> Array:
            return lax.ppermute(x, self.axes, pairs)

        if not isinstance(x, (Keys, Queries)):
            return jax.tree.map(send, x)
        shards = x.slots.shards
        place = shards // self.stride % self.degree
        came_from = shards + ((place - distance) % self.degree - place) * self.stride
        bare = dataclasses.replace(x, slots=dataclasses.replace(x.slots, shards=None))
        moved = jax.tree.map(send, bare)
        return dataclasses.replace(moved, slots=dataclasses.replace(moved.slots, shards=came_from))

    def _jump(self, x: Any, direction: int, hops: Any) -> Any:
        """`_shift` by a distance that may be data: by powers of two, or one step the other way."""
        if isinstance(hops, int):
            return self._shift(x, direction * hops)

        def by_powers(x: Any) -> Any:
            for power in jumps(self.degree):
                x = lax.cond(
                    hops & power, lambda x, d=direction * power: self._shift(x, d), _same, x
                )
            return x

        return lax.cond(hops == self.degree - 1, lambda x: self._shift(x, -direction), by_powers, x)

    def _not_before(self, call: Call, x: Any, other: Any, always: bool = False) -> Any:
        """Keeps a ring inside from running beside this ring's own transfers, if order matters."""
        return call.after(x, other) if always or isinstance(self.inner, Ring) else x


def _visitor(queries: Queries, keys: Keys) -> str:
    """Whether keys or queries travel in backward."""
    query, dout = queries.query, queries.dout
    shared = sum(x is not None for x in (keys.slots.segment_ids, keys.slots.index))
    ranges = 0 if queries.slots.key_ranges is None else 2 * queries.slots.key_ranges.shape[2]
    return ring_backward_visitor(
        key_elements=sum(x[0, 0].size for x in keys.arrays),
        query_elements=query[0, 0].size,
        out_elements=dout[0, 0].size,
        num_heads=query.shape[2],
        itemsize=query.dtype.itemsize,
        labels=shared,
        query_labels=ranges,
    )


def _is_zero(hops: Any) -> bool:
    return isinstance(hops, int) and hops == 0


def _same(x: Any) -> Any:
    return x
