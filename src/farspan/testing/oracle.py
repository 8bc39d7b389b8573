"""The dense float64 oracle: attention by its definition, and its gradients in closed form.

Shares no code with the kernels or strategies that it judges, only the statement of the mask.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

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
      **arguments: `mask`, `segment_ids`, `positions`, `scale`, `logits_soft_cap` and `sinks`, as
        in `farspan.attention`.

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
    tokens = Tokens(index, segment)
    seen = np.broadcast_to(visible(mask, tokens, tokens), (batch, seq_len, seq_len))[:, None]

    score, slope = np.einsum("bshd,bthd->bhst", q, k) * scale, np.float64(1)
    if logits_soft_cap is not None:
        squashed = np.tanh(score / logits_soft_cap)
        score, slope = logits_soft_cap * squashed, 1 - squashed**2
    score = np.where(seen, score, -np.inf)
    sink = np.full(heads, -np.inf) if sinks is None else np.asarray(sinks).astype(np.float64)
    greatest = np.maximum(score.max(-1), sink[:, None])
    shift = np.where(np.isneginf(greatest), 0, greatest)
    weight = np.exp(score - shift[..., None])
    total = weight.sum(-1) + np.exp(sink[:, None] - shift)
    with np.errstate(divide="ignore"):
        lse = shift + np.log(total)
    if segment is not None:
        lse = np.where((segment != 0)[:, None], lse, -np.inf)
    weight = weight / np.where(total == 0, 1, total)[..., None]
    out = np.einsum("bhst,bthd->bshd", weight, v)
    if dout is None:
        return DenseResult(out, lse)

    sees = ~np.isneginf(lse)
    d_lse = np.where(sees, 0 if dlse is None else np.asarray(dlse).astype(np.float64), 0)
    d_out = np.where(sees.swapaxes(1, 2)[..., None], np.asarray(dout).astype(np.float64), 0)
    dweight = np.einsum("bshd,bthd->bhst", d_out, v)
    delta = np.einsum("bshd,bshd->bhs", d_out, out) - d_lse
    dscore = weight * (dweight - delta[..., None]) * slope * scale
    by_group = (batch, seq_len, kv_heads, group, -1)
    sink_share = np.exp(sink[:, None] - np.where(sees, lse, np.inf))
    return DenseResult(
        out,
        lse,
        dquery=np.einsum("bhst,bthd->bshd", dscore, k),
        dkey=np.einsum("bhst,bshd->bthd", dscore, q).reshape(by_group).sum(3),
        dvalue=np.einsum("bhst,bshd->bthd", weight, d_out).reshape(by_group).sum(3),
        dsinks=None if sinks is None else -(sink_share * delta).sum((0, 2)),
    )
