"""Root-mean-square normalisation."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Inexact


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def rms_norm(x: Inexact[Array, "... M"], weight: Float[Array, " M"], eps: float) -> Array:
    """Scales x to unit mean square along the last axis, then by `weight`.

    Backward keeps x and the weight alone.

    Args:
      x: Any float type.
      weight: One factor per feature.
      eps: Added to the mean square.

    Returns:
      The shape and type of x; computed in float32.

    Source: arXiv:1910.07467.
    """
    wide = x.astype(jnp.float32)
    return (wide * _scale(wide, eps) * weight.astype(jnp.float32)).astype(x.dtype)


def rms_norm_gradients(
    x: Inexact[Array, "... M"],
    weight: Float[Array, " M"],
    eps: float,
    dout: Inexact[Array, "... M"],
) -> tuple[Inexact[Array, "... M"], Float[Array, " M"]]:
    """Gradients of `rms_norm`.

    Args:
      x: As in `rms_norm`.
      weight: As in `rms_norm`.
      eps: As in `rms_norm`.
      dout: Gradient of the result.

    Returns:
      `(dx, dweight)`: dx of x's type, dweight float32, summed over all but the last axis.
    """
    wide, dwide = x.astype(jnp.float32), dout.astype(jnp.float32)
    scale = _scale(wide, eps)
    normal = wide * scale
    dnormal = dwide * weight.astype(jnp.float32)
    along = jnp.mean(dnormal * normal, -1, keepdims=True)
    dx = (scale * (dnormal - normal * along)).astype(x.dtype)
    return dx, jnp.sum(dwide * normal, range(x.ndim - 1))


def _scale(wide: Array, eps: float) -> Array:
    return jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + eps)


def _forward(x: Array, weight: Array, eps: float) -> tuple[Array, tuple[Array, Array]]:
    return rms_norm(x, weight, eps), (x, weight)


def _backward(eps: float, saved: tuple[Array, Array], dout: Array) -> tuple[Array, Array]:
    x, weight = saved
    dx, dweight = rms_norm_gradients(x, weight, eps, dout)
    return dx, dweight.astype(weight.dtype)


rms_norm.defvjp(_forward, _backward)
