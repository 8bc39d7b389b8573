"""Cross-entropy over tiles of tokens, so that the logits of all tokens never exist at once."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Inexact, Int

from farspan.types import IGNORE_LABEL

TILE_ELEMENTS = 1 << 22
"""Logits that exist at once: 16 MiB in float32."""


def tile_tokens(num_tokens: int, vocab_size: int) -> int:
    """Tokens per tile, so that a tile's logits stay near `TILE_ELEMENTS`."""
    return max(1, min(num_tokens, TILE_ELEMENTS // vocab_size))


def cross_entropy_sums(
    hidden: Inexact[Array, "N M"],
    head: Inexact[Array, "M V"],
    labels: Int[Array, " N"],
    *,
    squares: bool = False,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Sums `-log softmax(hidden @ head)[label]` over tokens.

    Args:
      hidden: Final hidden states.
      head: Output head.
      labels: Next tokens, in `0..V - 1`, or `IGNORE_LABEL`.
      squares: Whether to sum `logsumexp(hidden @ head) ** 2` over labelled tokens as well, which a
        z-loss is made of.

    Returns:
      The sum over labelled tokens in nats, and the sum of squares or 0; float32.

    Cost:
      `2 N M V` FLOPs; `tile_tokens(N, V) * V` logits alive.
    """

    def add_tile(totals: tuple[Array, Array], tile: tuple[Array, Array]) -> tuple[Any, None]:
        hidden, labels = tile
        logits = _logits(hidden, head)
        kept = labels != IGNORE_LABEL
        target = jnp.take_along_axis(logits, jnp.where(kept, labels, 0)[:, None], 1)[:, 0]
        normalizer = jax.nn.logsumexp(logits, -1)
        loss, square = totals
        loss += jnp.where(kept, normalizer - target, 0).sum()
        if squares:
            square += jnp.where(kept, normalizer**2, 0).sum()
        return (loss, square), None

    zero = jnp.zeros((), jnp.float32)
    totals, _ = lax.scan(add_tile, (zero, zero), _tiles(hidden, labels, head))
    return totals


def cross_entropy_gradients(
    hidden: Inexact[Array, "N M"],
    head: Inexact[Array, "M V"],
    labels: Int[Array, " N"],
    dloss: Float[Array, ""],
    dsquares: Float[Array, ""] | None = None,
) -> tuple[Inexact[Array, "N M"], Float[Array, "M V"]]:
    """Gradients of `cross_entropy_sums`, its logits made anew tile by tile.

    Args:
      hidden: As in `cross_entropy_sums`.
      head: As in `cross_entropy_sums`.
      labels: As in `cross_entropy_sums`.
      dloss: Gradient of the first sum.
      dsquares: Gradient of the sum of squares, where there is one.

    Returns:
      `(dhidden, dhead)`, the latter float32.
    """

    def add_tile(dhead: Array, tile: tuple[Array, Array]) -> tuple[Array, Array]:
        hidden, labels = tile
        logits = _logits(hidden, head)
        chances = jax.nn.softmax(logits, -1)
        target = labels[:, None] == jnp.arange(head.shape[1])
        slope = (chances - target) * dloss
        if dsquares is not None:
            normalizer = jax.nn.logsumexp(logits, -1, keepdims=True)
            slope += 2 * dsquares * normalizer * chances
        kept = (labels != IGNORE_LABEL)[:, None]
        dlogits = jnp.where(kept, slope, 0).astype(hidden.dtype)
        dhidden = _dot(dlogits, head, (1, 1)).astype(hidden.dtype)
        return dhead + _dot(hidden, dlogits, (0, 0)), dhidden

    dhead, dhidden = lax.scan(
        add_tile, jnp.zeros(head.shape, jnp.float32), _tiles(hidden, labels, head)
    )
    return dhidden.reshape(-1, hidden.shape[1])[: len(hidden)], dhead


def _logits(hidden: Array, head: Array) -> Array:
    return _dot(hidden, head, (1, 0))


def _dot(left: Array, right: Array, axes: tuple[int, int]) -> Array:
    dims = (((axes[0],), (axes[1],)), ((), ()))
    return lax.dot_general(left, right, dims, preferred_element_type=jnp.float32)


def _tiles(hidden: Array, labels: Array, head: Array) -> tuple[Array, Array]:
    """Cuts tokens into tiles; what fills the last one is ignored."""
    tile = tile_tokens(len(hidden), head.shape[1])
    padding = -len(hidden) % tile
    hidden = jnp.pad(hidden, ((0, padding), (0, 0)))
    labels = jnp.pad(labels, (0, padding), constant_values=IGNORE_LABEL)
    return hidden.reshape(-1, tile, hidden.shape[1]), labels.reshape(-1, tile)
