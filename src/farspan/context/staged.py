"""Strategies that bring everything together first, attend, and take results back.

A stage says what is brought: all keys to every device (`all_gather`), or all tokens of some heads
(`ulysses`). Heads are independent, so the work may be cut into groups of heads: while one group
attends, the next one's keys are on their way, and what the one before has made goes home. No more
than two groups' keys are held.

With all heads at once nothing could travel beside the work, and a stage uses whole collectives. In
groups it sends parcels, by permutes: those travel under kernels, a few at a time, so a group's work
is done in as many pieces as that takes: pieces of its queries in forward, of its keys in backward.
Nothing hides how the first group comes and how the last one's results go; or, in the backward of a
stage whose queries stay, how the keys of the first piece come and the gradients of the last one go.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from farspan.context.base import (
    Axes,
    Call,
    Gradients,
    Keys,
    Partial,
    Queries,
    Slots,
    Strategy,
    heads_of,
    no_gradients,
    nothing_seen,
    part_of,
    put_heads,
)
from farspan.context.parcels import (
    Consignment,
    Parcels,
    deliver,
    deliver_beside,
    pack,
    row_pieces,
    rows_by_shift,
    unpack,
    unpack_rows,
)

Own = tuple[Queries, Keys]
"""Queries and keys of this device's tokens, or of those that are brought together."""
Found = Any
"""What attention makes of them: `Partial` in forward, `Gradients` in backward."""


