"""Ring: keys and values travel from device to device, while each computes with those it has.

    forward   at distance d, device r computes with the keys of device r - d and passes them on;
              partial outputs are merged in float32 through their log-sum-exp
    backward  visitors start at their greatest distance and walk home, where they are met last;
              their gradients, in float32, follow one step behind: each device adds its share

Everything but backward's first jump travels while a step computes. What has arrived and what the
step has made pass one optimization barrier before either is used: a compiler that hides transfers
has then nothing but the step to hide them under.

In backward the visitors are keys and values with (dk, dv), or queries with (dout, lse, delta) and
dq, whichever is fewer bytes. Around a whole ring of P devices, greatest distance is one step
backwards: P - 1 transfers of each. Where the documents of a batch are short, keys need not travel
all the way: `hops` says how far, to either side, and may be data (one program for every batch).

Any number of heads works, and a device never holds more than its own, one visiting and one
arriving shard. Sends (P - 1) / P * 2 S K D elements per device in forward.

A chip has several links, and a plain ring sends over one. In `streams` a visitor's tokens are cut
into equal parts that go round different rings of links at once.

A ring over slow links can hold a ring over fast ones: keys then cross a slow link once for all the
steps of the ring inside, and under them.

Source: Ring Attention, arXiv:2310.01889; DoubleRing in LoongTrain, arXiv:2406.18485, section 4.
"""

from __future__ import annotations

