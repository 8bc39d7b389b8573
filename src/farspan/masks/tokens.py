"""What a mask needs to know of tokens, and the questions that are asked of it.

The functions here use array operators only, so they take NumPy and JAX arrays alike.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from farspan.masks.base import UNBOUNDED, Mask, Ranges
from farspan.types import PAD_SEGMENT_ID, Leaf


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tokens:
    """Identity of a run of token slots: what masks are evaluated on.

    A slot is where a token lies; its index is where it stands in the row. A layout makes the two
    differ, so every kernel gets the index and never derives it.

    Attributes:
      index: Place in the row, int32 `[B, S]` or `[1, S]` where all rows agree.
      segment: Document of each token, int32 `[B, S]`, `PAD_SEGMENT_ID` for padding; None when
        each row is one document without padding.
      ranges: Ranges of keys that each query sees by the batch's own data, int32 `[B, S, n, 2]`;
        None where the mask reads none. Keys have none.
    """

    index: Leaf
    segment: Leaf | None = None
    ranges: Leaf | None = None

    @property
    def length(self) -> int:
        """Number of token slots, `S`."""
        return self.index.shape[-1]

    def with_segments(self, batch: int) -> Tokens:
        """The same tokens with segments: without them, each of `batch` rows is one document."""
        if self.segment is not None:
            return self
        segment = jnp.ones((batch, self.length), jnp.int32)
        return dataclasses.replace(self, segment=segment)

    def padded(self, multiple: int) -> Tokens:
        """The same tokens and after them padding to whole blocks; needs segments to pad."""
        missing = -self.length % multiple
        if not missing:
            return self
        assert self.segment is not None, "only a segment id tells padding"

        def pad(x: Any) -> Any:
            return jnp.pad(x, [(0, missing) if axis == 1 else (0, 0) for axis in range(x.ndim)])

        return jax.tree.map(pad, self)


class RangeExtents(NamedTuple):
    """Least and greatest bounds of one range over each block of queries; None: unbounded."""

    lo_min: Leaf | None
    lo_max: Leaf | None
    hi_min: Leaf | None
    hi_max: Leaf | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Extents:
    """Extremes of each block of tokens, padding left out. All `[..., num_blocks]`.

    Attributes:
      index_min, index_max: Of the places. A block of padding alone has min > max.
      segment_min, segment_max: Of the segments, or None where tokens have none.
      padded: Whether the block holds padding, or None likewise.
      ranges: Of the ranges of keys that the queries see; empty for keys.
    """

    index_min: Leaf
    index_max: Leaf
    segment_min: Leaf | None = None
    segment_max: Leaf | None = None
    padded: Leaf | None = None
    ranges: tuple[RangeExtents, ...] = ()


def visible(mask: Mask, query: Tokens, key: Tokens) -> Any:
    """The dense mask: True where a query sees a key.

    Args:
      mask: The mask.
      query: Tokens of the queries, `[B, Sq]`.
      key: Tokens of the keys, `[B, Sk]`; has segments exactly if `query` has.

    Returns:
      Bool `[B or 1, Sq, Sk]`. Padding sees nothing and is seen by nothing.
    """
    given = None if query.ranges is None else query.ranges[..., :, None, :, :]
    seen = in_ranges(mask.key_ranges(query.index[..., :, None], given), key.index[..., None, :])
    if query.segment is not None and key.segment is not None:
        query_segment, key_segment = query.segment[..., :, None], key.segment[..., None, :]
        seen = seen & (query_segment == key_segment) & (key_segment != PAD_SEGMENT_ID)
    return seen


def in_ranges(ranges: Ranges, key_index: Any) -> Any:
    """True where a key's place lies in one of the ranges (broadcast against their bounds)."""
    result: Any = None
    for lo, hi in ranges:
        inside: Any = key_index == key_index
        if not (isinstance(lo, int) and lo == -UNBOUNDED):
            inside = key_index >= lo
        if not (isinstance(hi, int) and hi == UNBOUNDED):
            below = key_index < hi
            inside = below if isinstance(lo, int) and lo == -UNBOUNDED else inside & below
        result = inside if result is None else result | inside
    return result


