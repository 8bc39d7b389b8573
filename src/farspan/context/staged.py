"""Strategies that bring everything together first, attend, and take results back.

A stage says what is brought: all keys to every device (`all_gather`), or all tokens of some heads
(`ulysses`). Heads are independent, so the work may be cut into groups of heads: while one group
attends, the next one's keys are on their way, and no more than two groups' keys are held.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from farspan.context.base import Call, Gradients, Keys, Partial, Queries, Slots, Strategy


@runtime_checkable
class Stage(Protocol):
    """What is brought to where it is needed, and what is taken back."""

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


@dataclasses.dataclass(frozen=True)
class Staged:
    """See the module's docstring.

    Attributes:
      stage: What is brought.
      inner: Attends once it is there.
      head_groups: Groups of heads, one after the other; divides the kv heads.
    """

    stage: Stage
    inner: Strategy
    head_groups: int = 1

    def forward(self, call: Call, queries: Queries, keys: Keys, partial: Partial | None) -> Partial:
        """See `Strategy.forward`."""
        assert partial is None, "a stage brings all keys: there are no others to merge with"

        def attend(call: Call, brought: tuple[Queries, Keys], own: tuple[Queries, Keys]) -> Any:
            inside = self.stage.inside(call, own[0].query.shape[2])
            found = self.inner.forward(inside, *brought, None)
            return self.stage.return_results(found, queries.query.dtype)

        return self._by_groups(call, queries, keys, attend, axes=(2, 1))

    def backward(
        self, call: Call, queries: Queries, keys: Keys, sums: Gradients | None
    ) -> Gradients:
        """See `Strategy.backward`."""
        assert sums is None, "as in forward"

        def attend(call: Call, brought: tuple[Queries, Keys], own: tuple[Queries, Keys]) -> Any:
            inside = self.stage.inside(call, own[0].query.shape[2])
            found = self.inner.backward(inside, *brought, None)
            return self.stage.return_gradients(call, found, *own)

        axes = Gradients(2, (2,) * len(keys.arrays), (1,) * len(call.expansion.weights))
        return self._by_groups(call, queries, keys, attend, axes=axes)

    def _by_groups(self, call: Call, queries: Queries, keys: Keys, attend: Any, axes: Any) -> Any:
        """Runs `attend` on every group of heads and joins the results along their head axes."""
        query_slots, key_slots = self.stage.bring_slots(call, queries.slots)
        groups = self.head_groups

        def own(group: Array | int) -> tuple[Queries, Keys]:
            return _heads_of_queries(queries, group, groups), _heads_of_keys(keys, group, groups)

        def bring(group: Array | int) -> tuple[Queries, Keys]:
            some_queries, some_keys = own(group)
            return (
                dataclasses.replace(self.stage.bring_queries(some_queries), slots=query_slots),
                Keys(self.stage.bring_keys(some_keys.arrays), key_slots),
            )

        def run(group: Array | int, brought: tuple[Queries, Keys]) -> Any:
            count = queries.query.shape[2] // groups
            return attend(call.heads(group * count, count), brought, own(group))

        if groups == 1:
            return attend(call, bring(0), (queries, keys))

        def put(results: Any, found: Any, group: Array | int) -> Any:
            def at(whole: Array, part: Array, axis: int) -> Array:
                start = group * part.shape[axis]
                return lax.dynamic_update_slice_in_dim(whole, part, start, axis)

            return jax.tree.map(at, results, found, axes)

        def body(group: Array, carry: Any) -> Any:
            brought, results = carry
            following = bring(group + 1)
            return following, put(results, run(group, brought), group)

        shapes = jax.eval_shape(lambda: run(0, bring(0)))
        nothing = jax.tree.map(
            lambda x, axis: jnp.zeros(
                tuple(n * groups if i == axis else n for i, n in enumerate(x.shape)), x.dtype
            ),
            shapes,
            axes,
        )
        last = groups - 1
        brought, results = lax.fori_loop(0, last, body, (bring(0), nothing))
        return put(results, run(last, brought), last)


def _part(x: Array | None, group: Array | int, groups: int, axis: int) -> Any:
    if x is None or groups == 1:
        return x
    count = x.shape[axis] // groups
    return lax.dynamic_slice_in_dim(x, group * count, count, axis)


def _heads_of_queries(queries: Queries, group: Array | int, groups: int) -> Queries:
    return dataclasses.replace(
        queries,
        query=_part(queries.query, group, groups, 2),
        dout=_part(queries.dout, group, groups, 2),
        lse=_part(queries.lse, group, groups, 1),
        delta=_part(queries.delta, group, groups, 1),
    )


def _heads_of_keys(keys: Keys, group: Array | int, groups: int) -> Keys:
    return Keys(tuple(_part(x, group, groups, 2) for x in keys.arrays), keys.slots)
