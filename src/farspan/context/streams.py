"""Sends a ring's visitors in parts, each round a ring of links of its own."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
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

    A compiler keeps few transfers in flight, so arrays `[B, L, ...]` travel as one: those of 32
    bits, and with them pairs of elements of 16.

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
    rows: dict[Any, Array] = {}
    for dtype in dict.fromkeys(leaves[n].dtype for n in joined):
        flat = [
            leaves[n].reshape(*leaves[n].shape[:2], -1) for n in joined if leaves[n].dtype == dtype
        ]
        rows[dtype] = jnp.concatenate(flat, axis=2)
    words = {dtype: _as_words(row) for dtype, row in rows.items() if _has_words(row)}
    if words:
        sent = send(jnp.concatenate(list(words.values()), axis=2), 1)
        moved = _split(sent, [row.shape[2] for row in words.values()])
        for dtype, found in zip(words, moved, strict=True):
            rows[dtype] = _from_words(found, dtype)
    for dtype, row in rows.items():
        whole = row if dtype in words else send(row, 1)
        numbers = [n for n in joined if leaves[n].dtype == dtype]
        widths = [math.prod(leaves[n].shape[2:]) for n in numbers]
        for n, part in zip(numbers, _split(whole, widths), strict=True):
            arrived[n] = part.reshape(leaves[n].shape)
    return jax.tree.unflatten(form, arrived)


def _split(x: Array, widths: Sequence[int]) -> list[Array]:
    """Cuts the last dimension."""
    return jnp.split(x, list(itertools.accumulate(widths))[:-1], axis=-1)


def _has_words(x: Array) -> bool:
    return x.dtype.itemsize == 4 or (x.dtype.itemsize == 2 and x.shape[-1] % 2 == 0)


def _as_words(x: Array) -> Array:
    """The bits as uint32: of 16-bit elements, one of the first half with one of the second."""
    if x.dtype.itemsize == 4:
        return lax.bitcast_convert_type(x, jnp.uint32)
    bits = lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32)
    low, high = jnp.split(bits, 2, axis=-1)
    return low | (high << 16)


def _from_words(words: Array, dtype: Any) -> Array:
    """The inverse of `_as_words`."""
    if dtype.itemsize == 4:
        return lax.bitcast_convert_type(words, dtype)
    bits = jnp.concatenate([words & 0xFFFF, words >> 16], axis=-1).astype(jnp.uint16)
    return lax.bitcast_convert_type(bits, dtype)


def visitors_after(streams: Streams, visitors: Array, distance: int) -> Array:
    """Says who visits after a move, from who visits now; int32 `[streams]`, places in the ring."""
    orders = np.array(streams.orders, np.int32)
    rank = np.argsort(orders, axis=1).astype(np.int32)
    now: Any = jnp.asarray(rank)[jnp.arange(streams.count), visitors]
    return jnp.asarray(orders)[jnp.arange(streams.count), (now - distance) % streams.degree]