@runtime_checkable
class Stage(Protocol):
    """What is brought to where it is needed, and what is taken back."""

    brings_queries: ClassVar[bool]
    """Whether queries are brought, or keys alone."""

    @property
    def axes(self) -> Axes:
        """Mesh axes of the devices that take part."""
        ...

    @property
    def degree(self) -> int:
        """Devices along them."""
        ...

    def bring_slots(self, call: Call, slots: Slots) -> tuple[Slots, Slots]:
        """Tokens of queries and keys once they are brought."""
        ...

    def bring_queries(self, queries: Queries) -> Queries:
        """Brings queries (their slots aside)."""
        ...

    def bring_keys(self, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
        """Brings what stands for keys and values."""
        ...

    def inside(self, call: Call, num_heads: int) -> Call:
        """The call as the level inside sees it; `num_heads` query heads come to the stage."""
        ...

    def return_results(self, results: Partial, dtype: Any) -> Partial:
        """Takes outputs back to the devices of their queries, the output in `dtype`."""
        ...

    def return_gradients(self, call: Call, found: Gradients, queries: Queries, keys: Keys) -> Any:
        """Takes gradients back to where their queries, keys and weights came from."""
        ...

    def parcels_out(self, queries: Queries, keys: Keys) -> Parcels:
        """Packs what is brought; at shift s, what device r - s needs."""
        ...

    def brought(self, arrived: Parcels, queries: Queries) -> Own:
        """Unpacks it, tokens of device r + s at place s (slots aside)."""
        ...

    def parcels_home(self, found: Found, own: Own) -> tuple[Parcels, Any]:
        """Packs results, at shift s those for device r + s; and what stays. None may travel."""
        ...

    def taken_home(self, arrived: Parcels, stayed: Any, own: Own) -> Found:
        """Unpacks them: the results of this device's queries and keys."""
        ...


@dataclasses.dataclass(frozen=True)
class Staged:
    """See the module's docstring.

    Attributes:
      stage: What is brought.
      inner: Attends once it is there; on this device alone, if there are groups.
      head_groups: Groups of heads, one after the other; divides the kv heads.
    """

    stage: Stage
    inner: Strategy
    head_groups: int = 1

    def forward(self, call: Call, queries: Queries, keys: Keys, partial: Partial | None) -> Partial:
        """See `Strategy.forward`."""
        assert partial is None, "a stage brings all keys: there are no others to merge with"
        if self._in_groups:
            return _Stream(self, call, queries, keys, _forward_pieces).run((2, 1))
        found = self.inner.forward(
            self.stage.inside(call, queries.query.shape[2]), *self._bring(call, queries, keys), None
        )
        return self.stage.return_results(found, queries.query.dtype)

    def backward(
        self, call: Call, queries: Queries, keys: Keys, sums: Gradients | None
    ) -> Gradients:
        """See `Strategy.backward`."""
        assert sums is None, "as in forward"
        if self._in_groups:
            assert not call.expansion.weights, "groups of heads share what they are expanded from"
            axes = Gradients(2, (2,) * len(keys.arrays), ())
            stream = _Stream(self, call, queries, keys, _backward_pieces)
            return stream.run(axes) if self.stage.brings_queries else stream.walk()
        found = self.inner.backward(
            self.stage.inside(call, queries.query.shape[2]), *self._bring(call, queries, keys), None
        )
        return self.stage.return_gradients(call, found, queries, keys)

    @property
    def _in_groups(self) -> bool:
        return self.head_groups > 1 and self.stage.degree > 1

    def _bring(self, call: Call, queries: Queries, keys: Keys) -> Own:
        query_slots, key_slots = self.stage.bring_slots(call, queries.slots)
        return (
            dataclasses.replace(self.stage.bring_queries(queries), slots=query_slots),
            Keys(self.stage.bring_keys(keys.arrays), key_slots),
        )


Pieces = tuple[list[Any], Any, Callable[[Any, Any], tuple[Any, Any]], Callable[[Any, Any], Found]]
"""Inputs of pieces of work; a state; what makes of state and input the next state and a piece; and
how the last state and the pieces become one."""


@dataclasses.dataclass(frozen=True)
class _Stream:
    """Groups of heads, one after the other.

    Attributes:
      staged: The strategy.
      call: The call.
      queries, keys: Those of this device, all heads.
      pieces: Cuts the work of a group: `_forward_pieces` or `_backward_pieces`.
    """

    staged: Staged
    call: Call
    queries: Queries
    keys: Keys
    pieces: Callable[[Call, Strategy, Own, int], Pieces]

    def run(self, axes: Any) -> Found:
        """Attends; `axes` are the head axes of what is found."""
        stage, groups = self.staged.stage, self.staged.head_groups
        slots = self._slots()
        first = self._sent(0)

        def shapes() -> tuple[Any, Found]:
            own = self._own(0)
            home, stayed = stage.parcels_home(self._attend(0, slots, first.parcels, ())[1], own)
            return home, stage.taken_home(home, stayed, own)

        travels, one = jax.eval_shape(shapes)
        results = jax.tree.map(
            lambda x, axis: jnp.zeros(_times(groups, x.shape, axis), x.dtype), one, axes
        )

        def put(results: Found, group: Array | int, arrived: Parcels, stayed: Any) -> Found:
            found = stage.taken_home(arrived, stayed, self._own(group))
            return put_heads(results, found, axes, group)

        def step(group: Array | int, carry: Any, *, last: bool = False) -> Any:
            here, leaving, results = carry
            sent = [] if last else [self._sent(group + 1)]
            if leaving is not None:
                sent.append(self._consign(leaving[0], 1))
            arrived, found = self._attend(group, slots, here, sent)
            if leaving is not None:
                results = put(results, group - 1, arrived[-1], leaving[1])
            leaving = stage.parcels_home(found, self._own(group))
            if not travels:
                leaving, results = None, put(results, group, *leaving)
            return here if last else arrived[0], leaving, results

        carry, start = (deliver(first), None, results), 0
        if travels:
            carry, start = step(0, carry), 1
        carry = lax.fori_loop(start, groups - 1, step, carry)
        _, leaving, results = step(groups - 1, carry, last=True)
        if leaving is None:
            return results
        home = deliver(self._consign(leaving[0], 1))
        return put(results, groups - 1, home, leaving[1])

    def walk(self) -> Gradients:
        """Backward where queries stay: keys come when they are met, and their gradients then go.

        A group meets the keys of a few devices at a time: the next ones arrive meanwhile, and the
        gradients of the ones before go home. What nothing hides is how the very first keys come
        and the very last gradients go.
        """
        stage, groups = self.staged.stage, self.staged.head_groups
        units = _units(stage.degree)
        slots, length = self._slots(), self.queries.query.shape[1]

        def consigned(group: Array | int, unit: int) -> Consignment:
            parcel = pack(*self._own(group)[1].arrays)
            return self._consign(dict.fromkeys(units[unit], parcel), -1)

        def step(group: Array | int, unit: int, carry: Any, *, last: bool = False) -> Any:
            here, leaving, dquery, sums, (dqueries, dkeys) = carry
            queries = dataclasses.replace(self._own(group)[0], slots=slots[0])
            rows = slice(units[unit][0] * length, (units[unit][-1] + 1) * length)
            keys = Keys(unpack_rows(here), _of_rows(slots[1], lambda x: x[:, rows]))
            inside = self._inside(group)
            if unit == 0:
                dquery = no_gradients(inside, queries, keys).query
            following = (group, unit + 1) if unit + 1 < len(units) else (group + 1, 0)
            sent = [] if last else [consigned(*following)]
            if leaving is not None:
                sent.append(self._consign(leaving, 1))
            attend = _meet_keys(inside, self.staged.inner, queries)
            arrived, dquery, (made,) = deliver_beside(sent, attend, dquery, [keys])
            if leaving is not None:
                sums = _summed(arrived[-1], sums)
                if unit == 0:
                    dkeys, sums = put(dkeys, sums, group - 1), None
            if unit == len(units) - 1:
                dqueries = put(dqueries, dquery, group)
            here, leaving = here if last else arrived[0], rows_by_shift(made, units[unit])
            return here, leaving, dquery, sums, (dqueries, dkeys)

        def put(whole: Any, part: Any, group: Array | int) -> Any:
            return put_heads(whole, part, jax.tree.map(lambda _: 2, whole), group)

        def walk(group: Array | int, carry: Any) -> Any:
            for unit in range(1, len(units)):
                carry = step(group, unit, carry)
            return step(group + 1, 0, carry)

        nothing = no_gradients(self.call, self.queries, self.keys)
        carry = deliver(consigned(0, 0)), None, None, None, (nothing.query, nothing.keys)
        carry = step(0, 0, carry)
        carry = lax.fori_loop(0, groups - 1, walk, carry)
        for unit in range(1, len(units)):
            carry = step(groups - 1, unit, carry, last=unit == len(units) - 1)
        _, leaving, _, sums, (dqueries, dkeys) = carry
        sums = _summed(deliver(self._consign(leaving, 1)), sums)
        return Gradients(dqueries, put(dkeys, sums, groups - 1), ())

    def _own(self, group: Array | int) -> Own:
        groups = self.staged.head_groups
        some = tuple(part_of(x, group, groups, 2) for x in self.keys.arrays)
        return heads_of(self.queries, group, groups), Keys(some, self.keys.slots)

    def _sent(self, group: Array | int) -> Consignment:
        return self._consign(self.staged.stage.parcels_out(*self._own(group)), -1)

    def _consign(self, parcels: Parcels, sign: int) -> Consignment:
        return Consignment(parcels, self.staged.stage.axes, self.staged.stage.degree, sign)

    def _attend(
        self, group: Array | int, slots: tuple[Slots, Slots], here: Parcels, sent: Any
    ) -> tuple[list[Parcels], Found]:
        """One group's attention, and what arrives beside it."""
        own = self._own(group)
        queries, keys = self.staged.stage.brought(here, own[0])
        brought = dataclasses.replace(queries, slots=slots[0]), Keys(keys.arrays, slots[1])
        inside = self._inside(group)
        parcels = sum(len(one.parcels) - 1 for one in sent)  # one stays
        inputs, start, work, join = self.pieces(inside, self.staged.inner, brought, parcels)
        arrived, state, found = deliver_beside(sent, work, start, inputs)
        return arrived, join(state, found)

    def _inside(self, group: Array | int) -> Call:
        count = self.queries.query.shape[2] // self.staged.head_groups
        return self.staged.stage.inside(self.call.heads(group * count, count), count)

    def _slots(self) -> tuple[Slots, Slots]:
        """Slots of what is brought, each token's place said, those of device r + s at place s."""
        stage = self.staged.stage
        local = self.queries.query.shape[1]
        first = lax.axis_index(stage.axes) * local

        def ordered(slots: Slots, brought: bool) -> Slots:
            length = local * stage.degree if brought else local
            index = self.call.tokens(slots, length).index
            slots = dataclasses.replace(slots, index=index)
            return _of_rows(slots, lambda x: jnp.roll(x, -first, 1)) if brought else slots

        queries, keys = stage.bring_slots(self.call, self.queries.slots)
        return ordered(queries, stage.brings_queries), ordered(keys, True)


def _forward_pieces(call: Call, inner: Strategy, brought: Own, parcels: int) -> Pieces:
    """Pieces of queries, each against all keys."""
    queries, keys = brought

    def piece(first: int, stop: int) -> Queries:
        slots = _of_rows(queries.slots, lambda x: x[:, first:stop])
        return Queries(queries.query[:, first:stop], slots)

    def attend(_: None, some: Queries) -> tuple[None, Partial]:
        return None, inner.forward(call, some, keys, nothing_seen(call, some, keys))

    def join(_: None, found: list[Partial]) -> Partial:
        outs, lses = zip(*found, strict=True)
        return jnp.concatenate(outs, axis=1), jnp.concatenate(lses, axis=2)

    inputs = [piece(*edges) for edges in row_pieces(queries.query.shape[1], parcels)]
    return inputs, None, attend, join


def _backward_pieces(call: Call, inner: Strategy, brought: Own, parcels: int) -> Pieces:
    """Pieces of keys, each against all queries, whose gradients are the state."""
    queries, keys = brought

    def piece(first: int, stop: int) -> Keys:
        slots = _of_rows(keys.slots, lambda x: x[:, first:stop])
        return Keys(tuple(x[:, first:stop] for x in keys.arrays), slots)

    def join(dquery: Array, dkeys: list[tuple[Array, ...]]) -> Gradients:
        by_array = zip(*dkeys, strict=True)
        return Gradients(dquery, tuple(jnp.concatenate(x, axis=1) for x in by_array), ())

    inputs = [piece(*edges) for edges in row_pieces(keys.arrays[0].shape[1], parcels)]
    start = no_gradients(call, queries, keys).query
    return inputs, start, _meet_keys(call, inner, queries), join


def _meet_keys(
    call: Call, inner: Strategy, queries: Queries
) -> Callable[[Array, Keys], tuple[Array, tuple[Array, ...]]]:
    """What adds to the gradients of the queries, and makes those of some keys."""

    def attend(dquery: Array, some: Keys) -> tuple[Array, tuple[Array, ...]]:
        sums = dataclasses.replace(no_gradients(call, queries, some), query=dquery)
        found = inner.backward(call, queries, some, sums)
        return found.query, found.keys

    return attend


def _units(degree: int) -> list[range]:
    """Cuts shifts into those met at a time: two, so that four permutes travel meanwhile."""
    size = 2 if degree > 2 else 1
    return [range(first, min(first + size, degree)) for first in range(0, degree, size)]


def _summed(arrived: Parcels, sums: tuple[Array, ...] | None) -> tuple[Array, ...]:
    """Adds gradients that have come home to those that came before."""
    for shift in sorted(arrived):
        share = unpack(arrived[shift])
        sums = share if sums is None else tuple(map(jnp.add, sums, share))
    assert sums is not None
    return sums


def _times(count: int, shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    """A shape, `count` times as long along an axis."""
    return (*shape[:axis], shape[axis] * count, *shape[axis + 1 :])


def _of_rows(slots: Slots, change: Callable[[Array], Array]) -> Slots:
    """Slots with their rows changed; the numbers of their shards say nothing any more."""
    return Slots(
        slots.shards,
        *(
            None if x is None else change(x)
            for x in (slots.segment_ids, slots.index, slots.key_ranges)
        ),
    )