import dataclasses
import functools
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
    Slots,
    Strategy,
    no_gradients,
    nothing_seen,
    part_of,
)
from farspan.context.streams import send_in_streams, visitors_after
from farspan.dist import Streams
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
      streams: Orders in which equal parts of a visitor's tokens go round, all the way; None: whole,
        in the order of the axes.
    """

    axes: Axes
    degree: int
    inner: Strategy = dataclasses.field(default_factory=Local)
    hops: Hops | None = None
    stride: int = 1
    streams: Streams | None = None

    def __post_init__(self) -> None:
        assert self.streams is None or self.hops is None, "streams go all the way round"

    def forward(self, call: Call, queries: Queries, keys: Keys, partial: Partial | None) -> Partial:
        """See `Strategy.forward`."""
        start = nothing_seen(call, queries, keys) if partial is None else partial
        before, after = self._hops()
        keys = self._parted(keys)

        def attend(visiting: Keys, arriving: Keys, partial: Partial) -> tuple[Keys, Partial]:
            found = step(self._not_before(call, visiting, arriving), partial)
            return lax.optimization_barrier((arriving, found))

        def step(visiting: Keys, partial: Partial) -> Partial:
            return self.inner.forward(call, queries, self._placed(call, visiting), partial)

        def onward(_: Array, carry: tuple[Keys, Partial]) -> tuple[Keys, Partial]:
            visiting, found = carry
            arriving = self._shift(visiting, 1)
            return attend(visiting, arriving, found)

        def backward(_: Array, carry: tuple[Keys, Keys, Partial]) -> tuple[Keys, Keys, Partial]:
            visiting, last, found = carry
            arriving, found = attend(visiting, self._shift(last, -1), found)
            return arriving, arriving, found

        visiting, found = lax.fori_loop(0, before, onward, (keys, start))
        if not _is_zero(after):  # the others start from home again, under the last step's work
            home = call.after(keys, visiting)
            visiting, _, found = lax.fori_loop(0, after, backward, (visiting, home, found))
        return step(visiting, found)

    def backward(
        self, call: Call, queries: Queries, keys: Keys, sums: Gradients | None
    ) -> Gradients:
        """See `Strategy.backward`."""
        if sums is None:
            sums = no_gradients(call, queries, keys)
        before, after = self._hops()

        def meet_keys(visitor: Keys, gradients: Any, host: Any) -> tuple[Any, Any]:
            dquery, dweights = host
            found = self.inner.backward(
                call, queries, self._placed(call, visitor), Gradients(dquery, gradients, dweights)
            )
            return found.keys, (found.query, found.weights)

        def meet_queries(visitor: Queries, gradients: Any, host: Any) -> tuple[Any, Any]:
            dkeys, dweights = host
            found = self.inner.backward(
                call, self._placed(call, visitor), keys, Gradients(gradients, dkeys, dweights)
            )
            return found.query, (found.keys, found.weights)

        if _visitor(queries, keys) == "keys":
            tours = ((-1, after), (1, before))
            home, host = sums.keys, (sums.query, sums.weights)
            home, host = self._tours(call, keys, home, host, tours, meet_keys)
            return Gradients(host[0], home, host[1])
        tours = ((-1, before), (1, after))
        home, host = sums.query, (sums.keys, sums.weights)
        home, host = self._tours(call, queries, home, host, tours, meet_queries)
        return Gradients(home, *host)

    def _tours(
        self,
        call: Call,
        own: Any,
        home: Any,
        host: Any,
        tours: tuple[tuple[int, Any], ...],
        meet: Meet,
    ) -> tuple[Any, Any]:
        """Visitors jump away to either side and walk home; the last meeting is at home.

        Args:
          call: The call.
          own: What travels, as it is at home.
          home: Sums of its gradients so far.
          host: Sums of those who are visited.
          tours: Direction and greatest distance. Direction 1: device r is visited from r - 1,
            r - 2, ...; -1: from r + 1, r + 2, ...
          meet: Adds one visit to the visitor's and the host's sums.

        Returns:
          `(home, host)`, the sums with every visit added.
        """
        own = self._parted(own)
        tours = tuple(tour for tour in tours if not _is_zero(tour[1]))
        for number, (direction, hops) in enumerate(tours):
            visitor = self._not_before(call, own, host, always=number > 0)
            last = number == len(tours) - 1
            tour = functools.partial(self._tour, call, direction, hops, meet, last)
            if isinstance(hops, int):
                home, host = tour(visitor, home, host)
            else:
                stay = meet if last else _nothing_met
                home, host = lax.cond(hops > 0, tour, stay, visitor, home, host)
        return (home, host) if tours else meet(own, home, host)

    def _tour(
        self,
        call: Call,
        direction: int,
        hops: Any,
        meet: Meet,
        meets_home: bool,
        own: Any,
        home: Any,
        host: Any,
    ) -> tuple[Any, Any]:
        """Visitors jump `hops` > 0 away and walk home.

        A meeting makes its share of the visitor's gradients apart from those that the visitor has
        gathered, which follow one step behind. So both are on their way during a meeting; what no
        meeting hides is the jump.
        """
        nothing = jax.tree.map(jnp.zeros_like, home)

        def step(arriving: Any, visitor: Any, gathered: Any, host: Any) -> tuple[Any, Any, Any]:
            """One meeting, while the next visitor arrives and this one's gradients follow it."""
            for other in (arriving, gathered):
                if other is not None:
                    visitor = self._not_before(call, visitor, other)
            met = meet(visitor, nothing, host)
            arriving, gathered, (gradients, host) = lax.optimization_barrier(
                (arriving, gathered, met)
            )
            if gathered is not None:
                gradients = jax.tree.map(jnp.add, gathered, gradients)
            return arriving, gradients, host

        def far(_: Array, carry: Any) -> Any:
            visitor, gradients, host = carry
            arriving, gathered = self._shift(visitor, -direction, gradients)
            return step(arriving, visitor, gathered, host)

        def near(_: Array, carry: Any) -> Any:
            visitor, gradients, host = carry
            return own, *step(None, visitor, self._shift(gradients, -direction), host)[1:]

        visitor = self._jump(own, direction, hops)
        if not isinstance(hops, int):
            nearer = functools.partial(self._shift, distance=-direction)
            arriving = lax.cond(hops > 1, nearer, lambda _: own, visitor)
            walk, first_near = hops - 2, jnp.where(hops > 1, 0, 1)
        elif hops > 1:
            arriving, walk, first_near = self._shift(visitor, -direction), hops - 2, 0
        else:
            arriving, walk, first_near = own, 0, 1
        if arriving is own:
            carry = own, *step(None, visitor, None, host)[1:]
        else:
            carry = step(arriving, visitor, None, host)
        carry = lax.fori_loop(0, walk, far, carry)
        _, gradients, host = lax.fori_loop(first_near, 2 if meets_home else 1, near, carry)
        if not meets_home:
            gradients = self._shift(gradients, -direction)
        return jax.tree.map(jnp.add, home, gradients), host

    def _hops(self) -> Hops:
        return Hops(self.degree - 1, 0) if self.hops is None else self.hops

    def _shift(self, x: Any, distance: int, beside: Any = None) -> Any:
        """Sends to the device `distance` further along the ring; receives likewise.

        Returns:
          What arrives; with `beside`, a pair of it and what arrives of `beside`.
        """
        bare, shards = x, None
        if isinstance(x, (Keys, Queries)):
            shards = self._came_from(x.slots.shards, distance)
            bare = dataclasses.replace(x, slots=dataclasses.replace(x.slots, shards=None))
        moved, also = self._send((bare, beside), distance)
        if isinstance(x, (Keys, Queries)):
            moved = dataclasses.replace(
                moved, slots=dataclasses.replace(moved.slots, shards=shards)
            )
        return moved if beside is None else (moved, also)

    def _send(self, x: Any, distance: int) -> Any:
        if self.streams is not None:
            token_axes = jax.tree.map(_token_axes, x, is_leaf=lambda x: isinstance(x, Queries))
            return send_in_streams(x, token_axes, self.axes, self.streams, distance)
        pairs = [(r, (r + distance) % self.degree) for r in range(self.degree)]
        return jax.tree.map(lambda x: lax.ppermute(x, self.axes, pairs), x)

    def _came_from(self, shards: Array, distance: int) -> Array:
        """Numbers of the shards that come with a shift, from the numbers of those that go."""
        place = shards // self.stride % self.degree
        if self.streams is None:
            source = (place - distance) % self.degree
        else:
            source = visitors_after(self.streams, place, distance)
        return shards + (source - place) * self.stride

    def _parted(self, x: Any) -> Any:
        """What travels, with the number of its shard for each stream."""
        if self.streams is None:
            return x
        shards = jnp.broadcast_to(x.slots.shards, (self.streams.count,))
        return dataclasses.replace(x, slots=dataclasses.replace(x.slots, shards=shards))

    def _placed(self, call: Call, x: Any) -> Any:
        """A visitor of several streams with the place of each token; else as it is."""
        if self.streams is None or x.slots.index is not None:
            return x
        length = (x.arrays[0] if isinstance(x, Keys) else x.query).shape[1]
        whole = [call.tokens(Slots(shard[None]), length).index for shard in x.slots.shards]
        count = len(whole)
        index = [part_of(index, n, count, axis=1) for n, index in enumerate(whole)]
        slots = dataclasses.replace(x.slots, index=jnp.concatenate(index, axis=1))
        return dataclasses.replace(x, slots=slots)

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


def _token_axes(x: Any) -> Any:
    """The dimension that counts tokens, of an array or of each array of queries."""
    axes = jax.tree.map(lambda _: 1, x)
    return dataclasses.replace(axes, lse=2, delta=2) if isinstance(x, Queries) else axes


def _is_zero(hops: Any) -> bool:
    return isinstance(hops, int) and hops == 0


def _same(x: Any) -> Any:
    return x


def _nothing_met(own: Any, home: Any, host: Any) -> tuple[Any, Any]:
    del own
    return home, host
