"""Ulysses: an all-to-all turns "all heads of my tokens" into "my heads of all tokens".

    forward   q, k, v in (heads split, tokens joined)  ->  attend  ->  out, lse back
    backward  q, k, v, dout, lse, delta in             ->  attend  ->  dq, dk, dv back

The degree must divide the query heads. Where it does not divide the kv heads, each is sent to as
many devices as need it, and their gradients are summed in float32. Sends (2 H + 2 K) D S / P *
(P - 1) / P elements per device in forward.

The attention in the middle is itself a strategy: the kernel alone (`Ulysses`), or a ring (`usp`).

Source: DeepSpeed-Ulysses, arXiv:2309.14509.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from farspan.context.all_gather import AllGather
from farspan.context.base import Call, Metadata, Strategy
from farspan.schedules import kv_replicas


class Ulysses:
    """See the module's docstring.

    Args:
      inner: Attends once heads are split; by default the kernel alone.
    """

    def __init__(self, inner: Strategy | None = None) -> None:
        self._inner = AllGather() if inner is None else inner

    def forward(
        self, call: Call, query: Array, key: Array, value: Array, metadata: Metadata
    ) -> tuple[Array, Array]:
        """See `Strategy.forward`."""
        replicas = kv_replicas(key.shape[2], call.head_degree)
        out, lse = self._inner.forward(
            call,
            _split_heads(call, query),
            _split_heads(call, _replicate(key, replicas)),
            _split_heads(call, _replicate(value, replicas)),
            _join_tokens(call, metadata),
        )
        return _join_heads(call, out.astype(query.dtype)), _join_rows(call, lse)

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
        replicas = kv_replicas(key.shape[2], call.head_degree)
        dquery, dkey, dvalue = self._inner.backward(
            call,
            _split_heads(call, query),
            _split_heads(call, _replicate(key, replicas)),
            _split_heads(call, _replicate(value, replicas)),
            _split_heads(call, dout),
            _split_rows(call, lse),
            _split_rows(call, delta),
            _join_tokens(call, metadata),
        )
        if replicas == 1:  # complete: the rounding to the input's dtype may come before the wire
            dkey, dvalue = dkey.astype(key.dtype), dvalue.astype(value.dtype)
        return (
            _join_heads(call, dquery.astype(query.dtype)),
            _sum_replicas(_join_heads(call, dkey), replicas),
            _sum_replicas(_join_heads(call, dvalue), replicas),
        )


def _exchange(call: Call, x: Array, split_axis: int, join_axis: int) -> Array:
    if call.head_degree == 1:
        return x
    return lax.all_to_all(x, call.head_axes, split_axis, join_axis, tiled=True)


def _split_heads(call: Call, x: Array) -> Array:
    """`[B, Sl, H, D]` to `[B, Sl * degree, H / degree, D]`."""
    return _exchange(call, x, 2, 1)


def _join_heads(call: Call, x: Array) -> Array:
    """The inverse of `_split_heads`."""
    return _exchange(call, x, 1, 2)


def _split_rows(call: Call, x: Array) -> Array:
    """`[B, H, Sl]` to `[B, H / degree, Sl * degree]`."""
    return _exchange(call, x, 1, 2)


def _join_rows(call: Call, x: Array) -> Array:
    """The inverse of `_split_rows`."""
    return _exchange(call, x, 2, 1)


def _join_tokens(call: Call, metadata: Any) -> Any:
    """Metadata of all tokens that this group's devices hold."""
    if call.head_degree == 1:
        return metadata
    return jax.tree.map(lambda x: lax.all_gather(x, call.head_axes, axis=1, tiled=True), metadata)


def _replicate(x: Array, replicas: int) -> Array:
    """Repeats each kv head, so that every device's query heads find theirs beside them."""
    return x if replicas == 1 else jnp.repeat(x, replicas, axis=2)


def _sum_replicas(x: Array, replicas: int) -> Array:
    """The transpose of `_replicate`."""
    if replicas == 1:
        return x
    return x.reshape(*x.shape[:2], -1, replicas, x.shape[-1]).sum(3)
