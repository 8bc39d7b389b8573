"""A number for each array of a state by which to know, bit for bit, that it is the same again.

The sum, modulo 2**32, of the bits of every element times an odd number that depends on its place.
Integers add up to the same in any order, so the number is that of the global array on every mesh.
It tells a changed bit, a missing shard or shards in another order; it is no defence against malice.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, UInt32

_WORDS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}


def fingerprints(state: Any) -> dict[str, int]:
    """Computes the fingerprint of every array, on the devices.

    Args:
      state: Pytree of arrays of numbers. Of arrays over several processes every process must call
        this.

    Returns:
      Name of the array, such as `params.0.w`, to its number.
    """
    leaves = named_leaves(state)
    sums = _sums(list(leaves.values()))
    return {name: int(total) for name, total in zip(leaves, np.asarray(sums), strict=True)}


def named_leaves(tree: Any) -> dict[str, Any]:
    """The leaves of a pytree by names such as `params.0.w`."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {".".join(_key_name(key) for key in path): leaf for path, leaf in leaves}


def _key_name(key: Any) -> str:
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    raise AssertionError(f"pytree key of unknown kind {key!r}")


@jax.jit
def _sums(leaves: list[Any]) -> UInt32[Array, " leaves"]:
    return jnp.stack([_sum(leaf) for leaf in leaves])


def _sum(leaf: Any) -> UInt32[Array, ""]:
    values = leaf.astype(jnp.uint8) if leaf.dtype == jnp.bool_ else leaf
    words = lax.bitcast_convert_type(values, _WORDS[values.dtype.itemsize]).astype(jnp.uint32)
    place = jnp.zeros(words.shape, jnp.uint32)
    for axis, size in enumerate(words.shape):
        place = place * np.uint32(size % 2**32) + lax.broadcasted_iota(
            jnp.uint32, words.shape, axis
        )
    return jnp.sum(words * (place * np.uint32(2) + np.uint32(1)), dtype=jnp.uint32)
