"""Attention over a split sequence as one differentiable operation on global arrays.

The custom VJP lies outside `jax.shard_map`, so no collective is ever transposed by autodiff.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jaxtyping import Array

from farspan import schedules
from farspan.context.base import Call, Gradients, Keys, Local, Queries, Slots, wait_for
from farspan.context.expansion import Expansion, Latent, Plain
from farspan.context.parallel import ContextParallel
from farspan.dist import axis_product, present
from farspan.kernels import Dropout, Kernel, Scores
from farspan.layouts import get_layout
from farspan.masks import Mask
from farspan.ops.merge import add_sinks
from farspan.types import ATTENTION_NAMES, PAD_SEGMENT_ID, Leaf


@dataclasses.dataclass(frozen=True)
class Plan:
    """The static part of a call: a compile key.

    Attributes:
      context: How the sequence is split; None: one device.
      kernel: Computes blocks.
      mask, scale, logits_soft_cap: As in `Scores`.
      alibi_slopes: A slope per query head, or None.
      dropout_rate: Probability to drop a weight.
    """

    context: ContextParallel | None
    kernel: Kernel
    mask: Mask
    scale: float
    logits_soft_cap: float | None = None
    alibi_slopes: tuple[float, ...] | None = None
    dropout_rate: float = 0.0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Data:
    """What comes with a batch, global. Nothing here is differentiated.

    Attributes:
      segment_ids, index, key_ranges: As in `Slots`, in the order of the layout.
      dropout_seed: uint32 scalar, or None.
      hops: How far keys must travel, or None where that is not data.
    """

    segment_ids: Leaf | None = None
    index: Leaf | None = None
    key_ranges: Leaf | None = None
    dropout_seed: Leaf | None = None
    hops: schedules.Hops | None = None

    @property
    def real(self) -> Array | None:
        """Bool `[B, S]`: False at padding; None if there is none."""
        return None if self.segment_ids is None else self.segment_ids != PAD_SEGMENT_ID


Arrays = tuple[Array, ...]


@functools.partial(jax.jit, static_argnums=0)
def attend(
    plan: Plan, query: Array, keys: Arrays, weights: Arrays, sinks: Array | None, data: Data
) -> tuple[Array, Array]:
    """Computes `(out, lse)`, differentiable in `query`, `keys`, `weights` and `sinks`.

    Args:
      plan: The static part of the call.
      query: `[B, S, H, D]`.
      keys: As in `context.base.Keys.arrays`, global.
      weights: As in `Expansion.weights`; empty if `keys` are keys and values.
      sinks: `[H]`, or None.
      data: What comes with the batch.
    """
    real = data.real
    if real is not None:  # whatever bits padding holds, 0 * NaN must not arise

        def clean(x: Array) -> Array:
            return jnp.where(real.reshape(*real.shape, *[1] * (x.ndim - 2)), x, 0)

        query, keys = clean(query), tuple(map(clean, keys))
    return _attention(plan, query, keys, weights, sinks, data)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(
    plan: Plan, query: Array, keys: Arrays, weights: Arrays, sinks: Array | None, data: Data
) -> tuple[Array, Array]:
    out, lse = _on_devices(plan, Queries(query, _slots(data)), keys, weights, data)
    if sinks is not None:
        out, lse = add_sinks(out, lse, sinks)
    if data.real is not None:
        lse = jnp.where(data.real[:, None, :], lse, -jnp.inf)
    return out.astype(query.dtype), lse


def _attention_forward(
    plan: Plan, query: Array, keys: Arrays, weights: Arrays, sinks: Array | None, data: Data
) -> tuple[tuple[Array, Array], Any]:
    out, lse = _attention(plan, query, keys, weights, sinks, data)
    out, lse = map(checkpoint_name, (out, lse), ATTENTION_NAMES)
    return (out, lse), (query, keys, weights, sinks, data, out, lse)


def _attention_backward(plan: Plan, saved: Any, cotangents: tuple[Array, Array]) -> Any:
    query, keys, weights, sinks, data, out, lse = saved
    dout, dlse = cotangents
    sees = ~jnp.isneginf(lse)
    dlse = jnp.where(sees, dlse, 0)
    dout = jnp.where(sees.swapaxes(1, 2)[..., None], dout, 0)
    products = out.astype(lse.dtype) * dout.astype(lse.dtype)
    delta = products.sum(-1).swapaxes(1, 2) - dlse
    queries = Queries(query, _slots(data), dout, lse, delta)
    found = _on_devices(plan, queries, keys, weights, data)
    dsinks = None
    if sinks is not None:
        share = jnp.where(sees, jnp.exp(sinks.astype(lse.dtype)[:, None] - lse), 0)
        dsinks = -(share * delta).sum((0, 2)).astype(sinks.dtype)
    inputs = Gradients(query, keys, weights)
    found = jax.tree.map(lambda dx, x: dx.astype(x.dtype), found, inputs)
    return found.query, found.keys, found.weights, dsinks, None


_attention.defvjp(_attention_forward, _attention_backward)


def _slots(data: Data) -> Slots:
    return Slots(jnp.zeros(1, jnp.int32), data.segment_ids, data.index, data.key_ranges)


def _on_devices(plan: Plan, queries: Queries, keys: Arrays, weights: Arrays, data: Data) -> Any:
    """Runs the strategy on every device's shard of global arrays: backward if there is `dout`.

    Returns:
      What the strategy returns, global.
    """
    context = plan.context
    seed, hops = data.dropout_seed, data.hops
    if context is None:
        return _local(plan, queries, keys, weights, seed, hops)
    rows = _Specs(context)
    query_specs = Queries(
        rows.heads,
        Slots(
            PartitionSpec(),
            *(
                None if x is None else context.partition_spec(x.ndim)
                for x in (data.segment_ids, data.index, data.key_ranges)
            ),
        ),
        *[None if x is None else spec for x, spec in (
            (queries.dout, rows.heads), (queries.lse, rows.rows), (queries.delta, rows.rows)
        )],
    )  # fmt: skip
    key_specs = tuple(rows.heads if x.ndim == 4 else context.partition_spec(3) for x in keys)
    weight_specs = (rows.weights,) * len(weights)
    in_specs = (query_specs, key_specs, weight_specs, PartitionSpec(), PartitionSpec())
    if queries.dout is None:
        out_specs: Any = (rows.heads, rows.rows)
    else:
        out_specs = Gradients(rows.heads, key_specs, weight_specs)
    # The custom VJP is outside, so nothing is transposed here and no replication is to be checked.
    return jax.shard_map(
        functools.partial(_local, plan),
        mesh=context.mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        check_vma=False,
    )(queries, keys, weights, seed, hops)


def _local(
    plan: Plan,
    queries: Queries,
    keys: Arrays,
    weights: Arrays,
    seed: Array | None,
    hops: schedules.Hops | None,
) -> Any:
    """What one device does."""
    context = plan.context
    call = _call(plan, queries, weights, seed)
    strategy = Local()
    if context is not None:
        if context.degrees.sequence > 1:
            shard = lax.axis_index(context.sequence_axes)[None]
            slots = dataclasses.replace(queries.slots, shards=shard)
            queries = dataclasses.replace(queries, slots=slots)
        shard_tokens = queries.query.shape[1] * context.degrees.heads
        strategy = context.strategy_object(
            hops or _static_hops(plan, queries, shard_tokens), latent=bool(weights)
        )
    if queries.dout is None:
        return strategy.forward(call, queries, Keys(keys, queries.slots.of_keys()), None)
    fetched = (queries.query, keys, queries.slots)
    query, keys, slots = wait_for(fetched, queries.delta)
    queries = dataclasses.replace(queries, query=query, slots=slots)
    found = strategy.backward(call, queries, Keys(keys, slots.of_keys()), None)
    return found if context is None else _sum_shared(context, found)


def _static_hops(plan: Plan, queries: Queries, shard_tokens: int) -> schedules.Hops | None:
    """Hops that the mask's reach bounds, where the layout says the places of tokens."""
    assert plan.context is not None
    if queries.slots.index is not None:
        return None
    degree = plan.context.degrees.sequence
    return schedules.reach_hops(plan.context.layout_object, degree, shard_tokens, plan.mask)


