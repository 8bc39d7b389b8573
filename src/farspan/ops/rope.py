"""Rotary position embedding."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Inexact, Int


def rope_tables(
    positions: Int[Array, "B S"], head_dim: int, theta: float
) -> tuple[Float[Array, "B S half"], Float[Array, "B S half"]]:
    """Cosines and sines of the angles by which pairs of features turn.

    Args:
      positions: Place of each token in its document, whatever order the row is stored in.
      head_dim: Width of a head, even.
      theta: Base of the frequencies.

    Returns:
      `(cos, sin)`, float32 `[B, S, head_dim // 2]`. Angles are made in float32: a position of 16
      million is exact there, and one in bfloat16 would be off by 2^16.

    Source: arXiv:2104.09864.
    """
    frequencies = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angles = positions.astype(jnp.float32)[..., None] * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def apply_rope(
    x: Inexact[Array, "B S H D"], tables: tuple[Float[Array, "B S half"], Float[Array, "B S half"]]
) -> Inexact[Array, "B S H D"]:
    """Turns feature i with feature i + D / 2 (the half-split form of Hugging Face's Llama).

    Args:
      x: Queries or keys.
      tables: From `rope_tables`.

    Returns:
      The shape and type of x; computed in float32.
    """
    cos, sin = (table[:, :, None] for table in tables)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)
    return turned.astype(x.dtype)
