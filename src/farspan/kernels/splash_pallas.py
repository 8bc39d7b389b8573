"""The Pallas programs of the TPU kernel; `farspan.kernels.splash` prepares what they read.

Names: a block of `query_block` queries and one of `key_block` keys meet; `info` rows are int32:
the bounds of a query's keys, segment, place. Scores are `[keys, queries]`, in units of log 2.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from farspan.kernels.dropout import Dropout
from farspan.types import PAD_SEGMENT_ID

LOG2E = math.log2(math.e)
MASKED = -1e30
"""A score no visible pair has; finite, so that it cancels without NaN."""

_LANES = 128
_VMEM_BYTES = 60 * 2**20
_NN = (((1,), (0,)), ((), ()))
_NT = (((1,), (1,)), ((), ()))
_TN = (((0,), (0,)), ((), ()))


@dataclasses.dataclass(frozen=True)
class Spec:
    """What is static of a call.

    Attributes:
      query_block, key_block: Block sizes.
      splits: Parts of the queries in backward, each with its own dk and dv.
      scale, logits_soft_cap: As in `Scores`.
      bounds: Of each range of keys, whether it has a lower and an upper bound.
      segments: Whether tokens have segments.
      alibi: Whether there are slopes.
      dropout_rate: 0: none.
      exact: Whether matmuls are to be of float32's precision.
      interpret: Whether to interpret.
    """

    query_block: int
    key_block: int
    splits: int
    scale: float
    logits_soft_cap: float | None
    bounds: tuple[tuple[bool, bool], ...]
    segments: bool
    alibi: bool
    dropout_rate: float
    exact: bool
    interpret: bool

    def dot(self, left: Array, right: Array, dims: Any) -> Array:
        """A matmul that accumulates in float32."""
        precision = lax.Precision.HIGHEST if self.exact else lax.Precision.DEFAULT
        return lax.dot_general(left, right, dims, precision, preferred_element_type=jnp.float32)


@dataclasses.dataclass(frozen=True)
class _Pairs:
    """What is known of the pairs of one block: rows `[1, queries]` and columns `[keys, 128]`."""

    spec: Spec
    query_info: Array
    key_info: Array
    slope: Any = None
    dropout: Dropout | None = None
    row: Any = 0
    head: Any = 0

    def query_row(self, number: int) -> Array:
        return self.query_info[number : number + 1]

    def key_column(self, number: int) -> Array:
        """One row of the keys' info as a column, repeated along the lanes of the queries."""
        row = jnp.broadcast_to(self.key_info[number : number + 1], (_LANES, self.spec.key_block))
        return jnp.tile(row.T, (1, self.spec.query_block // _LANES))

    @property
    def places(self) -> tuple[Array, Array]:
        """Of the queries and of the keys."""
        return self.query_row(-1 % self.query_info.shape[0]), self.key_column(
            self.key_info.shape[0] - 1
        )

    def visible(self) -> Array:
        """Which pairs see each other, bool `[keys, queries]`."""
        place, number, seen = self.places[1], 0, None
        for lower, upper in self.spec.bounds:
            inside: Any = None
            if lower:
                inside, number = place >= self.query_row(number), number + 1
            if upper:
                below, number = place < self.query_row(number), number + 1
                inside = below if inside is None else inside & below
            if inside is None:
                inside = jnp.full(place.shape, True)
            seen = inside if seen is None else seen | inside
        if self.spec.segments:
            segment = self.key_column(0)
            same = (segment == self.query_row(number)) & (segment != PAD_SEGMENT_ID)
            seen = same if seen is None else seen & same
        assert seen is not None, "a mask has at least one range"
        return seen

    def scores(self, product: Array, whole: bool) -> tuple[Array, Array | float]:
        """Scores in units of log 2, and d(score) / d(scaled product)."""
        spec, slope = self.spec, 1.0
        if spec.logits_soft_cap is None and not spec.alibi:
            score = product * (spec.scale * LOG2E)
        else:
            score = product * spec.scale
            if spec.logits_soft_cap is not None:
                squashed = jnp.tanh(score / spec.logits_soft_cap)
                score, slope = spec.logits_soft_cap * squashed, 1 - squashed * squashed
            if spec.alibi:
                query, key = self.places
                score = score - self.slope * abs(key - query).astype(jnp.float32)
            score = score * LOG2E
        if not whole:
            score = jnp.where(self.visible(), score, MASKED)
        return score, slope

    def kept(self, weight: Array) -> Array:
        """Applies dropout to weights or to their gradients."""
        if self.dropout is None:
            return weight
        kept = self.dropout.keeps(self.row, self.head, *self.places)
        return jnp.where(kept, weight * (1 / (1 - self.dropout.rate)), 0.0)


def forward(
    spec: Spec,
    lists: Array,
    query_info: Array,
    key_info: Array,
    scalars: Array | None,
    slopes: Array | None,
    query: Array,
    key: Array,
    value: Array,
) -> tuple[Array, Array]:
    """Attention of every query block over the key blocks of its list.

    Args:
      spec: What is static.
      lists: int32 `[B or 1, query blocks, 1, 1 + key blocks]`.
      query_info: int32 `[B or 1, rows, Sq]`.
      key_info: int32 `[B or 1, key blocks, rows, key_block]`.
      scalars: int32 seed, numbers of rows and of heads, or None.
      slopes: float32 `[H]`, or None.
      query: `[B, H, Sq, D]`.
      key: `[B, K, Sk, D]`.
      value: `[B, K, Dv, Sk]`.

    Returns:
      `(out, lse)`, float32 `[B, H, Dv, Sq]` and `[B, H, 1, Sq]`.
    """
    batch, heads, query_len, dim = query.shape
    kv_heads, value_dim = value.shape[1:3]
    rows = spec.query_block

    def body(
        scalars_ref: Any, slopes_ref: Any, list_ref: Any, query_info_ref: Any, query_ref: Any,
        key_info_hbm: Any, key_hbm: Any, value_hbm: Any, out_ref: Any, lse_ref: Any,
        key_info_ref: Any, key_ref: Any, value_ref: Any, greatest: Any, total: Any, semaphores: Any,
    ) -> None:  # fmt: skip
        row, head = pl.program_id(0), pl.program_id(1)
        kv_head = head // (heads // kv_heads)
        info_row = row if key_info.shape[0] > 1 else 0
        visits = list_ref[0, 0]
        greatest[...] = jnp.full_like(greatest, MASKED)
        total[...] = jnp.zeros_like(total)
        out_ref[...] = jnp.zeros_like(out_ref)

        def fetch(step: Any, slot: Any) -> list[Any]:
            block = list_ref[0, 1 + step] // 2
            start = pl.multiple_of(block * spec.key_block, spec.key_block)
            places = pl.ds(start, spec.key_block)
            sources = (
                key_info_hbm.at[info_row, block],
                key_hbm.at[row, kv_head, places],
                value_hbm.at[row, kv_head, :, places],
            )
            return _copies(sources, (key_info_ref, key_ref, value_ref), semaphores, slot)

        def attend(_: Any, slot: Any, whole: bool) -> None:
            pairs = _pairs(
                spec, query_info_ref[...], key_info_ref[slot], scalars_ref, slopes_ref, row, head,
                batch,
            )  # fmt: skip
            product = spec.dot(key_ref[slot], query_ref[...], _NT)
            score, _ = pairs.scores(product, whole)
            before = greatest[...]
            now = jnp.maximum(before, score.max(0, keepdims=True))
            weight = jnp.exp2(score - now)
            fade = jnp.exp2(before - now)
            greatest[...] = now
            total[...] = total[...] * fade + weight.sum(0, keepdims=True)
            weight = pairs.kept(weight).astype(value.dtype)
            out_ref[...] = out_ref[...] * fade + spec.dot(value_ref[slot], weight, _NN)

        _walk(visits, lambda step: list_ref[0, 1 + step] % 2 == 1, fetch, attend)
        seen = greatest[...] > MASKED / 2
        divisor = jnp.where(seen, total[...], 1.0)
        out_ref[...] = jnp.where(seen, out_ref[...] / divisor, 0.0)
        lse = greatest[...] * (1 / LOG2E) + jnp.log(divisor)
        lse_ref[...] = jnp.where(seen, lse, -jnp.inf)

    entries = lists.shape[-1]
    out_shapes = ((batch, heads, value_dim, query_len), (batch, heads, 1, query_len))
    return pl.pallas_call(
        body,
        grid=(batch, heads, query_len // rows),
        in_specs=[
            _whole_in_smem(scalars),
            _whole_in_smem(slopes),
            pl.BlockSpec(
                (None, None, 1, entries),
                lambda b, _, i: (_shared(lists, b), i, 0, 0),
                memory_space=pltpu.SMEM,
            ),
            pl.BlockSpec(
                (None, query_info.shape[1], rows), lambda b, _, i: (_shared(query_info, b), 0, i)
            ),
            pl.BlockSpec((None, None, rows, dim), lambda b, h, i: (b, h, i, 0)),
            *[pl.BlockSpec(memory_space=pl.ANY)] * 3,
        ],
        out_specs=[
            pl.BlockSpec((None, None, value_dim, rows), lambda b, h, i: (b, h, 0, i)),
            pl.BlockSpec((None, None, 1, rows), lambda b, h, i: (b, h, 0, i)),
        ],
        out_shape=[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in out_shapes],
        scratch_shapes=[
            pltpu.VMEM((2, *key_info.shape[2:]), jnp.int32),
            pltpu.VMEM((2, spec.key_block, dim), key.dtype),
            pltpu.VMEM((2, value_dim, spec.key_block), value.dtype),
            pltpu.VMEM((1, rows), jnp.float32),
            pltpu.VMEM((1, rows), jnp.float32),
            pltpu.SemaphoreType.DMA((3, 2)),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel"),
            vmem_limit_bytes=_VMEM_BYTES,
        ),
        interpret=spec.interpret,
        name="farspan_attention_forward",
    )(scalars, slopes, lists, query_info, query, key_info, key, value)


def backward(
    spec: Spec,
    lists: Array,
    query_info: Array,
    key_info: Array,
    scalars: Array | None,
    slopes: Array | None,
    query: Array,
    key: Array,
    value: Array,
    dout: Array,
    stats: Array,
) -> tuple[Array, Array, Array]:
    """Gradients of every key block over the query blocks of its list.

    Args:
      spec: What is static.
      lists: int32 `[B or 1, splits, key blocks, 1, 1 + query blocks]`.
      query_info: As in `forward`.
      key_info: As in `forward`.
      scalars: As in `forward`.
      slopes: As in `forward`.
      query: `[B, H, Sq, D]`.
      key: `[B, K, Sk, D]`.
      value: `[B, K, Sk, Dv]`.
      dout: `[B, H, Sq, Dv]`.
      stats: float32 `[B, H, 2, Sq]`: lse in units of log 2, and delta.

    Returns:
      `(dq, dk, dv)`, float32 `[B, H, D, Sq]` and `[splits, B, K, Sk, D]`, `[..., Dv]`; dq and dk
      without the factor `scale`.
    """
    batch, heads, query_len, dim = query.shape
    kv_heads, key_len, value_dim = value.shape[1:]
    group = heads // kv_heads
    columns = spec.key_block
    splits = spec.splits

    def body(
        scalars_ref: Any, slopes_ref: Any, list_ref: Any, key_info_ref: Any, key_ref: Any,
        value_ref: Any, query_info_hbm: Any, query_hbm: Any, dout_hbm: Any, stats_hbm: Any,
        _: Any, dquery_hbm: Any, dkey_ref: Any, dvalue_ref: Any,
        query_info_ref: Any, query_ref: Any, dout_ref: Any, stats_ref: Any, dquery_ref: Any,
        result_ref: Any, semaphores: Any, sent: Any,
    ) -> None:  # fmt: skip
        row, kv_head = pl.program_id(1), pl.program_id(2)
        info_row = row if query_info.shape[0] > 1 else 0
        per_head = list_ref[0, 0]
        dkey_ref[...] = jnp.zeros_like(dkey_ref)
        dvalue_ref[...] = jnp.zeros_like(dvalue_ref)

        def place(step: Any) -> tuple[Any, Any, Any]:
            """Head, query block and the rows of a step; heads pass one after the other."""
            head = kv_head * group + step // per_head
            entry = list_ref[0, 1 + lax.rem(step, per_head)]
            start = pl.multiple_of(entry // 2 * spec.query_block, spec.query_block)
            return head, entry, pl.ds(start, spec.query_block)

        def fetch(step: Any, slot: Any) -> list[Any]:
            head, _, places = place(step)
            sources = (
                query_info_hbm.at[info_row, :, places],
                query_hbm.at[row, head, places],
                dout_hbm.at[row, head, places],
                stats_hbm.at[row, head, :, places],
                dquery_hbm.at[row, head, :, places],
            )
            targets = (query_info_ref, query_ref, dout_ref, stats_ref, dquery_ref)
            return _copies(sources, targets, semaphores, slot)

        def send(step: Any, slot: Any) -> Any:
            head, _, places = place(step)
            target = dquery_hbm.at[row, head, :, places]
            return pltpu.make_async_copy(result_ref.at[slot], target, sent.at[slot])

        def attend(step: Any, slot: Any, whole: bool) -> None:
            head, _, _ = place(step)
            pairs = _pairs(
                spec, query_info_ref[slot], key_info_ref[...], scalars_ref, slopes_ref, row, head,
                batch,
            )  # fmt: skip
            queries, douts = query_ref[slot], dout_ref[slot]
            score, slope = pairs.scores(spec.dot(key_ref[...], queries, _NT), whole)
            weight = jnp.exp2(score - stats_ref[slot, 0:1])
            dweight = pairs.kept(spec.dot(value_ref[...], douts, _NT))
            dscore = weight * (dweight - stats_ref[slot, 1:2]) * slope
            weight = pairs.kept(weight).astype(query.dtype)
            dscore = dscore.astype(query.dtype)
            dvalue_ref[...] += spec.dot(weight, douts, _NN)
            dkey_ref[...] += spec.dot(dscore, queries, _NN)
            result_ref[slot] = dquery_ref[slot] + spec.dot(key_ref[...], dscore, _TN)

        def visit(step: Any, slot: Any, whole: bool) -> None:
            @pl.when(step >= 2)
            def _() -> None:
                send(step - 2, slot).wait()

            attend(step, slot, whole)
            send(step, slot).start()

        visits = per_head * group
        _walk(visits, lambda step: place(step)[1] % 2 == 1, fetch, visit)
        for late in (2, 1):

            @pl.when(visits >= late)
            def _(late: int = late) -> None:
                send(visits - late, lax.rem(visits - late, 2)).wait()

    entries = lists.shape[-1]
    per_split = (
        pl.BlockSpec((None, None, None, columns, dim), lambda s, b, k, j: (s, b, k, j, 0)),
        pl.BlockSpec((None, None, None, columns, value_dim), lambda s, b, k, j: (s, b, k, j, 0)),
    )
    dquery = jnp.zeros((batch, heads, dim, query_len), jnp.float32)
    sums = (splits, batch, kv_heads, key_len)
    in_hbm = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        body,
        grid=(splits, batch, kv_heads, key_len // columns),
        in_specs=[
            _whole_in_smem(scalars),
            _whole_in_smem(slopes),
            pl.BlockSpec(
                (None, None, None, 1, entries),
                lambda s, b, _, j: (_shared(lists, b), s, j, 0, 0),
                memory_space=pltpu.SMEM,
            ),
            pl.BlockSpec(
                (None, None, *key_info.shape[2:]),
                lambda _, b, __, j: (_shared(key_info, b), j, 0, 0),
            ),
            pl.BlockSpec((None, None, columns, dim), lambda _, b, k, j: (b, k, j, 0)),
            pl.BlockSpec((None, None, columns, value_dim), lambda _, b, k, j: (b, k, j, 0)),
            *[in_hbm] * 5,
        ],
        out_specs=[in_hbm, *per_split],
        out_shape=[
            jax.ShapeDtypeStruct(dquery.shape, jnp.float32),
            jax.ShapeDtypeStruct((*sums, dim), jnp.float32),
            jax.ShapeDtypeStruct((*sums, value_dim), jnp.float32),
        ],
        input_output_aliases={8 + (scalars is not None) + (slopes is not None): 0},
        scratch_shapes=[
            pltpu.VMEM((2, query_info.shape[1], spec.query_block), jnp.int32),
            pltpu.VMEM((2, spec.query_block, dim), query.dtype),
            pltpu.VMEM((2, spec.query_block, value_dim), dout.dtype),
            pltpu.VMEM((2, 2, spec.query_block), jnp.float32),
            pltpu.VMEM((2, dim, spec.query_block), jnp.float32),
            pltpu.VMEM((2, dim, spec.query_block), jnp.float32),
            pltpu.SemaphoreType.DMA((5, 2)),
            pltpu.SemaphoreType.DMA((2,)),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=_VMEM_BYTES,
        ),
        interpret=spec.interpret,
        name="farspan_attention_backward",
    )(
        scalars, slopes, lists, key_info, key, value, query_info, query, dout, stats, dquery
    )  # fmt: skip


def _walk(
    visits: Any,
    is_whole: Callable[[Any], Any],
    fetch: Callable[[Any, Any], list[Any]],
    visit: Callable[..., None],
) -> None:
    """Visits the blocks of a list, fetching the next one meanwhile."""

    @pl.when(visits > 0)
    def _() -> None:
        for copy in fetch(0, 0):
            copy.start()

    def step(step: Any, _: None) -> None:
        slot = lax.rem(step, 2)

        @pl.when(step + 1 < visits)
        def _() -> None:
            for copy in fetch(step + 1, 1 - slot):
                copy.start()

        for copy in fetch(step, slot):
            copy.wait()
        whole = is_whole(step)
        pl.when(whole)(functools.partial(visit, step, slot, True))
        pl.when(jnp.logical_not(whole))(functools.partial(visit, step, slot, False))

    lax.fori_loop(0, visits, step, None)


def _copies(sources: Any, targets: Any, semaphores: Any, slot: Any) -> list[Any]:
    return [
        pltpu.make_async_copy(source, target.at[slot], semaphores.at[number, slot])
        for number, (source, target) in enumerate(zip(sources, targets, strict=True))
    ]


def _pairs(
    spec: Spec,
    query_info: Array,
    key_info: Array,
    scalars_ref: Any,
    slopes_ref: Any,
    row: Any,
    head: Any,
    batch: int,
) -> _Pairs:
    slope, dropout = slopes_ref[head] if spec.alibi else None, None
    if spec.dropout_rate:
        dropout = Dropout(scalars_ref[0], None, None, spec.dropout_rate)
        row, head = scalars_ref[1 + row], scalars_ref[1 + batch + head]
    return _Pairs(spec, query_info, key_info, slope, dropout, row, head)


def _shared(x: Array, row: Any) -> Any:
    """Row of an array whose rows may be shared, `[B or 1, ...]`."""
    return row if x.shape[0] > 1 else 0


def _whole_in_smem(x: Array | None) -> Any:
    return None if x is None else pl.BlockSpec(memory_space=pltpu.SMEM)
