"""All-gather: every device fetches all keys and values, and keeps its own queries.

    forward   gather k, v        ->  attend: my queries x all keys
    backward  gather k, v again  ->  dq is mine; dk, dv of all keys are summed and scattered

Any number of heads works. Each device holds the keys and values of the whole row for the time of
one layer, which is what bounds the sequence. Sends (P - 1) / P * 2 S K D elements per device in
forward; twice that in backward, the gradients in float32.

Source: Llama 3, arXiv:2407.21783, section 3.3.2.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from farspan.context.base import Call, Metadata
from farspan.masks import Tokens


class AllGather:
    """See the module's docstring. With one device this is the kernel alone."""

    def forward(
        self, call: Call, query: Array, key: Array, value: Array, metadata: Metadata
    ) -> tuple[Array, Array]:
        """See `Strategy.forward`."""
        query_tokens = call.tokens(call.shard(), query.shape[1], metadata)
        key, value, metadata = _gather(call, (key, value, metadata))
        key_tokens = _all_tokens(call, key.shape[1], metadata)
        return call.kernel.forward(query, key, value, query_tokens, key_tokens, call.scores)

    def backward(
        self,
        call: Call,
        query: Array,
        key: Array,
        value: Array,
        dout: Array,
        lse: Array,
        delta: Array,
        metadata: Metadata,
    ) -> tuple[Array, Array, Array]:
        """See `Strategy.backward`."""
        query_tokens = call.tokens(call.shard(), query.shape[1], metadata)
        key, value, metadata = _gather(call, (key, value, metadata))
        key_tokens = _all_tokens(call, key.shape[1], metadata)
        dquery, dkey, dvalue = call.kernel.backward(
            query, key, value, dout, lse, delta, query_tokens, key_tokens, call.scores
        )
        return dquery, _sum_and_scatter(call, dkey), _sum_and_scatter(call, dvalue)


def _gather(call: Call, arrays: Any) -> Any:
    """Concatenates every shard's part of the sequence axis, in shard order."""
    if call.sequence_degree == 1:
        return arrays
    return jax.tree.map(lambda x: lax.all_gather(x, call.sequence_axes, axis=1, tiled=True), arrays)


def _sum_and_scatter(call: Call, x: Array) -> Array:
    """Sums over devices (in float32) and leaves each its own part of the sequence axis."""
    if call.sequence_degree == 1:
        return x
    return lax.psum_scatter(x, call.sequence_axes, scatter_dimension=1, tiled=True)


def _all_tokens(call: Call, seq_len: int, metadata: Metadata) -> Tokens:
    """Tokens of the gathered row: the shards' tokens, one after the other."""
    degree = call.sequence_degree
    shards = jnp.arange(degree, dtype=jnp.int32)
    tokens = jax.vmap(
        lambda shard: call.tokens(shard, seq_len // degree, Metadata(None, None)).index[0]
    )(shards)
    index = tokens.reshape(1, -1) if metadata.positions is None else metadata.positions
    return Tokens(index, metadata.segment_ids)
