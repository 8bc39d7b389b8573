"""What every strategy is given, and what it must provide.

A strategy is one level of a composition: it moves queries or keys and leaves the rest to the level
inside it, down to `Local`, which computes. `usp` is a head exchange around a ring; a ring over slow
links around a ring over fast ones is a ring in a ring.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from farspan.context.expansion import Expansion
from farspan.kernels import Kernel, Scores
from farspan.layouts import Layout
from farspan.masks import Tokens, classify, key_extents, query_extents
from farspan.ops.merge import merge
from farspan.types import Leaf

Axes = tuple[str, ...]
Partial = tuple[Array, Array]
"""Output `[B, Sl, H, Dv]` and log-sum-exp `[B, H, Sl]` over the keys met so far, float32."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Slots:
    """What is known of the tokens in a run of slots; travels with them.

    Attributes:
      shards: Numbers of the sequence shards whose tokens these are, one after the other, `[n]`.
      segment_ids: int32 `[B, L]`, or None: each row is one document without padding.
      index: Place of each token in its row, int32 `[B, L]`, or None: the layout says it.
      key_ranges: Ranges of keys that each query sees, int32 `[B, L, ranges, 2]`, or None.
    """

    shards: Leaf
    segment_ids: Leaf | None = None
    index: Leaf | None = None
    key_ranges: Leaf | None = None

    def of_keys(self) -> Slots:
        """The same without what only queries need."""
        return dataclasses.replace(self, key_ranges=None)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Queries:
    """Queries, and in backward what belongs to them.

    Attributes:
      query: `[B, L, H, D]`.
      slots: Their tokens.
      dout: Gradient of the output, `[B, L, H, Dv]`.
      lse: Log-sum-exp over all keys, float32 `[B, H, L]`.
      delta: As in `Kernel.backward`, float32 `[B, H, L]`.
    """

    query: Leaf
    slots: Slots
    dout: Leaf = None
    lse: Leaf = None
    delta: Leaf = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Keys:
    """What stands for keys and values.

    Attributes:
      arrays: What `Expansion.expand` makes keys and values from: those themselves, `[B, L, K, D]`
        and `[B, L, K, Dv]`, or arrays `[B, L, R]` without a head axis.
      slots: Their tokens.
    """

    arrays: tuple[Leaf, ...]
    slots: Slots


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Gradients:
    """Sums of gradients, float32.

    Attributes:
      query: Like the queries.
      keys: Like `Keys.arrays`.
      weights: Like `Expansion.weights`.
    """

    query: Leaf
    keys: tuple[Leaf, ...]
    weights: tuple[Leaf, ...]


@dataclasses.dataclass(frozen=True)
class Call:
    """One attention call, as one device sees it.

    Attributes:
      kernel: Computes blocks.
      scores: Mask, scale, and what else makes a weight.
      layout: Which tokens each sequence shard holds.
      num_shards: Sequence shards.
      expansion: Makes keys and values from what is sent.
      in_order: Whether collectives that share no data must be kept apart: XLA's CPU runtime may
        run a loop of collectives beside others that do not depend on it, and mix the two up.
    """

    kernel: Kernel
    scores: Scores
    layout: Layout
    num_shards: int
    expansion: Expansion
    in_order: bool = False

    def tokens(self, slots: Slots, length: int) -> Tokens:
        """Tokens of a run of `length` slots."""
        index = slots.index
        if index is None:
            shard_len = length // slots.shards.shape[0]
            run = jnp.arange(shard_len, dtype=jnp.int32)
            seq_len = shard_len * self.num_shards
            shards = slots.shards[:, None]
            index = self.layout.token_index(shards, seq_len, self.num_shards, run)
            index = jnp.asarray(index, jnp.int32).reshape(1, length)
        return Tokens(index, slots.segment_ids, slots.key_ranges)

    def heads(self, first: Array | int, count: int) -> Call:
        """The same call for some of the query heads."""
        scores, expansion = self.scores, self.expansion
        slopes, dropout = scores.alibi_slopes, scores.dropout
        if slopes is not None:
            slopes = lax.dynamic_slice_in_dim(slopes, first, count)
        if dropout is not None:
            heads = lax.dynamic_slice_in_dim(dropout.heads, first, count)
            dropout = dataclasses.replace(dropout, heads=heads)
        scores = dataclasses.replace(scores, alibi_slopes=slopes, dropout=dropout)
        expansion = expansion.heads(first, count)
        return dataclasses.replace(self, scores=scores, expansion=expansion)

    def after(self, arrays: Tree, before: Any) -> Tree:
        """The arrays, not to be used before `before` is there, where order must be kept."""
        return wait_for(arrays, before) if self.in_order else arrays


