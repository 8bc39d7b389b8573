"""Ranges of keys that come with a batch, for masks that depend on the data (`KeyRanges`).

Made on the host, in the order of the text, beside the segment ids.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from farspan.masks.area import document_bounds
from farspan.types import PAD_SEGMENT_ID

Int32 = NDArray[np.int32]


def prefix_key_ranges(segment_ids: Int32, in_prefix: NDArray[np.bool_]) -> Int32:
    """Ranges for a prefix-LM over packed documents: `Causal() | KeyRanges(1)`.

    Args:
      segment_ids: Document of each token, int32 `[B, S]`, 0 for padding, in the order of the text;
        to be passed to `farspan.attention`, too.
      in_prefix: bool `[B, S]`: True for the tokens at the start of each document that every token
        of the document sees. Only the first run of each document counts.

    Returns:
      int32 `[B, S, 1, 2]`: for each token, the prefix of its document.

    Raises:
      ValueError: If the shapes differ.
    """
    _check_alike("prefix_key_ranges: in_prefix", in_prefix, segment_ids)
    result = np.zeros((*segment_ids.shape, 1, 2), np.int32)
    for row, (ids, inside) in enumerate(zip(segment_ids, in_prefix, strict=True)):
        start, stop = document_bounds(ids)
        place = np.arange(len(ids))
        outside = np.where(inside, len(ids), place)
        first_outside = np.minimum.accumulate(outside[::-1])[::-1]
        result[row, :, 0, 0] = start
        result[row, :, 0, 1] = np.minimum(first_outside[np.minimum(start, len(ids) - 1)], stop)
    return result


def shared_prefix_key_ranges(segment_ids: Int32, prefix_ids: Int32) -> tuple[Int32, Int32]:
    """Ranges for documents that share a prefix: `Causal() & KeyRanges(2)`.

    One prompt followed by several answers is stored once: each answer sees the prompt and itself,
    not the other answers.

    Args:
      segment_ids: Document of each token, int32 `[B, S]`, 0 for padding, in the order of the text.
      prefix_ids: int32 `[B, S]`: the document that each token sees in addition to its own, which
        must come earlier in the row; 0 for none.

    Returns:
      `(segment_ids, key_ranges)` to pass to `farspan.attention`: ids in which a prefix and the
      documents that see it are one segment, int32 `[B, S]`, and int32 `[B, S, 2, 2]`: for each
      token, the prefix and its own document.

    Raises:
      ValueError: If the shapes differ, or a prefix is not an earlier document of the row.
    """
    _check_alike("shared_prefix_key_ranges: prefix_ids", prefix_ids, segment_ids)
    ranges = np.zeros((*segment_ids.shape, 2, 2), np.int32)
    joined = np.array(segment_ids)
    for row, (ids, prefixes) in enumerate(zip(segment_ids, prefix_ids, strict=True)):
        ranges[row, :, 1] = np.stack(document_bounds(ids), -1)
        for prefix in np.unique(prefixes[prefixes != PAD_SEGMENT_ID]):
            sees = prefixes == prefix
            where = np.flatnonzero(ids == prefix)
            if not len(where) or where[-1] > np.flatnonzero(sees)[0]:
                raise ValueError(
                    "shared_prefix_key_ranges: a prefix must be an earlier document of its row, "
                    f"got prefix_ids {prefix} in row {row}, which holds the documents "
                    f"{np.unique(ids[ids != PAD_SEGMENT_ID]).tolist()}; put the prefix first"
                )
            if prefixes[where].any():
                raise ValueError(
                    "shared_prefix_key_ranges: a prefix cannot have a prefix of its own, got one "
                    f"for document {prefix} in row {row}; make the two one document"
                )
            ranges[row, sees, 0] = where[0], where[-1] + 1
            joined[row, sees] = prefix
    return joined, ranges


def _check_alike(what: str, found: NDArray[np.generic], segment_ids: Int32) -> None:
    if found.shape != segment_ids.shape or segment_ids.ndim != 2:
        raise ValueError(
            f"{what} and segment_ids must be [B, S] alike, got {found.shape} and "
            f"{segment_ids.shape}"
        )
