"""Linear maps whose weight gradient is summed in float32."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Inexact


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def linear(spec: str, x: Inexact[Array, ...], weight: Float[Array, ...]) -> Array:
    """`jnp.einsum(spec, x, weight)`, computed and returned in the type of x.

    The gradient of the weight comes in the weight's own type. With float32 weights and bfloat16
    activations, partial sums over devices are thus added in float32; a plain einsum would round
    each device's sum to bfloat16 first.

    Args:
      spec: An einsum of two operands without repeated letters, such as `"bsm,mhd->bshd"`.
      x: Activations.
      weight: Parameter, float32 or wider than x.

    Returns:
      The product, of x's type.
    """
    return jnp.einsum(spec, x, weight.astype(x.dtype))


def _forward(spec: str, x: Array, weight: Array) -> tuple[Array, tuple[Array, Array]]:
    return linear(spec, x, weight), (x, weight)


def _backward(spec: str, saved: tuple[Array, Array], dout: Array) -> tuple[Array, Array]:
    x, weight = saved
    inputs, out_axes = spec.split("->")
    x_axes, weight_axes = inputs.split(",")
    dx = jnp.einsum(f"{out_axes},{weight_axes}->{x_axes}", dout, weight.astype(x.dtype))
    dweight = jnp.einsum(
        f"{x_axes},{out_axes}->{weight_axes}", x, dout, preferred_element_type=weight.dtype
    )
    return dx, dweight.astype(weight.dtype)


linear.defvjp(_forward, _backward)
