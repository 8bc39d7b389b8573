"""Exact counts of visible (query, key) pairs, without the S x S matrix."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from farspan.masks.base import UNBOUNDED, Mask


def pairs_per_query(
    mask: Mask, seq_len: int, segment_ids: NDArray[np.int32] | None = None
) -> NDArray[np.int64]:
    """Counts the keys that each query of one row sees.

    Args:
      mask: The mask.
      seq_len: Tokens in the row, `S`.
      segment_ids: Document of each token in the order of the text, int32 `[S]`, 0 for padding;
        None for one document. The tokens of a document must be neighbours.

    Returns:
      int64 `[S]`: visible keys of each query, 0 for padding.

    Raises:
      ValueError: If a document's tokens are not neighbours.

    Cost:
      O(S) time and memory for a mask of one range.
    """
    index = np.arange(seq_len, dtype=np.int64)
    start, stop = np.zeros_like(index), np.full_like(index, seq_len)
    if segment_ids is not None:
        start, stop = document_bounds(segment_ids)
    bounds = [
        (np.clip(np.broadcast_to(lo, index.shape), start, stop),
         np.clip(np.broadcast_to(hi, index.shape), start, stop))
        for lo, hi in mask.key_ranges(index)
    ]  # fmt: skip
    lows, highs = np.stack([lo for lo, _ in bounds]), np.stack([hi for _, hi in bounds])
    order = np.argsort(lows, axis=0, kind="stable")
    lows, highs = np.take_along_axis(lows, order, 0), np.take_along_axis(highs, order, 0)
    count = np.zeros_like(index)
    covered = np.full_like(index, -UNBOUNDED)
    for lo, hi in zip(lows, highs, strict=True):
        count += np.maximum(0, hi - np.maximum(lo, covered))
        covered = np.maximum(covered, hi)
    return count


def visible_pairs(mask: Mask, seq_len: int, segment_ids: NDArray[np.int32] | None = None) -> int:
    """Counts the visible (query, key) pairs of one row: the work of attention per head.

    Args:
      mask: The mask.
      seq_len: Tokens in the row, `S`.
      segment_ids: As in `pairs_per_query`.

    Returns:
      The exact count; a causal document of n tokens has n * (n + 1) / 2.
    """
    return int(pairs_per_query(mask, seq_len, segment_ids).sum())


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