def _sum_shared(context: ContextParallel, found: Gradients) -> Gradients:
    """Sums gradients over devices that each have a part of them.

    Those are the matrices of a latent, which every device of a tensor shard uses, and the latent
    itself, which all tensor shards use.
    """
    everywhere = (*context.batch_axes, *context.context_axes)
    shared = present(context.mesh, everywhere)
    tensor = present(context.mesh, (context.head_axis,))
    keys = found.keys
    if context.tensor > 1:
        keys = tuple(lax.psum(dx, tensor) if dx.ndim == 3 else dx for dx in keys)
    weights = found.weights
    if axis_product(context.mesh, shared) > 1:
        weights = tuple(lax.psum(dx, shared) for dx in weights)
    return dataclasses.replace(found, keys=keys, weights=weights)


def _call(plan: Plan, queries: Queries, weights: Arrays, seed: Array | None) -> Call:
    context = plan.context
    batch, _, num_heads, _ = queries.query.shape
    first_row: Array | int = 0
    first_head: Array | int = 0
    if context is not None:
        batch_axes = present(context.mesh, context.batch_axes)
        if context.batch_shards > 1:
            first_row = lax.axis_index(batch_axes) * batch
        if context.tensor > 1:
            first_head = lax.axis_index(context.head_axis) * num_heads
    slopes = None
    if plan.alibi_slopes is not None:
        slopes = jnp.asarray(plan.alibi_slopes, jnp.float32)
        slopes = lax.dynamic_slice_in_dim(slopes, first_head, num_heads)
    dropout = None
    if plan.dropout_rate:
        rows = first_row + jnp.arange(batch, dtype=jnp.int32)
        heads = first_head + jnp.arange(num_heads, dtype=jnp.int32)
        dropout = Dropout(seed, rows, heads, plan.dropout_rate)
    scores = Scores(plan.mask, plan.scale, plan.logits_soft_cap, slopes, dropout)
    expansion: Expansion = Latent(weights) if weights else Plain()
    if context is None:
        return Call(plan.kernel, scores, get_layout("contiguous"), 1, expansion)
    return Call(
        plan.kernel,
        scores,
        context.layout_object,
        context.degrees.sequence,
        expansion,
        context.orders_collectives,
    )


class _Specs:
    """Partitioning of the arrays of a call."""

    def __init__(self, context: ContextParallel) -> None:
        self.heads = context.partition_spec(4, head_dim=2)
        batch, sequence, tensor, _ = self.heads
        self.rows = PartitionSpec(batch, tensor, sequence)
        self.weights = PartitionSpec(None, tensor, None)
