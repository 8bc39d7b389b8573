"""Some heads at a time: what is expanded from a latent is held for those heads alone.

Every head of multi-head latent attention reads the same latent, so cutting the heads into groups
moves nothing more; it bounds what `Expansion.expand` makes of the keys that lie here.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax import lax
from jaxtyping import Array

from farspan.context.base import (
    Call,
    Gradients,
    Keys,
    Partial,
    Queries,
    Strategy,
    heads_of,
    no_gradients,
    nothing_seen,
    part_of,
    put_heads,
)


@dataclasses.dataclass(frozen=True)
class HeadGroups:
    """See the module's docstring.

    Attributes:
      inner: Attends with each group of heads.
      groups: Groups, one after the other; divides the query heads.
    """

    inner: Strategy
    groups: int

    def forward(self, call: Call, queries: Queries, keys: Keys, partial: Partial | None) -> Partial:
        """See `Strategy.forward`."""
        count = queries.query.shape[2] // self.groups
        axes = (2, 1)

        def body(group: Array, partial: Partial) -> Partial:
            part = self._part(partial, axes, group)
            some = heads_of(queries, group, self.groups)
            found = self.inner.forward(call.heads(group * count, count), some, keys, part)
            return put_heads(partial, found, axes, group)

        start = nothing_seen(call, queries, keys) if partial is None else partial
        return lax.fori_loop(0, self.groups, body, start)

    def backward(
        self, call: Call, queries: Queries, keys: Keys, sums: Gradients | None
    ) -> Gradients:
        """See `Strategy.backward`. Gradients of what all heads share run through the groups."""
        count = queries.query.shape[2] // self.groups
        weights = (1,) * len(call.expansion.weights)

        def body(group: Array, sums: Gradients) -> Gradients:
            some = heads_of(queries, group, self.groups)
            dquery = self._part(sums.query, 2, group)
            dweights = self._part(sums.weights, weights, group)
            found = self.inner.backward(
                call.heads(group * count, count), some, keys, Gradients(dquery, sums.keys, dweights)
            )
            return Gradients(
                put_heads(sums.query, found.query, 2, group),
                found.keys,
                put_heads(sums.weights, found.weights, weights, group),
            )

        start = no_gradients(call, queries, keys) if sums is None else sums
        return lax.fori_loop(0, self.groups, body, start)

    def _part(self, tree: Any, axes: Any, group: Array | int) -> Any:
        return jax.tree.map(lambda x, axis: part_of(x, group, self.groups, axis), tree, axes)
