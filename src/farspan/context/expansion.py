"""How keys and values are made from what travels: they themselves, or a latent that is smaller."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

Arrays = tuple[Array, ...]


@runtime_checkable
class Expansion(Protocol):
    """Makes keys and values from the arrays that strategies move, and carries gradients back."""

    @property
    def weights(self) -> Arrays:
        """Parameters that take part and get gradients."""
        ...

    def expand(self, arrays: Arrays) -> tuple[Array, Array]:
        """Makes keys `[B, L, K, D]` and values `[B, L, K, Dv]`."""
        ...

    def pull(self, arrays: Arrays, dkey: Array, dvalue: Array) -> tuple[Arrays, Arrays]:
        """Turns gradients of keys and values into those of the arrays and of the weights."""
        ...

    def heads(self, first: Array | int, count: int) -> Expansion:
        """The same for some of the query heads."""
        ...


@dataclasses.dataclass(frozen=True)
class Plain:
    """Keys and values are sent as they are."""

    weights: Arrays = ()

    def expand(self, arrays: Arrays) -> tuple[Array, Array]:
        """See `Expansion.expand`."""
        key, value = arrays
        return key, value

    def pull(self, arrays: Arrays, dkey: Array, dvalue: Array) -> tuple[Arrays, Arrays]:
        """See `Expansion.pull`."""
        del arrays
        return (dkey, dvalue), ()

    def heads(self, first: Array | int, count: int) -> Plain:
        """See `Expansion.heads`; the arrays have a head axis of their own."""
        del first, count
        return self


@dataclasses.dataclass(frozen=True)
class Latent:
    """Multi-head latent attention: every head's keys and values come from one latent per token.

    The arrays are the latent `[B, L, R]` and the rotary part of the key `[B, L, Dr]`, which all
    heads share. A key is `[latent @ key_up, rope_key]`, a value `latent @ value_up`.

    Attributes:
      weights: `key_up`, `[R, H, Dn]`, and `value_up`, `[R, H, Dv]`.

    Source: DeepSeek-V2, arXiv:2405.04434, section 2.1.
    """

    weights: Arrays

    def expand(self, arrays: Arrays) -> tuple[Array, Array]:
        """See `Expansion.expand`."""
        latent, rope_key = arrays
        key_up, value_up = self.weights
        key = _einsum("blr,rhd->blhd", latent, key_up)
        shared = jnp.broadcast_to(rope_key[:, :, None], (*key.shape[:3], rope_key.shape[-1]))
        return jnp.concatenate([key, shared], -1), _einsum("blr,rhd->blhd", latent, value_up)

    def pull(self, arrays: Arrays, dkey: Array, dvalue: Array) -> tuple[Arrays, Arrays]:
        """See `Expansion.pull`. In the gradients' own type, float32."""
        latent, _ = arrays
        key_up, value_up = self.weights
        width = key_up.shape[-1]
        dkey, drope = dkey[..., :width], dkey[..., width:].sum(2)
        latent, key_up, value_up = (x.astype(dkey.dtype) for x in (latent, key_up, value_up))
        dlatent = _einsum("blhd,rhd->blr", dkey, key_up)
        dlatent = dlatent + _einsum("blhd,rhd->blr", dvalue, value_up)
        dkey_up = _einsum("blr,blhd->rhd", latent, dkey)
        return (dlatent, drope), (dkey_up, _einsum("blr,blhd->rhd", latent, dvalue))

    def heads(self, first: Array | int, count: int) -> Latent:
        """See `Expansion.heads`."""
        some = [lax.dynamic_slice_in_dim(x, first, count, axis=1) for x in self.weights]
        return Latent(tuple(some))


def _einsum(form: str, left: Array, right: Array) -> Any:
    """An einsum that accumulates in float32 and comes in the type of its operands."""
    exact = left.dtype.itemsize >= 4
    multiply = functools.partial(
        jnp.einsum, precision=jax.lax.Precision.HIGHEST if exact else jax.lax.Precision.DEFAULT
    )
    accumulate = jnp.promote_types(left.dtype, jnp.float32)
    return multiply(form, left, right, preferred_element_type=accumulate).astype(left.dtype)
