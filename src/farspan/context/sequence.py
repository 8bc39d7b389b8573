"""Putting a batch into layout order on devices, and back into the order of the text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from farspan.context.parallel import ContextParallel
from farspan.context.placement import Placement


def shard_sequence(
    arrays: Any, context: ContextParallel, placement: Placement | None = None
) -> Any:
    """Permutes arrays into the order of the layout and places them on the mesh.

    Rows whose length the layout cannot cut are padded at their end with zeros; segment id 0 marks
    padding, so segment ids must then be among the arrays. Call it outside jit: inside, permuting
    a sharded axis gathers the whole row on every device.

    Args:
      arrays: A pytree of arrays `[B, S, ...]`, global, in the order of the text, all of one `S`.
        `B` is a multiple of the mesh's batch axes.
      context: Mesh, strategy and layout.
      placement: From `place_rows`, for the layout `balanced`.

    Returns:
      The pytree with each array `[B, S', ...]`, `S'` the next multiple of
      `context.sequence_multiple`, sharded along batch and sequence.

    Raises:
      ValueError: If lengths differ, or padding is needed and no integer array (segment ids) could
        mark it.
    """
    leaves = jax.tree.leaves(arrays)
    lengths = {x.shape[1] for x in leaves}
    if len(lengths) != 1:
        raise ValueError(
            "shard_sequence: arrays must share one sequence length along axis 1, "
            f"got {sorted(lengths)}"
        )
    seq_len = lengths.pop()
    padding = -seq_len % context.sequence_multiple
    if padding and not any(np.issubdtype(x.dtype, np.integer) for x in leaves):
        raise ValueError(
            f"shard_sequence: layout {context.layout} with {context.degrees.total} shards needs "
            f"seq_len to be a multiple of {context.sequence_multiple}, got seq_len={seq_len}; pass "
            "segment_ids (ones for one document) along with the other arrays, so that padding is "
            "added and marked with id 0, or pad yourself"
        )

    def place(x: Any) -> jax.Array:
        xp = np if isinstance(x, np.ndarray) else jnp
        x = xp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2))
        return jax.device_put(take(x), context.sharding(x.ndim))

    take = _reorder(context, placement, seq_len + padding, inverse=False)
    return jax.tree.map(place, arrays)


def unshard_sequence(
    arrays: Any,
    context: ContextParallel,
    seq_len: int | None = None,
    placement: Placement | None = None,
) -> Any:
    """Puts arrays back into the order of the text: the inverse of `shard_sequence`.

    Args:
      arrays: A pytree of arrays `[B, S', ...]` in layout order.
      context: As given to `shard_sequence`.
      seq_len: Length before padding, to cut padding off; None keeps it.
      placement: As given to `shard_sequence`.

    Returns:
      The pytree with each array `[B, seq_len or S', ...]`, in the order of the text.
    """
    placed = jax.tree.leaves(arrays)[0].shape[1]
    restore = _reorder(context, placement, placed, inverse=True)
    return jax.tree.map(lambda x: restore(x)[:, :seq_len], arrays)


def _reorder(
    context: ContextParallel, placement: Placement | None, seq_len: int, *, inverse: bool
) -> Callable[[Any], Any]:
    """Puts the sequence axis into the order of the layout, or back."""
    if placement is not None:
        placement.check(context, seq_len)
    if placement is None or placement.token_index is None:
        order = context.layout_object.permutation(seq_len, context.degrees.sequence)
        order = np.argsort(order) if inverse else order
        return lambda x: x.take(order, axis=1)
    orders = np.asarray(placement.token_index)
    orders = np.argsort(orders, axis=1) if inverse else orders

    def take(x: Any) -> Any:
        xp = np if isinstance(x, np.ndarray) else jnp
        return xp.take_along_axis(x, orders.reshape(*orders.shape, *[1] * (x.ndim - 2)), axis=1)

    return take
