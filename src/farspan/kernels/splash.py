"""Block-sparse flash attention for TPUs, as a Pallas kernel.

Which blocks of keys a block of queries meets is a list that the program makes from the extremes of
their tokens, a few integers a block, so nothing of size Sq * Sk is made at trace time or held, any
order of tokens works, and documents that arrive with a batch thin the work like a static mask. The
kernel walks each list and fetches its blocks itself, two at a time.

    forward   a block of queries stays; keys and values pass                            out, lse
    backward  a block of keys stays; queries and dout pass, dq is added to where it lies   dk, dv

Scores are held transposed, `[keys, queries]`: the softmax then reduces over sublanes, maximum and
sum are rows of lanes, and so is all that belongs to a query (lse, delta, bounds of its keys).
Forward makes the scores of a step beside the weights of the step before. Backward computes every
score once. Outputs and gradients are accumulated transposed, `[D, S]`, too: heads narrower than a
vector's 128 lanes waste none.

On chips whose two cores share one program (v4, v5p) a grid axis marked parallel is halved between
them: heads and query blocks in forward; in backward kv heads of all rows, or, where their number is
odd, the queries' blocks, the even ones and the odd ones, whose dk and dv are then added.

Source: FlashAttention-2, arXiv:2307.08691; lists of blocks as in Splash Attention, of which
Tokamax keeps a version, github.com/openxla/tokamax.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Inexact

from farspan.kernels import splash_pallas
from farspan.kernels.base import Scores
from farspan.kernels.splash_pallas import LOG2E, Spec
from farspan.kernels.tpu import LANES, chip_of_program, default_blocks, fitting_block
from farspan.masks import Tokens, classify, key_extents, query_extents
from farspan.masks.base import UNBOUNDED


@dataclasses.dataclass(frozen=True)
class SplashKernel:
    """The TPU kernel; on other platforms it runs in Pallas's interpreter, slowly.

    Attributes:
      query_block: Queries per block in forward, at most; a multiple of 128. None: by the chip.
      key_block: Keys per block in forward, likewise.
      backward_query_block: Queries per block in backward, likewise.
      backward_key_block: Keys per block in backward, likewise.
      interpret: Whether to interpret; None: unless the program is for a TPU.
    """

    query_block: int | None = None
    key_block: int | None = None
    backward_query_block: int | None = None
    backward_key_block: int | None = None
    interpret: bool | None = None
    name: str = dataclasses.field(default="splash", init=False)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            size = getattr(self, field.name)
            if field.name.endswith("_block") and size is not None and (size < 1 or size % LANES):
                raise ValueError(
                    f"SplashKernel: {field.name} must be a positive multiple of {LANES}, got {size}"
                )

    @staticmethod
    def takes(dtype: DTypeLike) -> bool:
        """Whether the kernel takes queries, keys and values of a type."""
        return jnp.dtype(dtype) in (jnp.bfloat16, jnp.float32)

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
        grid = self._grid(query, key, query_tokens, key_tokens, scores, backward=False)
        out, lse = splash_pallas.forward(
            grid.spec,
            grid.lists(stays="query")[:, 0],
            grid.query_info(),
            grid.key_info(),
            grid.scalars(),
            scores.alibi_slopes,
            grid.by_head(query, grid.spec.query_block).mT,
            grid.by_head(key, grid.spec.key_block),
            grid.by_head(value, grid.spec.key_block).mT,
        )
        length = query.shape[1]
        return out[..., :length].transpose(0, 3, 1, 2), lse[:, :, 0, :length]

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
        grid = self._grid(query, key, query_tokens, key_tokens, scores, backward=True)
        spec = grid.spec
        sees = jnp.isfinite(lse)
        stats = jnp.stack([jnp.where(sees, lse * LOG2E, -splash_pallas.MASKED), delta], axis=2)
        stats = _pad(stats.astype(jnp.float32), spec.query_block, axis=3)
        dquery, dkey, dvalue = splash_pallas.backward(
            spec,
            grid.lists(stays="key"),
            grid.query_info(),
            grid.key_info(),
            grid.scalars(),
            scores.alibi_slopes,
            grid.by_head(query, spec.query_block).mT,
            grid.by_head(key, spec.key_block),
            grid.by_head(value, spec.key_block),
            grid.by_head(dout.astype(query.dtype), spec.query_block).mT,
            stats,
        )
        dquery = dquery[..., : query.shape[1]].transpose(0, 3, 1, 2) * scores.scale
        dkey, dvalue = (x.sum(0)[..., : key.shape[1]].transpose(0, 3, 1, 2) for x in (dkey, dvalue))
        return dquery, dkey * scores.scale, dvalue

    def _grid(
        self,
        query: Array,
        key: Array,
        query_tokens: Tokens,
        key_tokens: Tokens,
        scores: Scores,
        *,
        backward: bool,
    ) -> _Grid:
        if not self.takes(query.dtype):
            raise ValueError(
                f"splash: queries, keys and values must be bfloat16 or float32, got {query.dtype}; "
                'cast them, or use kernel="xla"'
            )
        chip = chip_of_program()
        blocks = default_blocks(chip)
        chosen = (
            (self.backward_query_block, self.backward_key_block)
            if backward
            else (self.query_block, self.key_block)
        )
        query_block = fitting_block(query.shape[1], chosen[0] or blocks.query)
        key_block = fitting_block(key.shape[1], chosen[1] or blocks.key)
        batch, kv_heads = query.shape[0], key.shape[2]
        return _Grid.make(
            batch, query_tokens, key_tokens, scores,
            query_block=query_block,
            key_block=key_block,
            chunk=math.gcd(query_block, blocks.chunk),
            splits=2 if backward and batch * kv_heads % 2 else 1,
            exact=query.dtype.itemsize >= 4,
            interpret=chip is None if self.interpret is None else self.interpret,
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _Grid:
    """How queries and keys are cut into blocks, and what the kernel is told of their tokens."""

    spec: Spec
    query_tokens: Tokens
    key_tokens: Tokens
    scores: Scores

    @staticmethod
    def make(
        batch: int,
        query_tokens: Tokens,
        key_tokens: Tokens,
        scores: Scores,
        *,
        query_block: int,
        key_block: int,
        chunk: int,
        splits: int,
        exact: bool,
        interpret: bool,
    ) -> _Grid:
        if query_tokens.length % query_block or key_tokens.length % key_block:
            query_tokens = query_tokens.with_segments(batch)
            key_tokens = key_tokens.with_segments(batch)
        bounds = scores.mask.key_ranges(query_tokens.index[:, :1], _first(query_tokens.ranges))
        spec = Spec(
            query_block=query_block,
            key_block=key_block,
            chunk=chunk,
            splits=splits,
            scale=scores.scale,
            logits_soft_cap=scores.logits_soft_cap,
            bounds=tuple((not _is(lo, -UNBOUNDED), not _is(hi, UNBOUNDED)) for lo, hi in bounds),
            segments=query_tokens.segment is not None,
            alibi=scores.alibi_slopes is not None,
            dropout_rate=0.0 if scores.dropout is None else scores.dropout.rate,
            exact=exact,
            interpret=interpret,
        )
        return _Grid(spec, query_tokens.padded(query_block), key_tokens.padded(key_block), scores)

    def lists(self, stays: str) -> Array:
        """Lists of the blocks that pass each block that stays.

        Returns:
          int32 `[B or 1, splits, blocks, 1, 1 + passing blocks]`: how many, then `2 * block`, plus
          1 where every query sees every key. Split n gets the passing blocks of remainder n.
        """
        spec = self.spec
        queries = query_extents(self.scores.mask, self.query_tokens, spec.query_block)
        keys = key_extents(self.key_tokens, spec.key_block)
        across = (lambda x: x[:, :, None]), (lambda x: x[:, None])
        by_query, by_key = across if stays == "query" else reversed(across)
        possible, whole = classify(jax.tree.map(by_query, queries), jax.tree.map(by_key, keys))
        place = jnp.arange(possible.shape[-1], dtype=jnp.int32)
        split = jnp.arange(spec.splits, dtype=jnp.int32)[:, None, None]
        possible = possible[:, None] & (place % spec.splits == split)
        last = 2 * place.size
        visits = jnp.where(possible, 2 * place + whole[:, None].astype(jnp.int32), last)
        counts = possible.sum(-1, keepdims=True, dtype=jnp.int32)
        return jnp.concatenate([counts, jnp.sort(visits, axis=-1)], -1)[..., None, :]

    def query_info(self) -> Array:
        """int32 `[B or 1, rows, Sq]`: the bounds that exist, segment if any, and place."""
        tokens, rows = self.query_tokens, list[Any]()
        ranges = self.scores.mask.key_ranges(tokens.index, tokens.ranges)
        for bounds, present in zip(ranges, self.spec.bounds, strict=True):
            rows += [bound for bound, there in zip(bounds, present, strict=True) if there]
        return _stacked([*rows, tokens.segment, tokens.index])

    def key_info(self) -> Array:
        """int32 `[B or 1, blocks, rows, key_block]`: segment if any, and place."""
        tokens = self.key_tokens
        info = _stacked([tokens.segment, tokens.index])
        info = info.reshape(*info.shape[:2], -1, self.spec.key_block)
        return info.swapaxes(1, 2)

    def scalars(self) -> Array | None:
        """What dropout needs, int32: the seed, the numbers of the rows and of the heads."""
        dropout = self.scores.dropout
        if dropout is None:
            return None
        seed = jax.lax.bitcast_convert_type(jnp.asarray(dropout.seed, jnp.uint32), jnp.int32)
        return jnp.concatenate(
            [seed[None], jnp.asarray(dropout.rows), jnp.asarray(dropout.heads)]
        ).astype(jnp.int32)

    def by_head(self, x: Array, block: int) -> Array:
        """`[B, S, heads, D]` to `[B, heads, S, D]`, padded to whole blocks."""
        return _pad(x, block, axis=1).swapaxes(1, 2)


def _stacked(rows: list[Any]) -> Array:
    there = [row for row in rows if row is not None]
    shape = functools.reduce(jnp.broadcast_shapes, [jnp.shape(row) for row in there])
    return jnp.stack([jnp.broadcast_to(row, shape) for row in there], axis=1).astype(jnp.int32)


def _pad(x: Array, multiple: int, axis: int) -> Array:
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, -x.shape[axis] % multiple)
    return jnp.pad(x, widths)


def _first(ranges: Array | None) -> Array | None:
    return None if ranges is None else ranges[:, :1]


def _is(bound: Any, value: int) -> bool:
    return isinstance(bound, int) and bound == value
