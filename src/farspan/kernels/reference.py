"""Dense attention in a few lines: the kernel to read, and to hold the others against."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Inexact

from farspan.kernels.base import Scores
from farspan.masks import Tokens, visible

_einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


class ReferenceKernel:
    """Materialises every score: O(Sq * Sk) memory. Accumulates in float32, or float64."""

    name = "reference"

    def forward(
        self,
        query: Inexact[Array, "B Sq H D"],
        key: Inexact[Array, "B Sk K D"],
        value: Inexact[Array, "B Sk K Dv"],
        query_tokens: Tokens,
        key_tokens: Tokens,
        scores: Scores,
    ) -> tuple[Float[Array, "B Sq H Dv"], Float[Array, "B H Sq"]]:
        """See `Kernel.forward`."""
        query, key, value = _grouped(query, key, value)
        score, seen, _ = _masked_scores(query, key, query_tokens, key_tokens, scores)
        greatest = jnp.max(score, -1, keepdims=True, where=seen, initial=-jnp.inf)
        shift = jnp.where(jnp.isfinite(greatest), greatest, 0)
        weight = jnp.where(seen, jnp.exp(score - shift), 0)
        total = weight.sum(-1, keepdims=True)
        share = weight / jnp.where(total == 0, 1, total)
        share = share * _dropout(query_tokens, key_tokens, scores, query)
        out = _einsum("bkgst,btkd->bskgd", share, value)
        lse = jnp.log(total) + shift
        batch, length, kv_heads, group, dim = out.shape
        return (
            out.reshape(batch, length, kv_heads * group, dim),
            lse.reshape(batch, kv_heads * group, length),
        )

    def backward(
        self,
        query: Inexact[Array, "B Sq H D"],
        key: Inexact[Array, "B Sk K D"],
        value: Inexact[Array, "B Sk K Dv"],
        dout: Inexact[Array, "B Sq H Dv"],
        lse: Float[Array, "B H Sq"],
        delta: Float[Array, "B H Sq"],
        query_tokens: Tokens,
        key_tokens: Tokens,
        scores: Scores,
    ) -> tuple[Float[Array, "B Sq H D"], Float[Array, "B Sk K D"], Float[Array, "B Sk K Dv"]]:
        """See `Kernel.backward`."""
        shape = query.shape
        query, key, value = _grouped(query, key, value)
        batch, length, kv_heads, group, _ = query.shape
        dout = dout.astype(query.dtype).reshape(batch, length, kv_heads, group, -1)
        per_row = (batch, kv_heads, group, length, 1)
        score, seen, slope = _masked_scores(query, key, query_tokens, key_tokens, scores)
        shift = jnp.where(jnp.isfinite(lse), lse, 0).reshape(per_row)
        weight = jnp.where(seen, jnp.exp(score - shift), 0)
        factor = _dropout(query_tokens, key_tokens, scores, query)
        dweight = _einsum("bskgd,btkd->bkgst", dout, value) * factor
        dscore = weight * (dweight - delta.reshape(per_row)) * slope
        dquery = _einsum("bkgst,btkd->bskgd", dscore, key).reshape(shape) * scores.scale
        dkey = _einsum("bkgst,bskgd->btkd", dscore, query) * scores.scale
        return dquery, dkey, _einsum("bkgst,bskgd->btkd", weight * factor, dout)


def _grouped(query: Array, key: Array, value: Array) -> tuple[Array, Array, Array]:
    """Splits query heads by the kv head they read, `[B, S, K, G, D]`, in the accumulation type."""
    accumulate = jnp.promote_types(query.dtype, jnp.float32)
    batch, length, heads, dim = query.shape
    kv_heads = key.shape[2]
    query = query.reshape(batch, length, kv_heads, heads // kv_heads, dim)
    return query.astype(accumulate), key.astype(accumulate), value.astype(accumulate)


def _masked_scores(
    query: Array, key: Array, query_tokens: Tokens, key_tokens: Tokens, scores: Scores
) -> tuple[Array, Array, Array | float]:
    """Scores `[B, K, G, Sq, Sk]`, which of them are visible, and d(score) / d(scaled product)."""
    score = _einsum("bskgd,btkd->bkgst", query, key) * scores.scale
    slope: Array | float = 1.0
    if scores.logits_soft_cap is not None:
        squashed = jnp.tanh(score / scores.logits_soft_cap)
        score, slope = scores.logits_soft_cap * squashed, 1 - squashed**2
    if scores.alibi_slopes is not None:
        distance = abs(query_tokens.index[:, :, None] - key_tokens.index[:, None])
        slopes = scores.alibi_slopes.reshape(score.shape[1:3])
        score = score - slopes[:, :, None, None] * distance[:, None, None]
    seen = visible(scores.mask, query_tokens, key_tokens)[:, None, None]
    return score, seen, slope


def _dropout(
    query_tokens: Tokens, key_tokens: Tokens, scores: Scores, query: Array
) -> Array | float:
    """Factors on the weights, `[B, K, G, Sq, Sk]`."""
    if scores.dropout is None:
        return 1.0
    kept = scores.dropout.keeps(
        scores.dropout.rows[:, None, None, None, None],
        scores.dropout.heads.reshape(query.shape[2:4])[:, :, None, None],
        query_tokens.index[:, None, None, :, None],
        key_tokens.index[:, None, None, None, :],
    )
    return jnp.where(kept, jnp.asarray(1 / (1 - scores.dropout.rate), query.dtype), 0)
