"""Sends a ring's visitors in parts, each round a ring of links of its own."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from farspan.context.base import Axes
from farspan.context.parcels import pack, unpack
from farspan.dist import Streams

Tree = TypeVar("Tree")


def send_in_streams(x: Tree, token_axes: Any, axes: Axes, streams: Streams, distance: int) -> Tree:
    """Inside shard_map: sends equal parts of each array's tokens along different streams.

    A compiler keeps few transfers in flight, so all arrays `[B, L, ...]` of a part travel as one.

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
    packed = [n for n, leaf in enumerate(leaves) if leaf.ndim > 2 and places[n] == 1]
    arrived = [None if n in packed else send(leaf, places[n]) for n, leaf in enumerate(leaves)]
    if packed:
        parcel = pack(*(leaves[n] for n in packed))
        parcel = dataclasses.replace(parcel, wire=send(parcel.wire, 1))
        for n, leaf in zip(packed, unpack(parcel), strict=True):
            arrived[n] = leaf
    return jax.tree.unflatten(form, arrived)


def visitors_after(streams: Streams, visitors: Array, distance: int) -> Array:
    """Says who visits after a move, from who visits now; int32 `[streams]`, places in the ring."""
    orders = np.array(streams.orders, np.int32)
    rank = np.argsort(orders, axis=1).astype(np.int32)
    now: Any = jnp.asarray(rank)[jnp.arange(streams.count), visitors]
    return jnp.asarray(orders)[jnp.arange(streams.count), (now - distance) % streams.degree]
