"""`farspan.attention`: exact attention over a sequence that is split over devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Inexact, Int

from farspan import schedules
from farspan.context.checks import (
    check_batch,
    check_labels,
    check_latent,
    check_query_key_value,
    checked_seed,
    constant_slopes,
)
from farspan.context.operation import Arrays, Data, Plan, attend
from farspan.context.parallel import ContextParallel
from farspan.context.placement import Placement
from farspan.errors import unknown_choice
from farspan.kernels import Kernel, get_kernel
from farspan.layouts import Balanced
from farspan.masks import Mask

AnyArray = jax.Array | np.ndarray


class AttentionOptions(TypedDict, total=False):
    """What `attention` and `latent_attention` take beside arrays and mask; see `attention`."""

    segment_ids: Int[AnyArray, "B S"] | None
    positions: Int[AnyArray, "B S"] | None
    key_ranges: Int[AnyArray, "B S n 2"] | None
    scale: float | None
    logits_soft_cap: float | None
    alibi_slopes: Sequence[float] | np.ndarray | None
    sinks: Inexact[AnyArray, " H"] | None
    dropout_rate: float
    dropout_seed: int | Int[AnyArray, ""] | None
    context: ContextParallel | None
    placement: Placement | None
    kernel: str | Kernel


@overload
def attention(
    query: Inexact[AnyArray, "B S H D"],
    key: Inexact[AnyArray, "B S K D"],
    value: Inexact[AnyArray, "B S K Dv"],
    *,
    mask: Mask,
    return_lse: Literal[False] = ...,
    **options: Unpack[AttentionOptions],
) -> Inexact[Array, "B S H Dv"]: ...
@overload
def attention(
    query: Inexact[AnyArray, "B S H D"],
    key: Inexact[AnyArray, "B S K D"],
    value: Inexact[AnyArray, "B S K Dv"],
    *,
    mask: Mask,
    return_lse: Literal[True],
    **options: Unpack[AttentionOptions],
) -> tuple[Inexact[Array, "B S H Dv"], Float[Array, "B H S"]]: ...
def attention(
    query: Inexact[AnyArray, "B S H D"],
    key: Inexact[AnyArray, "B S K D"],
    value: Inexact[AnyArray, "B S K Dv"],
    *,
    mask: Mask,
    return_lse: bool = False,
    **options: Unpack[AttentionOptions],
) -> Inexact[Array, "B S H Dv"] | tuple[Inexact[Array, "B S H Dv"], Float[Array, "B H S"]]:
    """Computes softmax attention, exactly, on one device or over a split sequence.

    All arrays are global. With `context`, their sequence axis must lie in the layout's order
    (`farspan.shard_sequence`); the result comes in the same order and sharding. Works under
    `jax.jit`, `jax.grad` and `jax.vmap`.

    Args:
      query: `[B, S, H, D]`, float16, bfloat16, float32 or float64.
      key: `[B, S, K, D]`, of the query's dtype, `H % K == 0`: query head h reads kv head
        `h // (H // K)`.
      value: `[B, S, K, Dv]`, of the query's dtype.
      mask: Which keys a query sees, by place in the row: `Causal()`, `Full()`,
        `SlidingWindow(left, right)`, `Chunked(size)`, `BlockCausal(size)`, `PrefixLM(length)`,
        `KeyRanges(n)`, combined by & and |.
      return_lse: Whether to return the natural log-sum-exp of each query's scores, too.
      **options: What follows.
      segment_ids: int `[B, S]`: the document of each token; tokens of different documents never
        see each other. 0 is padding: its output, and every gradient with respect to it, is
        exactly 0, whatever it holds. None: each row is one document.
      positions: int `[B, S]`: the place of each token for the mask, where it is not the one that
        the layout implies. Places may restart in each document if `segment_ids` is given too.
      key_ranges: int `[B, S, n, 2]`, for the mask `KeyRanges(n)`: half-open ranges of places of
        keys that each query sees.
      scale: Factor on the scores; by default `1 / sqrt(D)`.
      logits_soft_cap: If given, scores become `cap * tanh(score / cap)`.
      alibi_slopes: `[H]` constants: after the soft cap, the score of places i and j loses
        `slope * |i - j|`. Not differentiated, and so not to be traced.
      sinks: `[H]`: a score per head that enters the denominator once, with value 0.
      dropout_rate: Probability to drop a weight of the softmax, in [0, 1); the others are scaled up
        by `1 / (1 - rate)`. What is dropped depends on the seed, the row, the query head and the
        places of query and key alone, not on strategy, layout or degree. lse is that without
        dropout.
      dropout_seed: Integer scalar, may be traced; needed with a dropout rate. Use a new one
        for each layer and step.
      context: How the sequence is split; None: one device, in the order of the text.
      placement: From `farspan.place_rows`: needed by the layout `balanced`; with any layout, a ring
        then makes only the hops that the batch needs (all of them with explicit `positions`, for
        which hops are not known).
      kernel: `auto` (`splash` on TPU, else `xla`), `xla`, `splash`, `reference`, or a kernel
        object.

    Returns:
      `out`, `[B, S, H, Dv]`, of the query's dtype; or `(out, lse)`, lse float32 `[B, H, S]`
      (float64 for float64 inputs). A query that sees nothing gets 0 and -inf.

    Raises:
      ValueError: If shapes or dtypes do not fit, or the combination is not possible; the message
        gives the rule, the values and the remedy.

    Cost:
      `2 (D + Dv)` FLOPs per visible pair and query head in forward, 2.5 times that in backward
      (for D = Dv). Bytes sent per device: `farspan.schedules.collectives`. Saved for backward:
      q, k, v, out and lse, each only this device's shard.
    """
    query, key, value = jnp.asarray(query), jnp.asarray(key), jnp.asarray(value)
    check_query_key_value(query, key, value)
    result = _attend(query, (key, value), (), key.shape[2], mask, options)
    return result if return_lse else result[0]


def latent_attention(
    query: Inexact[AnyArray, "B S H D"],
    latent: Inexact[AnyArray, "B S R"],
    rope_key: Inexact[AnyArray, "B S Dr"],
    key_up: Inexact[AnyArray, "R H Dn"],
    value_up: Inexact[AnyArray, "R H Dv"],
    *,
    mask: Mask,
    return_lse: bool = False,
    **options: Unpack[AttentionOptions],
) -> Inexact[Array, "B S H Dv"] | tuple[Inexact[Array, "B S H Dv"], Float[Array, "B H S"]]:
    """Multi-head latent attention (MLA): sends the latent, and expands keys and values on arrival.

    Equals `attention` of `key = [latent @ key_up, rope_key]` and `value = latent @ value_up`, but
    only `R + Dr` numbers per token travel, forward and backward.

    Args:
      query: `[B, S, H, D]`, `D = Dn + Dr`, the rotary part last and already rotated.
      latent: `[B, S, R]`: what keys and values of all heads are made from.
      rope_key: `[B, S, Dr]`: the rotary part of the key, already rotated, which all heads share.
      key_up: `[R, H, Dn]`.
      value_up: `[R, H, Dv]`.
      mask: As in `attention`.
      return_lse: As in `attention`.
      **options: As in `attention`.

    Returns:
      As `attention`.

    Raises:
      ValueError: As `attention`.

    Cost:
      As `attention` with `K = H`, and `2 R H (Dn + Dv)` FLOPs per key and device that it visits to
      expand it, three times that in backward.

    Source: DeepSeek-V2, arXiv:2405.04434, section 2.1.
    """
    query, latent, rope_key = jnp.asarray(query), jnp.asarray(latent), jnp.asarray(rope_key)
    key_up, value_up = jnp.asarray(key_up), jnp.asarray(value_up)
    check_latent(query, latent, rope_key, key_up, value_up)
    weights = (key_up, value_up)
    result = _attend(query, (latent, rope_key), weights, query.shape[2], mask, options)
    return result if return_lse else result[0]


def _attend(
    query: Array,
    keys: Arrays,
    weights: Arrays,
    num_kv_heads: int,
    mask: Mask,
    options: AttentionOptions,
) -> tuple[Array, Array]:
    unknown = set(options) - set(AttentionOptions.__annotations__)
    if unknown:
        raise unknown_choice(
            "attention: option", sorted(unknown)[0], AttentionOptions.__annotations__
        )
    batch, seq_len, num_heads, head_dim = query.shape
    segment_ids, positions = options.get("segment_ids"), options.get("positions")
    key_ranges, sinks = options.get("key_ranges"), options.get("sinks")
    check_labels(query, segment_ids, positions, key_ranges, sinks, mask)
    cap, scale = options.get("logits_soft_cap"), options.get("scale")
    if cap is not None and not cap > 0:
        raise ValueError(f"attention: logits_soft_cap must be positive, got {cap}")
    rate = options.get("dropout_rate", 0.0)
    seed = checked_seed(rate, options.get("dropout_seed"))
    context, placement = options.get("context"), options.get("placement")
    plan = Plan(
        context,
        get_kernel(
            options.get("kernel", "auto"), query.dtype, None if context is None else context.mesh
        ),
        mask,
        float(head_dim**-0.5 if scale is None else scale),
        cap,
        constant_slopes(options.get("alibi_slopes"), num_heads),
        float(rate),
    )
    if context is not None:
        check_batch(context, batch)
        _check_combination(context, plan, query, num_kv_heads, bool(weights), positions is not None)
    data = Data(
        _as_int32(segment_ids),
        _as_int32(positions),
        _as_int32(key_ranges),
        seed,
    )
    arrays, data = _pad_to_multiple(context, (query, *keys), data)
    data = _with_placement(context, placement, mask, data, arrays[0])
    sinks = None if sinks is None else jnp.asarray(sinks)
    out, lse = attend(plan, arrays[0], arrays[1:], weights, sinks, data)
    return out[:, :seq_len], lse[..., :seq_len]


def _check_combination(
    context: ContextParallel,
    plan: Plan,
    query: Array,
    num_kv_heads: int,
    latent: bool,
    places_given: bool,
) -> None:
    schedules.check_combination(
        context.strategy,
        context.degrees,
        context.layout_object,
        num_heads=query.shape[2],
        num_kv_heads=num_kv_heads,
        tensor=context.tensor,
        mask=plan.mask,
        head_groups=context.head_groups,
        ring_streams=context.ring_streams,
        latent=latent,
        places_given=places_given,
    )


def _with_placement(
    context: ContextParallel | None,
    placement: Placement | None,
    mask: Mask,
    data: Data,
    query: Array,
) -> Data:
    """Adds what the placement of the batch says."""
    if placement is None:
        layout = None if context is None else context.layout_object
        if isinstance(layout, Balanced) and data.index is None:
            raise layout.no_order()
        return data
    if context is None:
        raise ValueError(
            "attention: placement belongs to a split sequence, got one without context; pass the "
            "context that it was made for"
        )
    placement.check(context, query.shape[1])
    index = placement.token_index
    if index is not None and index.shape != query.shape[:2]:
        raise ValueError(
            "attention: the placement must be made for these rows, got places of "
            f"{index.shape} for a batch of {query.shape[:2]}; call place_rows with the segment_ids "
            "of this batch"
        )
    if data.index is not None:  # the hops were made for the places in the row, not for these
        return data
    return dataclasses.replace(data, index=index, hops=placement.hops_of(mask))


def _as_int32(x: AnyArray | None) -> Array | None:
    return None if x is None else jnp.asarray(x).astype(jnp.int32)


def _pad_to_multiple(
    context: ContextParallel | None, arrays: Arrays, data: Data
) -> tuple[Arrays, Data]:
    """Pads rows that the layout cannot cut, where their order allows it."""
    batch, seq_len = arrays[0].shape[:2]
    padding = 0 if context is None else -seq_len % context.sequence_multiple
    if context is None or not padding:
        return arrays, data
    if context.layout != "contiguous":
        schedules.check_length(
            context.strategy, context.degrees, context.layout_object, seq_len, context.ring_streams
        )
    segment_ids = data.segment_ids
    if segment_ids is None:
        segment_ids = jnp.ones((batch, seq_len), jnp.int32)

    def pad(x: Array) -> Array:
        return jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2))

    labels = jax.tree.map(pad, (segment_ids, data.index, data.key_ranges))
    segment_ids, index, key_ranges = labels
    data = Data(segment_ids, index, key_ranges, data.dropout_seed)
    return tuple(map(pad, arrays)), data
