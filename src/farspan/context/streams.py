"""Sends a ring's visitors in parts, each round a ring of links of its own."""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from farspan.context.base import Axes
from farspan.dist import Streams

Tree = TypeVar("Tree")


def send_in_streams(x: Tree, token_axes: Any, axes: Axes, streams: Streams, distance: int) -> Tree:
    """Inside shard_map: sends equal parts of each array's tokens along different streams.

    Arrays `[B, L, ...]` of one type travel as one: a compiler keeps few transfers in flight.

    Args:
      x: Arrays.
      token_axes: The dimension of each that counts tokens.
      axes: Mesh axes of the ring.
      streams: The orders.
      distance: Places to move by along each.

    Returns:
      What arrives: each part is of the shard from which its stream brings it.
    """

    def send(x: Array, axis: int) -> Array:
        moved = [
            lax.ppermute(part, axes, streams.pairs(stream, distance))
            for stream, part in enumerate(jnp.split(x, streams.count, axis))
        ]
        return jnp.concatenate(moved, axis)

    leaves, form = jax.tree.flatten(x)
    places = jax.tree.leaves(token_axes)
    joined = [n for n, leaf in enumerate(leaves) if leaf.ndim > 2 and places[n] == 1]
    arrived = [None if n in joined else send(leaf, places[n]) for n, leaf in enumerate(leaves)]
    for dtype in dict.fromkeys(leaves[n].dtype for n in joined):
        numbers = [n for n in joined if leaves[n].dtype == dtype]
        flat = [leaves[n].reshape(*leaves[n].shape[:2], -1) for n in numbers]
        ends = np.cumsum([each.shape[2] for each in flat])[:-1]
        moved = jnp.split(send(jnp.concatenate(flat, axis=2), 1), ends, axis=2)
        for n, each in zip(numbers, moved, strict=True):
            arrived[n] = each.reshape(leaves[n].shape)
    return jax.tree.unflatten(form, arrived)


def visitors_after(streams: Streams, visitors: Array, distance: int) -> Array:
    """Says who visits after a move, from who visits now; int32 `[streams]`, places in the ring."""
    orders = np.array(streams.orders, np.int32)
    rank = np.argsort(orders, axis=1).astype(np.int32)
    now: Any = jnp.asarray(rank)[jnp.arange(streams.count), visitors]
    return jnp.asarray(orders)[jnp.arange(streams.count), (now - distance) % streams.degree]
