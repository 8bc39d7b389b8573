"""The dense float64 oracle: attention by its definition, and its gradients in closed form.

Shares no code with the kernels or strategies that it judges, only the statements of the mask and of
which pairs dropout drops.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from farspan.kernels import Dropout
from farspan.masks import Mask, Tokens, visible

F64 = NDArray[np.float64]


class DenseResult(NamedTuple):
    """Outputs and gradients of dense attention, float64; gradients None without `dout`."""

    out: F64
    lse: F64
    dquery: F64 | None = None
    dkey: F64 | None = None
    dvalue: F64 | None = None
    dsinks: F64 | None = None


def dense_attention(
    query: Any, key: Any, value: Any, *, return_lse: bool = False, **arguments: Any
) -> F64 | tuple[F64, F64]:
    """`farspan.attention` without a context, computed densely in float64.

    Args:
      query: `[B, S, H, D]`, in the order of the text.
      key: `[B, S, K, D]`.
      value: `[B, S, K, Dv]`.
      return_lse: Whether to return the log-sum-exp, too.
      **arguments: `mask`, `segment_ids`, `positions`, `scale`, `logits_soft_cap`, `sinks`,
        `key_ranges`, `alibi_slopes`, `dropout_rate` and `dropout_seed`, as in
        `farspan.attention`.

    Returns:
      `out`, or `(out, lse)`, float64 NumPy arrays.

    Cost:
      O(B H S^2) memory: for short rows.
    """
    result = dense_attention_vjp(query, key, value, None, **arguments)
    return (result.out, result.lse) if return_lse else result.out


def dense_attention_vjp(
    query: Any,
    key: Any,
    value: Any,
    dout: Any | None,
    dlse: Any | None = None,
    *,
    mask: Mask,
    segment_ids: Any | None = None,
    positions: Any | None = None,
    scale: float | None = None,
    logits_soft_cap: float | None = None,
    sinks: Any | None = None,
    key_ranges: Any | None = None,
    alibi_slopes: Any | None = None,
    dropout_rate: float = 0.0,
    dropout_seed: Any | None = None,
) -> DenseResult:
    """Outputs of dense attention and the gradients that belong to `dout` and `dlse`.

    Args:
      query: As in `farspan.attention`.
      key: As in `farspan.attention`.
      value: As in `farspan.attention`.
      dout: Gradient of the output, `[B, S, H, Dv]`, or None for no gradients.
      dlse: Gradient of the log-sum-exp, `[B, H, S]`, or None for 0.
      mask: As in `farspan.attention`.
      segment_ids: As in `farspan.attention`.
      positions: As in `farspan.attention`.
      scale: As in `farspan.attention`.
      logits_soft_cap: As in `farspan.attention`.
      sinks: As in `farspan.attention`.
      key_ranges: As in `farspan.attention`.
      alibi_slopes: As in `farspan.attention`.
      dropout_rate: As in `farspan.attention`.
      dropout_seed: As in `farspan.attention`.

    Returns:
      All outputs and gradients, float64.
    """
    batch, seq_len, heads, dim = query.shape
    kv_heads = key.shape[2]
    group = heads // kv_heads
    q, k, v = (np.asarray(x).astype(np.float64) for x in (query, key, value))
    index = np.arange(seq_len)[None] if positions is None else np.asarray(positions)
    segment = None if segment_ids is None else np.asarray(segment_ids)
    if segment is not None:
        q, k, v = (np.where((segment != 0)[..., None, None], x, 0) for x in (q, k, v))
    k, v = np.repeat(k, group, 2), np.repeat(v, group, 2)
    scale = dim**-0.5 if scale is None else scale
    ranges = None if key_ranges is None else np.asarray(key_ranges)
    queries, keys = Tokens(index, segment, ranges), Tokens(index, segment)
    seen = np.broadcast_to(visible(mask, queries, keys), (batch, seq_len, seq_len))[:, None]
    kept = np.float64(1)
    if dropout_rate:
        options = {"dropout_rate": dropout_rate, "dropout_seed": dropout_seed}
        kept = dense_dropout(np.broadcast_to(index, (batch, seq_len)), heads, options)
    product = np.einsum("bshd,bthd->bhst", q, k) * scale
    score, slope = _scores(product, index, logits_soft_cap, alibi_slopes)
    sink = np.full(heads, -np.inf) if sinks is None else np.asarray(sinks).astype(np.float64)
    weight, lse = _softmax(np.where(seen, score, -np.inf), sink)
    if segment is not None:
        lse = np.where((segment != 0)[:, None], lse, -np.inf)
    out = np.einsum("bhst,bthd->bshd", weight * kept, v)
    if dout is None:
        return DenseResult(out, lse)

    sees = ~np.isneginf(lse)
    d_lse = np.where(sees, 0 if dlse is None else np.asarray(dlse).astype(np.float64), 0)
    d_out = np.where(sees.swapaxes(1, 2)[..., None], np.asarray(dout).astype(np.float64), 0)
    dweight = np.einsum("bshd,bthd->bhst", d_out, v) * kept
    delta = np.einsum("bshd,bshd->bhs", d_out, out) - d_lse
    dscore = weight * (dweight - delta[..., None]) * slope * scale
    by_group = (batch, seq_len, kv_heads, group, -1)
    dquery = np.einsum("bhst,bthd->bshd", dscore, k)
    dkey = np.einsum("bhst,bshd->bthd", dscore, q).reshape(by_group).sum(3)
    dvalue = np.einsum("bhst,bshd->bthd", weight * kept, d_out).reshape(by_group).sum(3)
    sink_share = np.exp(sink[:, None] - np.where(sees, lse, np.inf))
    dsinks = None if sinks is None else -(sink_share * delta).sum((0, 2))
    return DenseResult(out, lse, dquery, dkey, dvalue, dsinks)


def _scores(product: F64, index: Any, cap: float | None, slopes: Any | None) -> tuple[F64, F64]:
    """Scores `[B, H, S, S]` from scaled products, and d(score) / d(scaled product)."""
    score, slope = product, np.ones_like(product)
    if cap is not None:
        squashed = np.tanh(score / cap)
        score, slope = cap * squashed, 1 - squashed**2
    if slopes is not None:
        distance = np.abs(index[:, None, :, None] - index[:, None, None, :])
        score = score - np.asarray(slopes, np.float64)[:, None, None] * distance
    return score, slope


def _softmax(score: F64, sink: F64) -> tuple[F64, F64]:
    """Weights `[B, H, S, S]` and log-sum-exp `[B, H, S]`, a sink per head in the denominator."""
    greatest = np.maximum(score.max(-1), sink[:, None])
    shift = np.where(np.isneginf(greatest), 0, greatest)
    weight = np.exp(score - shift[..., None])
    total = weight.sum(-1) + np.exp(sink[:, None] - shift)
    with np.errstate(divide="ignore"):
        lse = shift + np.log(total)
    return weight / np.where(total == 0, 1, total)[..., None], lse


def dense_dropout(index: Any, num_heads: int, options: dict[str, Any]) -> F64:
    """Factors of dropout on the weights, float64 `[B, H, S, S]`, for places `[B, S]`."""
    rate, seed = options["dropout_rate"], options["dropout_seed"]
    rows, heads = np.arange(len(index)), np.arange(num_heads)
    keeps = Dropout(np.uint32(seed), rows, heads, rate).keeps(
        rows[:, None, None, None], heads[:, None, None],
        index[:, None, :, None], index[:, None, None, :],
    )  # fmt: skip
    return np.asarray(keeps) / (1 - rate)
