"""Root-mean-square normalisation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Inexact


def rms_norm(x: Inexact[Array, "... M"], weight: Float[Array, " M"], eps: float) -> Array:
    """Scales x to unit mean square along the last axis, then by `weight`.

    Args:
      x: Any float type.
      weight: One factor per feature.
      eps: Added to the mean square.

    Returns:
      The shape and type of x; computed in float32.

    Source: arXiv:1910.07467.
    """
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + eps)
    return (wide * scale * weight.astype(jnp.float32)).astype(x.dtype)
