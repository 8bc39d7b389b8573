"""Exact counts of visible (query, key) pairs, without the S x S matrix."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from farspan.masks.base import UNBOUNDED, Mask


def pairs_per_query(
    mask: Mask,
    seq_len: int,
    segment_ids: NDArray[np.int32] | None = None,
    key_ranges: NDArray[np.int32] | None = None,
) -> NDArray[np.int64]:
    """Counts the keys that each query of one row sees.

    Args:
      mask: The mask.
      seq_len: Tokens in the row, `S`.
      segment_ids: Document of each token in the order of the text, int32 `[S]`, 0 for padding;
        None for one document. The tokens of a document must be neighbours.
      key_ranges: The batch's own ranges, int32 `[S, n, 2]`, if the mask reads them.

    Returns:
      int64 `[S]`: visible keys of each query, 0 for padding.

    Raises:
      ValueError: If a document's tokens are not neighbours.

    Cost:
      O(S) time and memory for a mask of one range.
    """
    lows, highs = clipped_ranges(mask, seq_len, segment_ids, key_ranges)
    order = np.argsort(lows, axis=0, kind="stable")
    lows, highs = np.take_along_axis(lows, order, 0), np.take_along_axis(highs, order, 0)
    count = np.zeros(seq_len, np.int64)
    covered = np.full(seq_len, -UNBOUNDED, np.int64)
    for lo, hi in zip(lows, highs, strict=True):
        count += np.maximum(0, hi - np.maximum(lo, covered))
        covered = np.maximum(covered, hi)
    return count


def clipped_ranges(
    mask: Mask,
    seq_len: int,
    segment_ids: NDArray[np.int32] | None = None,
    key_ranges: NDArray[np.int32] | None = None,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Gives the ranges of keys that each query of one row sees, cut to its document.

    Args:
      mask: As in `pairs_per_query`.
      seq_len: As in `pairs_per_query`.
      segment_ids: As in `pairs_per_query`.
      key_ranges: As in `pairs_per_query`.

    Returns:
      `(lo, hi)`, int64 `[ranges, S]` each, in 0..S; a range with `hi <= lo` is empty.
    """
    index = np.arange(seq_len, dtype=np.int64)
    start, stop = np.zeros_like(index), np.full_like(index, seq_len)
    if segment_ids is not None:
        start, stop = document_bounds(segment_ids)
    bounds = mask.key_ranges(index, key_ranges)
    clipped = np.array([
        [np.clip(np.broadcast_to(bound, index.shape), start, stop) for bound in pair]
        for pair in bounds
    ])  # fmt: skip
    return clipped[:, 0], clipped[:, 1]


def visible_pairs(
    mask: Mask,
    seq_len: int,
    segment_ids: NDArray[np.int32] | None = None,
    key_ranges: NDArray[np.int32] | None = None,
) -> int:
    """Counts the visible (query, key) pairs of one row: the work of attention per head.

    Args:
      mask: The mask.
      seq_len: Tokens in the row, `S`.
      segment_ids: As in `pairs_per_query`.
      key_ranges: As in `pairs_per_query`.

    Returns:
      The exact count; a causal document of n tokens has n * (n + 1) / 2.
    """
    return int(pairs_per_query(mask, seq_len, segment_ids, key_ranges).sum())


def document_bounds(
    segment_ids: NDArray[np.int32],
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """First place and place after the last of each token's document, int64 `[S]` each.

    Padding gets an empty range. Raises ValueError if a document's tokens are not neighbours.
    """
    change = np.flatnonzero(np.diff(segment_ids)) + 1
    starts = np.concatenate([[0], change]).astype(np.int64)
    stops = np.concatenate([change, [len(segment_ids)]]).astype(np.int64)
    names = segment_ids[starts]
    real = names[names != 0]
    if len(np.unique(real)) != len(real):
        raise ValueError(
            "segment_ids: the tokens of a document must be neighbours in the order of the text, "
            "but an id comes back after another one; give each document its own id, and pass ids "
            "in the order of the text (before a layout permutes the row)"
        )
    lengths = stops - starts
    start, stop = np.repeat(starts, lengths), np.repeat(stops, lengths)
    return start, np.where(segment_ids == 0, start, stop)
