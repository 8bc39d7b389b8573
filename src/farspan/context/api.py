"""`farspan.attention`: exact attention over a sequence that is split over devices."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Inexact, Int

from farspan import schedules
from farspan.context.all_gather import AllGather
from farspan.context.base import Call, Metadata, Strategy
from farspan.context.parallel import ContextParallel
from farspan.kernels import Kernel, Scores, get_kernel
from farspan.layouts import get_layout
from farspan.masks import Mask
from farspan.ops.merge import add_sinks
from farspan.types import ATTENTION_NAMES, PAD_SEGMENT_ID

AnyArray = jax.Array | np.ndarray


@overload
def attention(
    query: Inexact[AnyArray, "B S H D"],
    key: Inexact[AnyArray, "B S K D"],
    value: Inexact[AnyArray, "B S K Dv"],
    *,
    mask: Mask,
    segment_ids: Int[AnyArray, "B S"] | None = ...,
    positions: Int[AnyArray, "B S"] | None = ...,
    scale: float | None = ...,
    logits_soft_cap: float | None = ...,
    sinks: Inexact[AnyArray, " H"] | None = ...,
    context: ContextParallel | None = ...,
    kernel: str | Kernel = ...,
    return_lse: Literal[False] = ...,
) -> Inexact[Array, "B S H Dv"]: ...
@overload
def attention(
    query: Inexact[AnyArray, "B S H D"],
    key: Inexact[AnyArray, "B S K D"],
    value: Inexact[AnyArray, "B S K Dv"],
    *,
    mask: Mask,
    segment_ids: Int[AnyArray, "B S"] | None = ...,
    positions: Int[AnyArray, "B S"] | None = ...,
    scale: float | None = ...,
    logits_soft_cap: float | None = ...,
    sinks: Inexact[AnyArray, " H"] | None = ...,
    context: ContextParallel | None = ...,
    kernel: str | Kernel = ...,
    return_lse: Literal[True],
) -> tuple[Inexact[Array, "B S H Dv"], Float[Array, "B H S"]]: ...
def attention(
    query: Inexact[AnyArray, "B S H D"],
    key: Inexact[AnyArray, "B S K D"],
    value: Inexact[AnyArray, "B S K Dv"],
    *,
    mask: Mask,
    segment_ids: Int[AnyArray, "B S"] | None = None,
    positions: Int[AnyArray, "B S"] | None = None,
    scale: float | None = None,
    logits_soft_cap: float | None = None,
    sinks: Inexact[AnyArray, " H"] | None = None,
    context: ContextParallel | None = None,
    kernel: str | Kernel = "auto",
    return_lse: bool = False,
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
        `SlidingWindow(left, right)`, combined by & and |.
      segment_ids: int `[B, S]`: the document of each token; tokens of different documents never
        see each other. 0 is padding: its output, and every gradient with respect to it, is
        exactly 0, whatever it holds. None: each row is one document.
      positions: int `[B, S]`: the place of each token for the mask, where it is not the one that
        the layout implies. Places may restart in each document if `segment_ids` is given too.
      scale: Factor on the scores; by default `1 / sqrt(D)`.
      logits_soft_cap: If given, scores become `cap * tanh(score / cap)`.
      sinks: `[H]`: a score per head that enters the denominator once, with value 0.
      context: How the sequence is split; None: one device, in the order of the text.
      kernel: `auto`, `xla`, `reference`, or a kernel object.
      return_lse: Whether to return the natural log-sum-exp of each query's scores, too.

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
    _check_arrays(query, key, value, segment_ids, positions, sinks)
    if logits_soft_cap is not None and not logits_soft_cap > 0:
        raise ValueError(f"attention: logits_soft_cap must be positive, got {logits_soft_cap}")
    scale = float(query.shape[-1] ** -0.5 if scale is None else scale)
    plan = _Plan(context, get_kernel(kernel), Scores(mask, scale, logits_soft_cap))
    if context is not None:
        _check_batch(context, query.shape[0])
        schedules.check_combination(
            context.strategy,
            context.degrees,
            context.layout_object,
            num_heads=query.shape[2],
            num_kv_heads=key.shape[2],
            tensor=context.tensor,
        )
    seq_len = query.shape[1]
    metadata = Metadata(_as_int32(segment_ids), _as_int32(positions))
    arrays, metadata = _pad_to_multiple(context, (query, key, value), metadata)
    sinks = None if sinks is None else jnp.asarray(sinks)
    out, lse = _attend(plan, *arrays, sinks, metadata)
    out, lse = out[:, :seq_len], lse[..., :seq_len]
    return (out, lse) if return_lse else out


@dataclasses.dataclass(frozen=True)
class _Plan:
    """The static part of a call: a compile key."""

    context: ContextParallel | None
    kernel: Kernel
    scores: Scores


@functools.partial(jax.jit, static_argnums=0)
def _attend(
    plan: _Plan, query: Array, key: Array, value: Array, sinks: Array | None, metadata: Metadata
) -> tuple[Array, Array]:
    if metadata.segment_ids is not None:  # whatever bits padding holds, 0 * NaN must not arise
        real = (metadata.segment_ids != PAD_SEGMENT_ID)[..., None, None]
        query, key, value = (jnp.where(real, x, 0) for x in (query, key, value))
    return _attention(plan, query, key, value, sinks, metadata)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(
    plan: _Plan, query: Array, key: Array, value: Array, sinks: Array | None, metadata: Metadata
) -> tuple[Array, Array]:
    """Attention as one differentiable operation on global arrays."""
    out, lse = _on_devices(plan, "forward", (query, key, value), (), metadata)
    if sinks is not None:
        out, lse = add_sinks(out, lse, sinks)
    if metadata.segment_ids is not None:
        lse = jnp.where(_rows_of(metadata), lse, -jnp.inf)
    return out.astype(query.dtype), lse


def _attention_forward(
    plan: _Plan, query: Array, key: Array, value: Array, sinks: Array | None, metadata: Metadata
) -> tuple[tuple[Array, Array], Any]:
    out, lse = _attention(plan, query, key, value, sinks, metadata)
    out, lse = map(checkpoint_name, (out, lse), ATTENTION_NAMES)
    return (out, lse), (query, key, value, sinks, metadata, out, lse)


def _attention_backward(plan: _Plan, saved: Any, cotangents: tuple[Array, Array]) -> Any:
    query, key, value, sinks, metadata, out, lse = saved
    dout, dlse = cotangents
    sees = ~jnp.isneginf(lse)
    dlse = jnp.where(sees, dlse, 0)
    dout = jnp.where(sees.swapaxes(1, 2)[..., None], dout, 0)
    products = out.astype(lse.dtype) * dout.astype(lse.dtype)
    delta = products.sum(-1).swapaxes(1, 2) - dlse
    dquery, dkey, dvalue = _on_devices(
        plan, "backward", (query, key, value, dout), (lse, delta), metadata
    )
    dsinks = None
    if sinks is not None:
        share = jnp.where(sees, jnp.exp(sinks.astype(lse.dtype)[:, None] - lse), 0)
        dsinks = -(share * delta).sum((0, 2)).astype(sinks.dtype)
    return (
        dquery.astype(query.dtype),
        dkey.astype(key.dtype),
        dvalue.astype(value.dtype),
        dsinks,
        None,
    )


_attention.defvjp(_attention_forward, _attention_backward)


def _on_devices(
    plan: _Plan,
    direction: schedules.Direction,
    per_token: tuple[Array, ...],
    per_row: tuple[Array, ...],
    metadata: Metadata,
) -> tuple[Array, ...]:
    """Runs a direction of the strategy on every device's shard of global arrays.

    Args:
      plan: The static part of the call.
      direction: Which of the strategy's functions.
      per_token: Arrays `[B, S, heads, dim]`.
      per_row: Arrays `[B, H, S]`.
      metadata: `[B, S]`.

    Returns:
      What the strategy returns, global.
    """
    context, tokens_count = plan.context, len(per_token)
    strategy: Strategy = AllGather() if context is None else context.strategy_object
    call = _call(plan)
    run = getattr(strategy, direction)

    def local(*arrays: Any) -> tuple[Array, ...]:
        if direction == "backward":
            arrays = _after_forward(*arrays)
        return run(call, *arrays)

    arrays = (*per_token, *per_row, metadata)
    if context is None:
        return local(*arrays)
    token_spec, row_spec = context.partition_spec(4, head_dim=2), _row_spec(context)
    metadata_spec = context.partition_spec(2)
    in_specs = (*[token_spec] * tokens_count, *[row_spec] * len(per_row), metadata_spec)
    out_specs = (token_spec, row_spec) if direction == "forward" else (token_spec,) * 3
    # The custom VJP is outside, so nothing is transposed here and no replication is to be checked.
    return jax.shard_map(
        local, mesh=context.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )(*arrays)


def _after_forward(
    query: Array,
    key: Array,
    value: Array,
    dout: Array,
    lse: Array,
    delta: Array,
    metadata: Metadata,
) -> tuple[Any, ...]:
    """Makes what backward fetches wait for what forward found: adds a 0 that is made of `delta`.

    Without it the compiler sees that backward fetches what forward fetched, and keeps that alive in
    between. And XLA's CPU runtime may run a loop of collectives beside collectives that do not
    depend on it, and mix the two up; an optimization barrier is gone by then.
    """
    zero = jnp.minimum(jnp.abs(delta[0, 0, 0]), 0)
    fetched = (query, key, value, metadata)
    query, key, value, metadata = jax.tree.map(lambda x: x + zero.astype(x.dtype), fetched)
    return query, key, value, dout, lse, delta, metadata


def _call(plan: _Plan) -> Call:
    context = plan.context
    if context is None:
        return Call(plan.kernel, plan.scores, get_layout("contiguous"), (), (), 1, 1)
    return Call(
        plan.kernel,
        plan.scores,
        context.layout_object,
        context.sequence_axes,
        context.exchange_axes,
        context.degrees.sequence,
        context.degrees.heads,
    )


def _row_spec(context: ContextParallel) -> PartitionSpec:
    """Partitioning of `[B, H, S]`."""
    batch, sequence, heads = context.partition_spec(3, head_dim=2)
    return PartitionSpec(batch, heads, sequence)


def _rows_of(metadata: Metadata) -> Array:
    """Bool `[B, 1, S]`: False at padding."""
    assert metadata.segment_ids is not None
    return (metadata.segment_ids != PAD_SEGMENT_ID)[:, None, :]


def _as_int32(x: AnyArray | None) -> Array | None:
    return None if x is None else jnp.asarray(x).astype(jnp.int32)


def _pad_to_multiple(
    context: ContextParallel | None, arrays: tuple[Array, ...], metadata: Metadata
) -> tuple[tuple[Array, ...], Metadata]:
    """Pads rows that the layout cannot cut, where their order allows it."""
    batch, seq_len = arrays[0].shape[:2]
    padding = 0 if context is None else -seq_len % context.sequence_multiple
    if context is None or not padding:
        return arrays, metadata
    if context.layout != "contiguous":
        schedules.check_combination(
            context.strategy, context.degrees, context.layout_object,
            num_heads=arrays[0].shape[2], num_kv_heads=arrays[1].shape[2], tensor=context.tensor,
            seq_len=seq_len,
        )  # fmt: skip
    segment_ids = metadata.segment_ids
    if segment_ids is None:
        segment_ids = jnp.ones((batch, seq_len), jnp.int32)

    def pad(x: Array) -> Array:
        return jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2))

    metadata = jax.tree.map(pad, Metadata(segment_ids, metadata.positions))
    return tuple(pad(x) for x in arrays), metadata


def _check_arrays(
    query: Array,
    key: Array,
    value: Array,
    segment_ids: AnyArray | None,
    positions: AnyArray | None,
    sinks: AnyArray | None,
) -> None:
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
    dtypes = {"query": query.dtype, "key": key.dtype, "value": value.dtype}
    if len(set(dtypes.values())) > 1 or not jnp.issubdtype(query.dtype, jnp.floating):
        found = ", ".join(f"{name} {dtype}" for name, dtype in dtypes.items())
        raise ValueError(
            f"attention: query, key and value must share one floating dtype, got {found}; cast them"
        )
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


def _check_batch(context: ContextParallel, batch: int) -> None:
    if batch % context.batch_shards:
        raise ValueError(
            f"attention: the batch must be a multiple of the mesh axes {context.batch_axes}, got "
            f"B={batch}, {context.batch_shards} shards; pad the batch or use smaller axes"
        )
