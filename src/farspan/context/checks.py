"""What a user can get wrong in a call, said before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from farspan.context.parallel import ContextParallel
from farspan.masks import Mask

AnyArray = jax.Array | np.ndarray


def check_query_key_value(query: Array, key: Array, value: Array) -> None:
    """Checks shapes and types of queries, keys and values."""
    shapes = {"query": query.shape, "key": key.shape, "value": value.shape}
    if any(len(shape) != 4 for shape in shapes.values()):
        raise ValueError(
            f"attention: query, key and value must be [B, S, heads, dim], got {shapes}"
        )
    batch, seq_len, heads, dim = query.shape
    if key.shape[:2] != (batch, seq_len) or value.shape[:3] != key.shape[:3] or key.shape[3] != dim:
        raise ValueError(
            "attention: query [B, S, H, D], key [B, S, K, D] and value [B, S, K, Dv] must agree in "
            f"B, S, K and D, got {shapes}"
        )
    if min(*query.shape, *key.shape, *value.shape) < 1 or heads % key.shape[2]:
        raise ValueError(
            f"attention: query heads must be a positive multiple of kv heads, got H={heads}, "
            f"K={key.shape[2]} in {shapes}"
        )
    _check_types(query=query, key=key, value=value)


def check_latent(
    query: Array, latent: Array, rope_key: Array, key_up: Array, value_up: Array
) -> None:
    """Checks shapes and types of what `latent_attention` takes."""
    arrays = {
        "query": query, "latent": latent, "rope_key": rope_key, "key_up": key_up,
        "value_up": value_up,
    }  # fmt: skip
    shapes = {name: x.shape for name, x in arrays.items()}
    fits = [len(shape) for shape in shapes.values()] == [4, 3, 3, 3, 3]
    if fits:
        batch, seq_len, heads, dim = query.shape
        rank = latent.shape[2]
        fits = (
            latent.shape[:2] == rope_key.shape[:2] == (batch, seq_len)
            and key_up.shape[:2] == value_up.shape[:2] == (rank, heads)
            and key_up.shape[2] + rope_key.shape[2] == dim
            and min(map(min, shapes.values())) > 0
        )
    if not fits:
        raise ValueError(
            "latent_attention: query [B, S, H, Dn + Dr], latent [B, S, R], rope_key [B, S, Dr], "
            f"key_up [R, H, Dn] and value_up [R, H, Dv] must agree, got {shapes}"
        )
    _check_types(**arrays)


def check_labels(
    query: Array,
    segment_ids: AnyArray | None,
    positions: AnyArray | None,
    key_ranges: AnyArray | None,
    sinks: AnyArray | None,
    mask: Mask,
) -> None:
    """Checks what comes with the tokens, and that the mask's own ranges are there."""
    batch, seq_len, heads, _ = query.shape
    for name, x in (("segment_ids", segment_ids), ("positions", positions)):
        if x is None:
            continue
        if x.shape != (batch, seq_len) or not jnp.issubdtype(x.dtype, jnp.integer):
            raise ValueError(
                f"attention: {name} must be integers [B, S] = {(batch, seq_len)}, "
                f"got {x.dtype} {x.shape}"
            )
    if sinks is not None and sinks.shape != (heads,):
        raise ValueError(f"attention: sinks must be [H] = {(heads,)}, got {sinks.shape}")
    wanted = mask.given_ranges
    if key_ranges is None:
        if wanted:
            raise ValueError(
                f"attention: the mask reads {wanted} ranges per query, got no key_ranges; pass "
                f"key_ranges=, int [B, S, {wanted}, 2] (farspan.masks.prefix_key_ranges makes some)"
            )
        return
    shape = (batch, seq_len, wanted, 2)
    if key_ranges.shape != shape or not jnp.issubdtype(key_ranges.dtype, jnp.integer):
        raise ValueError(
            f"attention: key_ranges must be integers [B, S, n, 2] = {shape} for the mask {mask}, "
            f"got {key_ranges.dtype} {key_ranges.shape}; KeyRanges(n) in the mask reads n of them"
        )


def checked_seed(rate: float, seed: Any | None) -> Array | None:
    """Checks the rate of dropout, and gives the seed as a uint32 scalar where it is used."""
    if not 0 <= rate < 1:
        raise ValueError(f"attention: dropout_rate must be in [0, 1), got {rate}")
    if not rate:
        return None
    if isinstance(seed, int):
        return jnp.uint32(seed % 2**32)
    if seed is None or not jnp.issubdtype(jnp.asarray(seed).dtype, jnp.integer):
        raise ValueError(
            f"attention: dropout needs an integer seed, got dropout_rate={rate}, "
            f"dropout_seed={seed}; pass another dropout_seed for each layer and step"
        )
    return jnp.asarray(seed).astype(jnp.uint32)


def constant_slopes(
    slopes: Sequence[float] | AnyArray | None, num_heads: int
) -> tuple[float, ...] | None:
    """ALiBi slopes as constants of the program."""
    if slopes is None:
        return None
    if isinstance(slopes, jax.core.Tracer):
        raise ValueError(
            "attention: alibi_slopes must be constants, got a traced array; slopes are not "
            "differentiated: make them with NumPy, outside jit and grad"
        )
    values = np.asarray(slopes, np.float64)
    if values.shape != (num_heads,):
        raise ValueError(
            f"attention: alibi_slopes must be [H] = {(num_heads,)}, got {values.shape}"
        )
    return tuple(values.tolist())


def check_batch(context: ContextParallel, batch: int) -> None:
    """Checks that the mesh's batch axes divide the batch."""
    if batch % context.batch_shards:
        raise ValueError(
            f"attention: the batch must be a multiple of the mesh axes {context.batch_axes}, got "
            f"B={batch}, {context.batch_shards} shards; pad the batch or use smaller axes"
        )


def _check_types(**arrays: Array) -> None:
    dtypes = {name: x.dtype for name, x in arrays.items()}
    first = next(iter(dtypes.values()))
    if len(set(dtypes.values())) > 1 or not jnp.issubdtype(first, jnp.floating):
        names = list(dtypes)
        listed = f"{', '.join(names[:-1])} and {names[-1]}"
        found = ", ".join(f"{name} {dtype}" for name, dtype in dtypes.items())
        raise ValueError(
            f"attention: {listed} must share one floating dtype, got {found}; cast them"
        )
