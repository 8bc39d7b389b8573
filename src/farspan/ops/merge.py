"""Merging partial attention over disjoint sets of keys (online softmax)."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float


def merge(
    first: tuple[Float[Array, "B S H Dv"], Float[Array, "B H S"]],
    second: tuple[Float[Array, "B S H Dv"], Float[Array, "B H S"]],
) -> tuple[Float[Array, "B S H Dv"], Float[Array, "B H S"]]:
    """Merges two partial results into the result over both sets of keys.

    With `lse = log(exp(lse1) + exp(lse2))`, `out = exp(lse1 - lse) out1 + exp(lse2 - lse) out2`.

    Args:
      first: Normalised output and natural log-sum-exp over some keys, float32 or float64; lse is
        -inf and out 0 where a query sees none of them.
      second: The same over other keys.

    Returns:
      `(out, lse)` over both, in the same form.

    Source: Ring Attention, arXiv:2310.01889; FlashAttention-2, arXiv:2307.08691.
    """
    (first_out, first_lse), (second_out, second_lse) = first, second
    greatest = jnp.maximum(first_lse, second_lse)
    shift = jnp.where(jnp.isneginf(greatest), 0, greatest)
    first_weight, second_weight = jnp.exp(first_lse - shift), jnp.exp(second_lse - shift)
    total = first_weight + second_weight
    scale = 1 / jnp.where(total == 0, 1, total)
    out = (
        _per_head(first_weight * scale) * first_out + _per_head(second_weight * scale) * second_out
    )
    return out, shift + jnp.log(total)


def add_sinks(
    out: Float[Array, "B S H Dv"], lse: Float[Array, "B H S"], sinks: Float[Array, " H"]
) -> tuple[Float[Array, "B S H Dv"], Float[Array, "B H S"]]:
    """Lets a sink into the softmax's denominator, once, after all keys have been merged.

    Args:
      out: Normalised output over all keys.
      lse: Its log-sum-exp.
      sinks: A score per query head that every query sees and that has value 0.

    Returns:
      `(out, lse)` with the sink counted.
    """
    total = jnp.logaddexp(lse, sinks.astype(lse.dtype)[:, None])
    return out * _per_head(jnp.exp(lse - total)), total


def _per_head(x: Float[Array, "B H S"]) -> Float[Array, "B S H 1"]:
    return x.swapaxes(1, 2)[..., None]
