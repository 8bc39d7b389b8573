"""Blockwise attention in plain XLA, for any platform.

Queries are cut into blocks of a few hundred rows (the query heads of one kv head folded into the
rows, so that grouped-query attention is one matmul), keys into blocks of `key_block`. Each row of
blocks lists the key blocks it can see and visits only those; a block that every query sees whole
skips the mask. Scores are held transposed, `[keys, rows]`: softmax then reduces over the leading
axis, one vector operation per key, and no matmul of the backward has to transpose a score block.

Memory: one block of scores; nothing of size Sq * Sk.
Source: FlashAttention-2, arXiv:2307.08691, for the recurrences.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Inexact, Int

from farspan.kernels.base import Scores
from farspan.masks import Extents, Tokens, classify, key_extents, query_extents
from farspan.masks.tokens import in_ranges
from farspan.types import PAD_SEGMENT_ID

_MASKED = -1e30  # a score no visible pair has; finite, so that it cancels without NaN


@dataclasses.dataclass(frozen=True)
class XlaKernel:
    """The blockwise kernel.

    Attributes:
      rows: Query rows per block: queries times query heads per kv head.
      key_block: Keys per block.
    """

    rows: int = 256
    key_block: int = 128
    name: str = dataclasses.field(default="xla", init=False)

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
        grid = _Grid.make(self, query, key, query_tokens, key_tokens, scores)
        query_rows = grid.to_rows(query)
        key_blocks = grid.to_key_blocks(key)
        value_blocks = grid.to_key_blocks(value).swapaxes(-1, -2)
        dtype, value_dim = grid.accumulate, value.shape[-1]

        def row_step(_: None, place: Array) -> tuple[None, tuple[Array, Array]]:
            row = grid.row(place)
            query_row = _at(query_rows, row.batch, row.head, row.block).astype(dtype)
            query_row = query_row * scores.scale

            def visit(step: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
                greatest, total, out = carry
                block = row.order[step]
                key_block = _at(key_blocks, row.batch, row.head, block).astype(dtype)
                score, _ = grid.scores(key_block, query_row, row, block)
                new_greatest = jnp.maximum(greatest, score.max(0))
                weight = jnp.exp(score - new_greatest)
                fade = jnp.exp(greatest - new_greatest)
                value_block = _at(value_blocks, row.batch, row.head, block).astype(dtype)
                out = out * fade + grid.dot(value_block, grid.kept(weight, row, block), 1, 0)
                return new_greatest, total * fade + weight.sum(0), out

            greatest, total, out = lax.fori_loop(
                0,
                row.visits,
                visit,
                (
                    jnp.full((grid.rows,), _MASKED, dtype),
                    jnp.zeros((grid.rows,), dtype),
                    jnp.zeros((value_dim, grid.rows), dtype),
                ),
            )
            seen = greatest > _MASKED / 2
            out = jnp.where(seen, out / jnp.where(seen, total, 1), 0)
            lse = jnp.where(seen, greatest + jnp.log(jnp.where(seen, total, 1)), -jnp.inf)
            return None, (out.T, lse)

        _, (out, lse) = lax.scan(row_step, None, jnp.arange(grid.num_rows))
        return grid.from_rows(out), grid.from_row_scalars(lse)

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
        grid = _Grid.make(self, query, key, query_tokens, key_tokens, scores)
        dtype = grid.accumulate
        query_rows, dout_rows = grid.to_rows(query), grid.to_rows(dout)
        lse_rows, delta_rows = grid.to_row_scalars(lse), grid.to_row_scalars(delta)
        key_blocks, value_blocks = grid.to_key_blocks(key), grid.to_key_blocks(value)
        key_columns = key_blocks.swapaxes(-1, -2)

        def row_step(
            totals: tuple[Array, Array], place: Array
        ) -> tuple[tuple[Array, Array], Array]:
            row = grid.row(place)
            query_row = _at(query_rows, row.batch, row.head, row.block).astype(dtype)
            query_row = query_row * scores.scale
            dout_row = _at(dout_rows, row.batch, row.head, row.block).astype(dtype)
            lse_row = _at(lse_rows, row.batch, row.head, row.block)
            lse_row = jnp.where(jnp.isfinite(lse_row), lse_row, -_MASKED)  # sees nothing: weight 0
            delta_row = _at(delta_rows, row.batch, row.head, row.block)

            def visit(step: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
                dkey, dvalue, dquery = carry
                block = row.order[step]
                place = (row.batch, row.head, block)
                score, slope = grid.scores(
                    _at(key_blocks, *place).astype(dtype), query_row, row, block
                )
                weight = jnp.exp(score - lse_row)
                dweight = grid.dot(_at(value_blocks, *place).astype(dtype), dout_row, 1, 1)
                dweight = grid.kept(dweight, row, block)
                dscore = weight * (dweight - delta_row) * slope
                dkey = _add_at(dkey, grid.dot(dscore, query_row, 1, 0), *place)
                dvalue = _add_at(
                    dvalue, grid.dot(grid.kept(weight, row, block), dout_row, 1, 0), *place
                )
                key_column = _at(key_columns, *place).astype(dtype)
                return dkey, dvalue, dquery + grid.dot(key_column, dscore, 1, 0)

            dkey, dvalue, dquery = lax.fori_loop(
                0, row.visits, visit, (*totals, jnp.zeros((query.shape[-1], grid.rows), dtype))
            )
            return (dkey, dvalue), dquery.T * scores.scale

        zeros = (jnp.zeros(key_blocks.shape, dtype), jnp.zeros(value_blocks.shape, dtype))
        (dkey, dvalue), dquery = lax.scan(row_step, zeros, jnp.arange(grid.num_rows))
        return grid.from_rows(dquery), grid.from_key_blocks(dkey), grid.from_key_blocks(dvalue)


class _Row(NamedTuple):
    """One block of query rows and the key blocks it visits."""

    batch: Array
    head: Array
    block: Array
    order: Int[Array, " key_blocks"]  # key blocks to visit: the first `visits` entries
    visits: Array
    whole: Array  # bool [key_blocks]: every query sees every key
    tokens: Tokens  # of the queries, [queries]


@dataclasses.dataclass(frozen=True)
class _Grid:
    """How queries and keys are cut into blocks, and which blocks meet."""

    batch: int
    kv_heads: int
    group: int
    query_len: int
    key_len: int
    query_block: int
    key_block: int
    accumulate: jnp.dtype
    precision: lax.Precision
    query_tokens: Tokens
    key_tokens: Tokens
    query_extents: Extents
    key_extents: Extents
    scores_spec: Scores

    @staticmethod
    def make(
        kernel: XlaKernel,
        query: Array,
        key: Array,
        query_tokens: Tokens,
        key_tokens: Tokens,
        scores: Scores,
    ) -> _Grid:
        batch, query_len, heads, _ = query.shape
        key_len, kv_heads = key.shape[1], key.shape[2]
        query_block = min(max(8, kernel.rows * kv_heads // heads), query_len)
        key_block = min(kernel.key_block, key_len)
        if query_len % query_block or key_len % key_block:  # the last block needs padding
            query_tokens = query_tokens.with_segments(batch)
            key_tokens = key_tokens.with_segments(batch)
        query_tokens = query_tokens.padded(query_block)
        key_tokens = key_tokens.padded(key_block)
        exact = query.dtype.itemsize >= 4
        return _Grid(
            batch, kv_heads, heads // kv_heads, query_len, key_len, query_block, key_block,
            accumulate=jnp.promote_types(query.dtype, jnp.float32),
            precision=lax.Precision.HIGHEST if exact else lax.Precision.DEFAULT,
            query_tokens=query_tokens,
            key_tokens=key_tokens,
            query_extents=query_extents(scores.mask, query_tokens, query_block),
            key_extents=key_extents(key_tokens, key_block),
            scores_spec=scores,
        )  # fmt: skip

    @property
    def rows(self) -> int:
        """Rows of one query block: its queries times the query heads of one kv head."""
        return self.query_block * self.group

    @property
    def query_blocks(self) -> int:
        return self.query_tokens.length // self.query_block

    @property
    def num_rows(self) -> int:
        return self.batch * self.kv_heads * self.query_blocks

    def row(self, place: Array) -> _Row:
        """Unpacks the running number of a row of blocks and lists the key blocks it can see."""
        rest, block = jnp.divmod(place, self.query_blocks)
        batch, head = jnp.divmod(rest, self.kv_heads)
        queries = jax.tree.map(lambda x: _entry(x, batch)[block], self.query_extents)
        keys = jax.tree.map(lambda x: _entry(x, batch), self.key_extents)
        possible, whole = classify(queries, keys)
        order = jnp.nonzero(possible, size=possible.shape[0], fill_value=0)[0]
        tokens = jax.tree.map(
            lambda x: lax.dynamic_slice_in_dim(
                _entry(x, batch), block * self.query_block, self.query_block
            ),
            self.query_tokens,
        )
        return _Row(batch, head, block, order, possible.sum(), whole, tokens)

    def scores(
        self, key_block: Array, query_row: Array, row: _Row, block: Array
    ) -> tuple[Array, Array | float]:
        """Masked scores `[keys, rows]` of one block, and d(score) / d(scaled product)."""
        score = self.dot(key_block, query_row, 1, 1)
        slope: Array | float = 1.0
        cap = self.scores_spec.logits_soft_cap
        if cap is not None:
            squashed = jnp.tanh(score / cap)
            score, slope = cap * squashed, 1 - squashed**2
        slopes = self.scores_spec.alibi_slopes
        if slopes is not None:
            distance = abs(self.keys_of(row, block).index[:, None] - row.tokens.index)
            by_head = lax.dynamic_slice_in_dim(slopes, row.head * self.group, self.group)
            bias = (distance[..., None] * by_head).astype(self.accumulate)
            score = score - bias.reshape(score.shape)

        def masked(score: Array) -> Array:
            tokens = self.keys_of(row, block)
            ranges = self.scores_spec.mask.key_ranges(row.tokens.index, row.tokens.ranges)
            seen = in_ranges(ranges, tokens.index[:, None])
            if tokens.segment is not None:
                segment = tokens.segment[:, None]
                seen = seen & (segment == row.tokens.segment) & (segment != PAD_SEGMENT_ID)
            seen = jnp.broadcast_to(seen, (self.key_block, self.query_block))
            split = score.reshape(self.key_block, self.query_block, self.group)
            return jnp.where(seen[..., None], split, _MASKED).reshape(score.shape)

        return lax.cond(row.whole[block], lambda score: score, masked, score), slope

    def kept(self, weight: Array, row: _Row, block: Array) -> Array:
        """Applies dropout to weights, or to their gradients, `[keys, rows]` of one block."""
        dropout = self.scores_spec.dropout
        if dropout is None:
            return weight
        kept = dropout.keeps(
            dropout.rows[row.batch],
            lax.dynamic_slice_in_dim(dropout.heads, row.head * self.group, self.group),
            row.tokens.index[:, None],
            self.keys_of(row, block).index[:, None, None],
        )
        return jnp.where(kept.reshape(weight.shape), weight * (1 / (1 - dropout.rate)), 0)

    def keys_of(self, row: _Row, block: Array) -> Tokens:
        """Tokens of one block of keys."""
        return jax.tree.map(
            lambda x: lax.dynamic_slice_in_dim(
                _entry(x, row.batch), block * self.key_block, self.key_block
            ),
            self.key_tokens,
        )

    def dot(self, left: Array, right: Array, left_axis: int, right_axis: int) -> Array:
        dims = (((left_axis,), (right_axis,)), ((), ()))
        return lax.dot_general(
            left, right, dims, self.precision, preferred_element_type=self.accumulate
        )

    def to_rows(self, x: Array) -> Array:
        """`[B, Sq, H, D]` to `[B, K, query_blocks, rows, D]`."""
        x = _pad(x, self.query_block, 1)
        x = x.reshape(
            self.batch, self.query_blocks, self.query_block, self.kv_heads, self.group, -1
        )
        x = x.transpose(0, 3, 1, 2, 4, 5)
        return x.reshape(self.batch, self.kv_heads, self.query_blocks, self.rows, -1)

    def from_rows(self, x: Array) -> Array:
        """`[num_rows, rows, D]` to `[B, Sq, H, D]`."""
        x = x.reshape(
            self.batch, self.kv_heads, self.query_blocks, self.query_block, self.group, -1
        )
        x = x.transpose(0, 2, 3, 1, 4, 5)
        x = x.reshape(self.batch, -1, self.kv_heads * self.group, x.shape[-1])
        return x[:, : self.query_len]

    def to_row_scalars(self, x: Array) -> Array:
        """`[B, H, Sq]` to `[B, K, query_blocks, rows]`."""
        return self.to_rows(x.swapaxes(1, 2)[..., None])[..., 0]

    def from_row_scalars(self, x: Array) -> Array:
        """`[num_rows, rows]` to `[B, H, Sq]`."""
        return self.from_rows(x[..., None])[..., 0].swapaxes(1, 2)

    def to_key_blocks(self, x: Array) -> Array:
        """`[B, Sk, K, D]` to `[B, K, key_blocks, key_block, D]`."""
        x = _pad(x, self.key_block, 1).swapaxes(1, 2)
        return x.reshape(self.batch, self.kv_heads, -1, self.key_block, x.shape[-1])

    def from_key_blocks(self, x: Array) -> Array:
        """`[B, K, key_blocks, key_block, D]` to `[B, Sk, K, D]`."""
        x = x.reshape(self.batch, self.kv_heads, -1, x.shape[-1]).swapaxes(1, 2)
        return x[:, : self.key_len]


def _pad(x: Array, multiple: int, axis: int) -> Array:
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, -x.shape[axis] % multiple)
    return jnp.pad(x, widths)


def _entry(x: Array, batch: Array) -> Array:
    """Row `batch` of an array whose rows may be shared, `[B or 1, ...]`."""
    return x[0] if x.shape[0] == 1 else x[batch]


def _at(x: Array, *place: Array) -> Array:
    """One block of an array, by its leading indices (a slice, not a gather)."""
    starts = (*place, *[0] * (x.ndim - len(place)))
    return lax.dynamic_slice(x, starts, (1,) * len(place) + x.shape[len(place) :]).reshape(
        x.shape[len(place) :]
    )


def _add_at(x: Array, update: Array, *place: Array) -> Array:
    """Adds to one block of an array, in place."""
    starts = (*place, *[0] * update.ndim)
    block = lax.dynamic_slice(x, starts, (1,) * len(place) + update.shape)
    return lax.dynamic_update_slice(x, block + update.reshape(block.shape), starts)