@runtime_checkable
class Strategy(Protocol):
    """Brings queries and keys together. Runs on each device, inside `jax.shard_map`.

    Arrays are this device's shards. Neither direction keeps anything for the other: backward
    fetches keys and values anew.
    """

    def forward(self, call: Call, queries: Queries, keys: Keys, partial: Partial | None) -> Partial:
        """Attends over the keys that the level reaches.

        Args:
          call: What is the same on all levels.
          queries: The queries.
          keys: The keys to start from.
          partial: Results over other keys, to be merged with these; None if there are none.

        Returns:
          The merged output and log-sum-exp.
        """
        ...

    def backward(
        self, call: Call, queries: Queries, keys: Keys, sums: Gradients | None
    ) -> Gradients:
        """Adds the gradients of the same pairs.

        Args:
          call: As in `forward`.
          queries: With `dout`, `lse` and `delta`.
          keys: As in `forward`.
          sums: Gradients so far of these queries, these keys and the weights, or None.

        Returns:
          The sums with these pairs added.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Local:
    """The innermost level: computes what lies on this device."""

    def forward(self, call: Call, queries: Queries, keys: Keys, partial: Partial | None) -> Partial:
        """See `Strategy.forward`. Keys that no query sees are skipped."""
        query_tokens, key_tokens = _tokens(call, queries, keys)

        def attend() -> Partial:
            key, value = call.expansion.expand(keys.arrays)
            return call.kernel.forward(
                queries.query, key, value, query_tokens, key_tokens, call.scores
            )

        if partial is None:
            return attend()
        return lax.cond(
            _any_visible(call, query_tokens, key_tokens),
            lambda partial: merge(partial, attend()),
            lambda same: same,
            partial,
        )

    def backward(
        self, call: Call, queries: Queries, keys: Keys, sums: Gradients | None
    ) -> Gradients:
        """See `Strategy.backward`."""
        query_tokens, key_tokens = _tokens(call, queries, keys)

        def share() -> Gradients:
            key, value = call.expansion.expand(keys.arrays)
            dquery, dkey, dvalue = call.kernel.backward(
                queries.query, key, value, queries.dout, queries.lse, queries.delta,
                query_tokens, key_tokens, call.scores,
            )  # fmt: skip
            return Gradients(dquery, *call.expansion.pull(keys.arrays, dkey, dvalue))

        if sums is None:
            return share()
        return lax.cond(
            _any_visible(call, query_tokens, key_tokens),
            lambda sums: jax.tree.map(jnp.add, sums, share()),
            lambda same: same,
            sums,
        )


Tree = TypeVar("Tree")


def part_of(x: Array, group: Array | int, groups: int, axis: int) -> Array:
    """One of `groups` equal parts of an array along an axis."""
    if groups == 1:
        return x
    count = x.shape[axis] // groups
    return lax.dynamic_slice_in_dim(x, group * count, count, axis)


def put_heads(whole: Tree, parts: Any, axes: Any, group: Array | int) -> Tree:
    """Puts arrays of one group of heads to their place in those of all heads."""

    def put(whole: Array, part: Array, axis: int) -> Array:
        return lax.dynamic_update_slice_in_dim(whole, part, group * part.shape[axis], axis)

    return jax.tree.map(put, whole, parts, axes)


def heads_of(queries: Queries, group: Array | int, groups: int) -> Queries:
    """The queries of one of `groups` groups of heads."""

    def part(x: Any, axis: int) -> Any:
        return None if x is None else part_of(x, group, groups, axis)

    return dataclasses.replace(
        queries,
        query=part(queries.query, 2),
        dout=part(queries.dout, 2),
        lse=part(queries.lse, 1),
        delta=part(queries.delta, 1),
    )


def nothing_seen(call: Call, queries: Queries, keys: Keys) -> Partial:
    """The result over no keys."""
    batch, length, heads, _ = queries.query.shape
    dtype = jnp.promote_types(queries.query.dtype, jnp.float32)
    value = jax.eval_shape(call.expansion.expand, keys.arrays)[1]
    return (
        jnp.zeros((batch, length, heads, value.shape[-1]), dtype),
        jnp.full((batch, heads, length), -jnp.inf, dtype),
    )


def no_gradients(call: Call, queries: Queries, keys: Keys) -> Gradients:
    """Sums of gradients over no pairs."""
    dtype = jnp.promote_types(queries.query.dtype, jnp.float32)

    def zeros(arrays: Any) -> Any:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, dtype), arrays)

    return Gradients(zeros(queries.query), zeros(keys.arrays), zeros(call.expansion.weights))


def wait_for(arrays: Tree, before: Any) -> Tree:
    """Arrays that depend on `before` by data: a 0 that is made of it is added.

    An optimization barrier would not do: it is dropped before XLA's CPU runtime orders anything.
    The 0 is made of bits and not of a number, which might be NaN.
    """
    first = jax.tree.leaves(before)[0]
    some: Float[Array, ""] = first[(0,) * first.ndim].astype(jnp.float32)
    bits = lax.bitcast_convert_type(some, jnp.int32)
    zero = jnp.minimum(bits & jnp.int32(2**31 - 1), 0)
    return jax.tree.map(lambda x: x + zero.astype(x.dtype), arrays)


def _tokens(call: Call, queries: Queries, keys: Keys) -> tuple[Tokens, Tokens]:
    return (
        call.tokens(queries.slots, queries.query.shape[1]),
        call.tokens(keys.slots, keys.arrays[0].shape[1]),
    )


def _any_visible(call: Call, query_tokens: Tokens, key_tokens: Tokens) -> Array:
    """False only if no query sees any of the keys: the step can be skipped."""
    query = query_extents(call.scores.mask, query_tokens, _coarse_block(query_tokens.length))
    key = key_extents(key_tokens, _coarse_block(key_tokens.length))
    query = jax.tree.map(lambda x: x[:, :, None], query)
    key = jax.tree.map(lambda x: x[:, None, :], key)
    possible, _ = classify(query, key)
    return possible.any()


def _coarse_block(length: int) -> int:
    """Block length that cuts a shard into at most 64 equal blocks."""
    return next(length // n for n in range(min(64, length), 0, -1) if length % n == 0)
