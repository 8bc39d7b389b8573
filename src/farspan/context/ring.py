"""Ring: keys and values travel from device to device; queries stay.

At step t device r computes with the keys of device r - t, and passes them on to r + 1 while it
computes. Partial outputs are merged in float32 through their log-sum-exp.

    forward   P steps, P - 1 transfers of (k, v)
    backward  the same, and (dk, dv) travel along behind the keys, in float32: they set out one
              step after home, gather every device's share, and arrive home after P - 1 transfers

Any number of heads works, and a device never holds more than its own and one visiting shard.
Sends (P - 1) / P * 2 S K D elements per device in forward.

Source: Ring Attention, arXiv:2310.01889.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from farspan.context.base import Call, Metadata
from farspan.ops.merge import merge


class Ring:
    """See the module's docstring."""

    def forward(
        self, call: Call, query: Array, key: Array, value: Array, metadata: Metadata
    ) -> tuple[Array, Array]:
        """See `Strategy.forward`."""
        length, last = query.shape[1], call.sequence_degree - 1
        query_tokens = call.tokens(call.shard(), length, metadata)

        def attend(partial: tuple[Array, Array], visiting: Any, step: Array | int) -> Any:
            key, value, metadata = visiting
            key_tokens = call.tokens(_source(call, step), length, metadata)

            def compute(partial: tuple[Array, Array]) -> tuple[Array, Array]:
                block = call.kernel.forward(
                    query, key, value, query_tokens, key_tokens, call.scores
                )
                return merge(partial, block)

            return lax.cond(
                call.any_visible(query_tokens, key_tokens), compute, lambda same: same, partial
            )

        def body(carry: tuple[Any, Any], step: Array) -> tuple[tuple[Any, Any], None]:
            partial, visiting = carry
            arriving = _pass_on(call, visiting)
            return (attend(partial, visiting, step), arriving), None

        batch, _, heads, _ = query.shape
        dtype = jnp.promote_types(query.dtype, jnp.float32)
        nothing = (
            jnp.zeros((batch, length, heads, value.shape[-1]), dtype),
            jnp.full((batch, heads, length), -jnp.inf, dtype),
        )
        carry = (nothing, (key, value, metadata))
        (partial, visiting), _ = lax.scan(body, carry, jnp.arange(last))
        return attend(partial, visiting, last)

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
        length, last = query.shape[1], call.sequence_degree - 1
        query_tokens = call.tokens(call.shard(), length, metadata)

        def add_share(gradients: Any, visiting: Any, step: Array | int) -> Any:
            key, value, metadata = visiting
            key_tokens = call.tokens(_source(call, step), length, metadata)

            def compute(gradients: Any) -> Any:
                share = call.kernel.backward(
                    query, key, value, dout, lse, delta, query_tokens, key_tokens, call.scores
                )
                return jax.tree.map(jnp.add, gradients, share)

            return lax.cond(
                call.any_visible(query_tokens, key_tokens), compute, lambda same: same, gradients
            )

        def body(carry: Any, step: Array) -> tuple[Any, None]:
            (dquery, *dvisiting), visiting = carry
            arriving = _pass_on(call, visiting)
            dquery, *dvisiting = add_share((dquery, *dvisiting), visiting, step)
            return ((dquery, *_pass_on(call, dvisiting)), arriving), None

        dtype = jnp.promote_types(query.dtype, jnp.float32)
        dquery, dkey, dvalue = (jnp.zeros(x.shape, dtype) for x in (query, key, value))
        home = (key, value, metadata)
        dquery, dhome_key, dhome_value = add_share((dquery, dkey, dvalue), home, 0)
        if last == 0:
            return dquery, dhome_key, dhome_value
        carry = ((dquery, dkey, dvalue), _pass_on(call, home))
        (gradients, visiting), _ = lax.scan(body, carry, jnp.arange(1, last))
        dquery, *dvisiting = add_share(gradients, visiting, last)
        dkey, dvalue = _pass_on(call, dvisiting)
        return dquery, dhome_key + dkey, dhome_value + dvalue


def _source(call: Call, step: Array | int) -> Array | int:
    """The shard whose keys visit this device at a step."""
    return (call.shard() - step) % call.sequence_degree


def _pass_on(call: Call, arrays: Any) -> Any:
    """Sends arrays to the next device of the ring and receives the previous one's."""
    degree = call.sequence_degree
    following = [(shard, (shard + 1) % degree) for shard in range(degree)]
    return jax.tree.map(lambda x: lax.ppermute(x, call.sequence_axes, following), arrays)
