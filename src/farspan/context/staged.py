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

from farspan.context.base import (
    Call,
    Gradients,
    Keys,
    Partial,
    Queries,
    Slots,
    Strategy,
    heads_of,
    part_of,
    put_heads,
)


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
            return heads_of(queries, group, groups), _heads_of_keys(keys, group, groups)

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

        def body(group: Array, carry: Any) -> Any:
            brought, results = carry
            following = bring(group + 1)
            return following, put_heads(results, run(group, brought), axes, group)

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
        return put_heads(results, run(last, brought), axes, last)


def _heads_of_keys(keys: Keys, group: Array | int, groups: int) -> Keys:
    return Keys(tuple(part_of(x, group, groups, 2) for x in keys.arrays), keys.slots)
