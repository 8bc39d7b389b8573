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
from farspan.kernels.tpu import LANES
from farspan.types import PAD_SEGMENT_ID

LOG2E = math.log2(math.e)
MASKED = -1e30
"""A score no visible pair has; finite, so that it cancels without NaN."""

_VMEM_BYTES = 60 * 2**20
_NN = (((1,), (0,)), ((), ()))
_NT = (((1,), (1,)), ((), ()))


@dataclasses.dataclass(frozen=True)
class Spec:
    """What is static of a call.

    Attributes:
      query_block, key_block: Block sizes.
      chunk: Queries whose scores are worked on at once; divides `query_block`.
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
    chunk: int
    splits: int
    scale: float
    logits_soft_cap: float | None
    bounds: tuple[tuple[bool, bool], ...]
    segments: bool
    alibi: bool
    dropout_rate: float
    exact: bool
    interpret: bool

    @property
    def chunks(self) -> list[slice]:
        """The chunks of a block of queries."""
        return [slice(n, n + self.chunk) for n in range(0, self.query_block, self.chunk)]

    def dot(self, left: Array, right: Array, dims: Any) -> Array:
        """A matmul that accumulates in float32."""
        precision = lax.Precision.HIGHEST if self.exact else lax.Precision.DEFAULT
        return lax.dot_general(left, right, dims, precision, preferred_element_type=jnp.float32)


@dataclasses.dataclass(frozen=True)
class _Pairs:
    """What is known of the pairs of a chunk of queries and a block of keys."""

    spec: Spec
    query_info: Array
    key_info: Array
    slope: Any = None
    dropout: Dropout | None = None
    row: Any = 0
    head: Any = 0

    @staticmethod
    def make(
        spec: Spec,
        query_info: Array,
        key_info: Array,
        scalars_ref: Any,
        slopes_ref: Any,
        row: Any,
        head: Any,
        batch: int,
    ) -> _Pairs:
        """For the queries of one row and head of `batch` rows."""
        slope, dropout = slopes_ref[head] if spec.alibi else None, None
        if spec.dropout_rate:
            dropout = Dropout(scalars_ref[0], None, None, spec.dropout_rate)
            row, head = scalars_ref[1 + row], scalars_ref[1 + batch + head]
        return _Pairs(spec, query_info, key_info, slope, dropout, row, head)

    def query_row(self, number: int) -> Array:
        return self.query_info[number : number + 1]

    def key_column(self, number: int) -> Array:
        """One row of the keys' info as columns, `[keys, queries]`."""
        row = jnp.broadcast_to(self.key_info[number : number + 1], (LANES, self.spec.key_block))
        return jnp.tile(row.T, (1, self.query_info.shape[1] // LANES))

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


@dataclasses.dataclass(frozen=True)
class _Forward:
    """One block of queries of one head.

    The scores of a chunk of queries are made while those of the chunk before are turned to weights
    and meet the values: the matrix units do not wait for an exponential. At the first step nothing
    came before: that chunk's scores are -inf, and its values 0.

    Attributes:
      batch, group, row, head: Rows, query heads per kv head, and which row and query head.
      scores, highest: Of this chunk and the one before: the scores, and the highest of every eighth
        key.
      greatest, total: Of the weights so far: the exponent's shift, and sums of every eighth key.
    """

    spec: Spec
    batch: int
    group: int
    row: Any
    head: Any
    scalars: Any
    slopes: Any
    list: Any
    query_info: Any
    query: Any
    key_info_hbm: Any
    key_hbm: Any
    value_hbm: Any
    out: Any
    lse: Any
    key_info: Any
    key: Any
    value: Any
    scores: Any
    highest: Any
    greatest: Any
    total: Any
    sent: Any

    def run(self) -> None:
        """Walks the list and leaves output and log-sum-exp."""
        visits, last = self.list[0, 0], len(self.spec.chunks) - 1
        self.greatest[...] = jnp.full_like(self.greatest, MASKED)
        self.total[...] = jnp.zeros_like(self.total)
        self.out[...] = jnp.zeros_like(self.out)
        self.highest[last % 2] = jnp.full_like(self.highest[0], MASKED)
        self.scores[last % 2] = jnp.full_like(self.scores[0], -jnp.inf)
        self.value[0] = jnp.zeros_like(self.value[0])

        _start_if(lambda: self._arriving(0), visits > 0)
        lax.fori_loop(0, visits, self._visit, None)
        self._weigh(visits - 1, last)

        greatest = self.greatest[...]
        seen = greatest > MASKED / 2
        divisor = jnp.where(seen, self.total[...].sum(0, keepdims=True), 1.0)
        self.out[...] = jnp.where(seen, self.out[...] / divisor, 0.0)
        self.lse[...] = jnp.where(seen, greatest * (1 / LOG2E) + jnp.log(divisor), -jnp.inf)

    def _visit(self, step: Any, _: None) -> None:
        _start_if(lambda: self._arriving(step + 1), step + 1 < self.list[0, 0])
        _wait(self._arriving(step))
        _by_kind(self.list[0, 1 + step], functools.partial(self._attend, step))

    def _attend(self, step: Any, whole: bool) -> None:
        chunks = self.spec.chunks
        for number, chunk in enumerate(chunks):
            product = self.spec.dot(self.key[lax.rem(step, 2)], self.query[:, chunk], _NN)
            scores, _ = self._pairs(step, chunk).scores(product, whole)
            if number:
                self._weigh(step, number - 1)
            else:
                self._weigh(step - 1, len(chunks) - 1)
            self.highest[number % 2] = _by_eights(scores).max(0)
            self.scores[number % 2] = scores

    def _weigh(self, step: Any, number: int) -> None:
        """Adds what one chunk sees of a step's values."""
        chunk = self.spec.chunks[number]
        before = self.greatest[:, chunk]
        now = jnp.maximum(before, self.highest[number % 2].max(0, keepdims=True))
        fade = jnp.exp2(before - now)
        self.greatest[:, chunk] = now
        weight = jnp.exp2(self.scores[number % 2] - now)
        self.total[:, chunk] = self.total[:, chunk] * fade + _by_eights(weight).sum(0)
        weight = self._pairs(step, chunk).kept(weight).astype(self.value.dtype)
        out = self.spec.dot(self.value[_late_slot(step)], weight, _NN)
        self.out[:, chunk] = self.out[:, chunk] * fade + out

    def _pairs(self, step: Any, chunk: slice) -> _Pairs:
        return _Pairs.make(
            self.spec, self.query_info[:, chunk], self.key_info[_late_slot(step)], self.scalars,
            self.slopes, self.row, self.head, self.batch,
        )  # fmt: skip

    def _arriving(self, step: Any) -> list[Any]:
        """Copies of a step's keys and values; those of the step before are still read meanwhile."""
        row, kv_head, block = self.row, self.head // self.group, self.list[0, 1 + step] // 2
        places, late = _run(block, self.spec.key_block), _late_slot(step)
        copies = (
            (self.key_info_hbm.at[_shared(self.key_info_hbm, row), block], self.key_info.at[late]),
            (self.key_hbm.at[row, kv_head, places], self.key.at[lax.rem(step, 2)]),
            (self.value_hbm.at[row, kv_head, :, places], self.value.at[late]),
        )
        return [
            pltpu.make_async_copy(source, target, self.sent.at[number, lax.rem(step, 2)])
            for number, (source, target) in enumerate(copies)
        ]


def _late_slot(step: Any) -> Any:
    """Of three slots that of a step, or of the one before, which is -1 for the first."""
    return lax.rem(step + 1, 3)


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
      query: `[B, H, D, Sq]`.
      key: `[B, K, Sk, D]`.
      value: `[B, K, Dv, Sk]`.

    Returns:
      `(out, lse)`, float32 `[B, H, Dv, Sq]` and `[B, H, 1, Sq]`.
    """
    batch, heads, dim, query_len = query.shape
    kv_heads, value_dim = value.shape[1:3]
    rows, columns = spec.query_block, spec.key_block
    entries = lists.shape[-1]

    def body(*refs: Any) -> None:
        place = pl.program_id(0), pl.program_id(1)
        _Forward(spec, batch, heads // kv_heads, *place, *refs).run()

    def of_queries(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, width, rows), lambda b, h, i: (b, h, 0, i))

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
            of_queries(dim),
            *[pl.BlockSpec(memory_space=pl.ANY)] * 3,
        ],
        out_specs=[of_queries(value_dim), of_queries(1)],
        out_shape=[
            jax.ShapeDtypeStruct((batch, heads, width, query_len), jnp.float32)
            for width in (value_dim, 1)
        ],
        scratch_shapes=[
            pltpu.VMEM((3, *key_info.shape[2:]), jnp.int32),
            pltpu.VMEM((2, columns, dim), key.dtype),
            pltpu.VMEM((3, value_dim, columns), value.dtype),
            pltpu.VMEM((2, columns, spec.chunk), jnp.float32),
            pltpu.VMEM((2, 8, spec.chunk), jnp.float32),
            *(pltpu.VMEM((height, rows), jnp.float32) for height in (1, 8)),
            pltpu.SemaphoreType.DMA((3, 2)),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel"),
            vmem_limit_bytes=_VMEM_BYTES,
        ),
        interpret=spec.interpret,
        name="farspan_attention_forward",
    )(scalars, slopes, lists, query_info, query, key_info, key, value)


@dataclasses.dataclass(frozen=True)
class _Backward:
    """One block of keys of one kv head; its query heads pass one after the other.

    Attributes:
      batch, group, row, kv_head: Rows, query heads per kv head, and which row and kv head.
      dquery, result: dq of the queries at hand as it was, and with this block's share.
    """

    spec: Spec
    batch: int
    group: int
    row: Any
    kv_head: Any
    scalars: Any
    slopes: Any
    list: Any
    key_info: Any
    key: Any
    turned_key: Any
    value: Any
    query_info_hbm: Any
    query_hbm: Any
    dout_hbm: Any
    stats_hbm: Any
    _: Any
    dquery_hbm: Any
    dkey: Any
    dvalue: Any
    query_info: Any
    query: Any
    dout: Any
    stats: Any
    dquery: Any
    result: Any
    received: Any
    sent: Any

    def run(self) -> None:
        """Walks the list once per query head and leaves dk and dv."""
        visits = self.list[0, 0] * self.group
        self.dkey[...] = jnp.zeros_like(self.dkey)
        self.dvalue[...] = jnp.zeros_like(self.dvalue)
        _start_if(lambda: self._arriving(0), visits > 0)
        lax.fori_loop(0, visits, functools.partial(self._visit, visits), None)
        for late in (2, 1):  # the next block of keys adds to the same dq
            _wait_if(functools.partial(self._leaving, visits - late), visits >= late)

    def _visit(self, visits: Any, step: Any, _: None) -> None:
        _start_if(lambda: self._arriving(step + 1), step + 1 < visits)
        _wait(self._arriving(step))
        _wait_if(lambda: self._leaving(step - 2), step >= 2)
        _by_kind(self._place(step)[1], functools.partial(self._attend, step))
        _start(self._leaving(step))

    def _attend(self, step: Any, whole: bool) -> None:
        spec, slot = self.spec, lax.rem(step, 2)
        for chunk in spec.chunks:
            pairs = _Pairs.make(
                spec, self.query_info[slot, :, chunk], self.key_info[...], self.scalars,
                self.slopes, self.row, self._place(step)[0], self.batch,
            )  # fmt: skip
            query, dout = self.query[slot, :, chunk], self.dout[slot, :, chunk]
            score, slope = pairs.scores(spec.dot(self.key[...], query, _NN), whole)
            weight = jnp.exp2(score - self.stats[slot, 0:1, chunk])
            dweight = pairs.kept(spec.dot(self.value[...], dout, _NN))
            dscore = weight * (dweight - self.stats[slot, 1:2, chunk]) * slope
            weight, dscore = pairs.kept(weight).astype(query.dtype), dscore.astype(query.dtype)
            self.dvalue[...] += spec.dot(dout, weight, _NT)
            self.dkey[...] += spec.dot(query, dscore, _NT)
            dquery = spec.dot(self.turned_key[...], dscore, _NN)
            self.result[slot, :, chunk] = self.dquery[slot, :, chunk] + dquery

    def _place(self, step: Any) -> tuple[Any, Any, Any]:
        """Head, entry of the list, and queries of a step."""
        per_head = self.list[0, 0]
        entry = self.list[0, 1 + lax.rem(step, per_head)]
        head = self.kv_head * self.group + step // per_head
        return head, entry, _run(entry // 2, self.spec.query_block)

    def _arriving(self, step: Any) -> list[Any]:
        head, _, places = self._place(step)
        info_row, slot = _shared(self.query_info_hbm, self.row), lax.rem(step, 2)
        by_head = (self.query_hbm, self.dout_hbm, self.stats_hbm, self.dquery_hbm)
        sources = (
            self.query_info_hbm.at[info_row, :, places],
            *(array.at[self.row, head, :, places] for array in by_head),
        )
        targets = (self.query_info, self.query, self.dout, self.stats, self.dquery)
        return [
            pltpu.make_async_copy(source, target.at[slot], self.received.at[number, slot])
            for number, (source, target) in enumerate(zip(sources, targets, strict=True))
        ]

    def _leaving(self, step: Any) -> list[Any]:
        head, _, places = self._place(step)
        target, slot = self.dquery_hbm.at[self.row, head, :, places], lax.rem(step, 2)
        return [pltpu.make_async_copy(self.result.at[slot], target, self.sent.at[slot])]


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
      query: `[B, H, D, Sq]`.
      key: `[B, K, Sk, D]`.
      value: `[B, K, Sk, Dv]`.
      dout: `[B, H, Dv, Sq]`.
      stats: float32 `[B, H, 2, Sq]`: lse in units of log 2, and delta.

    Returns:
      `(dq, dk, dv)`, float32 `[B, H, D, Sq]`, `[splits, B, K, D, Sk]` and `[splits, B, K, Dv, Sk]`;
      dq and dk without the factor `scale`.
    """
    batch, heads, dim, query_len = query.shape
    kv_heads, key_len, value_dim = value.shape[1:]
    columns, rows, entries = spec.key_block, spec.query_block, lists.shape[-1]
    dquery = jnp.zeros((batch, heads, dim, query_len), jnp.float32)
    in_hbm = pl.BlockSpec(memory_space=pl.ANY)
    arguments = (
        scalars, slopes, lists, key_info, key, key.mT, value, query_info, query, dout, stats, dquery
    )  # fmt: skip

    def body(*refs: Any) -> None:
        place = pl.program_id(1), pl.program_id(2)
        _Backward(spec, batch, heads // kv_heads, *place, *refs).run()

    def of_keys(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, columns, width), lambda _, b, k, j: (b, k, j, 0))

    def sums(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, None, width, columns), lambda s, b, k, j: (s, b, k, 0, j))

    return pl.pallas_call(
        body,
        grid=(spec.splits, batch, kv_heads, key_len // columns),
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
            of_keys(dim),
            pl.BlockSpec((None, None, dim, columns), lambda _, b, k, j: (b, k, 0, j)),
            of_keys(value_dim),
            *[in_hbm] * 5,
        ],
        out_specs=[in_hbm, sums(dim), sums(value_dim)],
        out_shape=[
            jax.ShapeDtypeStruct(dquery.shape, jnp.float32),
            *(
                jax.ShapeDtypeStruct((spec.splits, batch, kv_heads, width, key_len), jnp.float32)
                for width in (dim, value_dim)
            ),
        ],
        input_output_aliases={sum(x is not None for x in arguments) - 1: 0},
        scratch_shapes=[
            pltpu.VMEM((2, query_info.shape[1], rows), jnp.int32),
            pltpu.VMEM((2, dim, rows), query.dtype),
            pltpu.VMEM((2, value_dim, rows), dout.dtype),
            *(pltpu.VMEM((2, height, rows), jnp.float32) for height in (2, dim, dim)),
            pltpu.SemaphoreType.DMA((5, 2)),
            pltpu.SemaphoreType.DMA((2,)),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=_VMEM_BYTES,
        ),
        interpret=spec.interpret,
        name="farspan_attention_backward",
    )(*arguments)


def _run(block: Any, length: int) -> Any:
    """The places of a block."""
    return pl.ds(pl.multiple_of(block * length, length), length)


def _start(copies: list[Any]) -> None:
    for copy in copies:
        copy.start()


def _wait(copies: list[Any]) -> None:
    for copy in copies:
        copy.wait()


def _start_if(copies: Callable[[], list[Any]], condition: Any) -> None:
    pl.when(condition)(lambda: _start(copies()))


def _wait_if(copies: Callable[[], list[Any]], condition: Any) -> None:
    pl.when(condition)(lambda: _wait(copies()))


def _by_kind(entry: Any, run: Callable[[bool], None]) -> None:
    """Runs the form for a whole block, or that for one in which some pairs are masked."""
    whole = entry % 2 == 1
    pl.when(whole)(lambda: run(True))
    pl.when(jnp.logical_not(whole))(lambda: run(False))


def _by_eights(x: Array) -> Array:
    """`[keys, queries]` to `[keys / 8, 8, queries]`: to reduce the first axis moves no lane."""
    return x.reshape(-1, 8, x.shape[1])


def _shared(x: Any, row: Any) -> Any:
    """Row of an array whose rows may be shared, `[B or 1, ...]`."""
    return row if x.shape[0] > 1 else 0


def _whole_in_smem(x: Array | None) -> Any:
    return None if x is None else pl.BlockSpec(memory_space=pltpu.SMEM)