def key_extents(tokens: Tokens, block: int) -> Extents:
    """Extents of each block of `block` neighbouring slots.

    Args:
      tokens: `[B, S]`, JAX arrays; `S` a multiple of `block`.
      block: Slots per block.

    Returns:
      Extents of shape `[B or 1, S // block]`.
    """
    segment = tokens.segment
    index_min, index_max = _extremes(tokens.index, segment, block)
    if segment is None:
        return Extents(index_min, index_max)
    segment_min, segment_max = _extremes(segment, segment, block)
    padded = _blocks(segment == PAD_SEGMENT_ID, block).any(-1)
    return Extents(index_min, index_max, segment_min, segment_max, padded)


def query_extents(mask: Mask, tokens: Tokens, block: int) -> Extents:
    """`key_extents` of queries, and the extremes of the ranges of keys that they see."""
    ranges: list[RangeExtents] = []
    for bounds in mask.key_ranges(tokens.index, tokens.ranges):
        found: list[Leaf | None] = []
        for bound, none in zip(bounds, (-UNBOUNDED, UNBOUNDED), strict=True):
            if isinstance(bound, int) and bound == none:
                found += [None, None]
            else:
                every = jnp.broadcast_to(
                    bound, jnp.broadcast_shapes(jnp.shape(bound), tokens.index.shape)
                )
                found += _extremes(every, tokens.segment, block)
        ranges.append(RangeExtents(*found))
    return dataclasses.replace(key_extents(tokens, block), ranges=tuple(ranges))


def classify(query: Extents, key: Extents) -> tuple[Any, Any]:
    """Classifies pairs of blocks as empty, partial or full (extents broadcast together).

    Args:
      query: From `query_extents`.
      key: From `key_extents`.

    Returns:
      `(possible, certain)`, bool: a block pair is empty where `possible` is False (no query in it
      sees a key in it) and full where `certain` is True (every query sees every key). `possible`
      may be True for a pair that turns out empty, and `certain` False for one that is full;
      never the other way round.
    """
    possible: Any = False
    certain: Any = False
    for lo_min, lo_max, hi_min, hi_max in query.ranges:
        some: Any = True
        every: Any = True
        if lo_min is not None:
            some, every = key.index_max >= lo_min, key.index_min >= lo_max
        if hi_max is not None:
            some, every = some & (key.index_min < hi_max), every & (key.index_max < hi_min)
        possible, certain = possible | some, certain | every
    possible = possible & (key.index_min <= key.index_max) & (query.index_min <= query.index_max)
    if query.segment_min is not None:
        assert key.segment_min is not None, "queries and keys both have segments, or neither has"
        possible = (
            possible
            & (query.segment_min <= key.segment_max)
            & (key.segment_min <= query.segment_max)
        )
        certain = (
            certain
            & (query.segment_min == query.segment_max)
            & (key.segment_min == key.segment_max)
            & (query.segment_min == key.segment_min)
            & (query.padded == 0)
            & (key.padded == 0)
        )
    return possible, certain & possible


def _blocks(x: Any, block: int) -> Any:
    return x.reshape(*x.shape[:-1], -1, block)


def _extremes(x: Any, segment: Any | None, block: int) -> tuple[Any, Any]:
    """Least and greatest of each block, padding left out."""
    if segment is None:
        return _blocks(x, block).min(-1), _blocks(x, block).max(-1)
    real = segment != PAD_SEGMENT_ID
    least = _blocks(jnp.where(real, x, UNBOUNDED), block).min(-1)
    return least, _blocks(jnp.where(real, x, -UNBOUNDED), block).max(-1)


def block_map(mask: Mask, query: Tokens, key: Tokens, query_block: int, key_block: int) -> Any:
    """Counts how dense each block pair is, exactly, for display and tests.

    Args:
      mask: The mask.
      query: Tokens of the queries, `[B, Sq]`.
      key: Tokens of the keys, `[B, Sk]`.
      query_block: Queries per block; divides `Sq`.
      key_block: Keys per block; divides `Sk`.

    Returns:
      Visible pairs per block, int64 NumPy `[B or 1, Sq // query_block, Sk // key_block]`.

    Cost:
      Builds the dense mask: for short rows.
    """
    dense = np.asarray(visible(mask, query, key))
    rows, cols = query.length // query_block, key.length // key_block
    blocks = dense.reshape(dense.shape[0], rows, query_block, cols, key_block)
    return blocks.sum(axis=(2, 4), dtype=np.int64)
