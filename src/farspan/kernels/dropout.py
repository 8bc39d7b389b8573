"""Attention dropout: one function of the seed and the pair, wherever the pair is computed."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from farspan.types import Leaf

_ODD = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F)  # odd: multiplying by one loses nothing


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Dropout:
    """Drops each weight of the softmax with the same probability, and scales up those it keeps.

    What is dropped depends on the seed, the row, the query head and the places of query and key
    alone. So no strategy, layout or degree changes it, and backward makes it anew.

    Attributes:
      seed: uint32 scalar.
      rows: Number of each local row in the global batch, int32 `[B]`.
      heads: Number of each local query head among all, int32 `[H]`.
      rate: Probability to drop, in (0, 1). Static.
    """

    seed: Leaf
    rows: Leaf
    heads: Leaf
    rate: float = dataclasses.field(metadata={"static": True})

    def keeps(self, row: Any, head: Any, query_index: Any, key_index: Any) -> jax.Array:
        """Says which weights are kept (and multiplied with `1 / (1 - rate)`).

        Args:
          row: Numbers of rows in the global batch, an integer array of any shape.
          head: Numbers of query heads; broadcasts against `row`, as do the following.
          query_index: Places of queries.
          key_index: Places of keys.

        Returns:
          bool, of the shape that the arguments broadcast to.

        Cost:
          One integer hash of about ten operations per pair.
        """
        state = jnp.asarray(self.seed, jnp.uint32)
        for number, odd in zip((row, head, query_index, key_index), _ODD, strict=True):
            # wrapping arithmetic of 32 bits; the finalizer of MurmurHash3 after each number
            state = _mix(state ^ (jnp.asarray(number).astype(jnp.uint32) + 1) * jnp.uint32(odd))
        return state >= jnp.uint32(min(round(self.rate * 2**32), 2**32 - 1))


def _mix(x: jax.Array) -> jax.Array:
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
