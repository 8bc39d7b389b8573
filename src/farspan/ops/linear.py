"""Linear maps whose weight gradient is summed in the weight's own type."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Inexact


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def linear(einsum: str, x: Inexact[Array, ...], weight: Float[Array, ...]) -> Array:
    """`jnp.einsum(einsum, x, weight)`, computed and returned in the type of x.

    The gradient of the weight is accumulated in the weight's type: with float32 weights and
    bfloat16 activations, a plain einsum would round it to bfloat16.

    Args:
      einsum: Of two operands, without a letter twice in one of them: `"bsm,mhd->bshd"`.
      x: Activations.
      weight: Parameter, as wide as x or wider.

    Returns:
      The product, of x's type.
    """
    return jnp.einsum(einsum, x, weight.astype(x.dtype))


def linear_gradients(
    einsum: str, x: Array, weight: Array, dout: Array, accumulate: Any
) -> tuple[Array, Array]:
    """Gradients of `linear`.

    Args:
      einsum: As in `linear`.
      x: Activations.
      weight: Parameter, in the type of x.
      dout: Gradient of the product.
      accumulate: Type of the weight's gradient.

    Returns:
      `(dx, dweight)`.
    """
    inputs, out_axes = einsum.split("->")
    x_axes, weight_axes = inputs.split(",")
    dx = jnp.einsum(f"{out_axes},{weight_axes}->{x_axes}", dout, weight)
    dweight = jnp.einsum(
        f"{x_axes},{out_axes}->{weight_axes}", x, dout, preferred_element_type=accumulate
    )
    return dx, dweight


def _forward(einsum: str, x: Array, weight: Array) -> tuple[Array, tuple[Array, Array]]:
    return linear(einsum, x, weight), (x, weight)


def _backward(einsum: str, saved: tuple[Array, Array], dout: Array) -> tuple[Array, Array]:
    x, weight = saved
    return linear_gradients(einsum, x, weight.astype(x.dtype), dout, weight.dtype)


linear.defvjp(_forward, _backward)
