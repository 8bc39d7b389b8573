"""How far keys must travel: which shards need the keys of which, and the hops that serve them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from farspan.masks import Mask, clipped_ranges


class Hops(NamedTuple):
    """How far keys must travel in a ring, in shards.

    Attributes:
      before: Int: shard r needs keys of the shards r - 1 .. r - before (mod P).
      after: Int: and of the shards r + 1 .. r + after (mod P).
    """

    before: Any
    after: Any


class Sights(NamedTuple):
    """The keys that the queries of one row see, without empty ranges.

    Attributes:
      query: Place of a query in the row, int32 `[N]`, neighbours in the row as neighbours here.
      first: Place of the first key of a range that it sees, int32 `[N]`.
      last: Place of the last, int32 `[N]`.
    """

    query: NDArray[np.int32]
    first: NDArray[np.int32]
    last: NDArray[np.int32]


def needed_shards(
    mask: Mask,
    order: NDArray[np.int32],
    num_shards: int,
    segment_ids: NDArray[np.int32] | None = None,
    key_ranges: NDArray[np.int32] | None = None,
) -> NDArray[np.bool_]:
    """Says whose keys each shard needs, exactly.

    Args:
      mask: The mask.
      order: Place in the row of the token in each slot, int32 `[S]`; S a multiple of `num_shards`.
      num_shards: Sequence shards, `P`; shard r holds the slots r * S / P .. (r + 1) * S / P.
      segment_ids: Document of each token in the order of the text, int32 `[S]`, 0 for padding;
        None for one document.
      key_ranges: The batch's own ranges in the order of the text, int32 `[S, n, 2]`, if the mask
        reads them.

    Returns:
      bool `[P, P]`: `[r, s]` is True if some query of shard r sees some key of shard s.

    Cost:
      O(S log S) time at most, O(S + P^2) memory, for a mask of one range.
    """
    shard_of = np.empty(len(order), np.int32)
    shard_of[order] = np.arange(len(order)) // (len(order) // num_shards)
    return shards_seen(sights(mask, len(order), segment_ids, key_ranges), shard_of, num_shards)


def hops_needed(needs: NDArray[np.bool_]) -> Hops:
    """Finds the fewest hops that bring every shard the keys it needs.

    All shards pass keys on alike, so a shard d places before is reached by d hops of one ring or
    by P - d of the ring that turns the other way.

    Args:
      needs: bool `[P, P]`, from `needed_shards`.

    Returns:
      The pair with the least sum, at most P - 1; among equals the one with the smaller `after`.
    """
    num_shards = len(needs)
    query, key = np.nonzero(needs)
    distances = np.unique((query - key) % num_shards)
    befores = np.concatenate([[0], distances[distances > 0]])
    afters = num_shards - np.concatenate([befores[1:], [num_shards]])
    best = np.lexsort([afters, befores + afters])[0]
    return Hops(int(befores[best]), int(afters[best]))


def sights(
    mask: Mask,
    seq_len: int,
    segment_ids: NDArray[np.int32] | None = None,
    key_ranges: NDArray[np.int32] | None = None,
) -> Sights:
    """Lists the ranges of keys that the queries of one row see; arguments as in `needed_shards`."""
    lows, highs = clipped_ranges(mask, seq_len, segment_ids, key_ranges)
    which, query = np.nonzero(highs > lows)
    first, last = lows[which, query], highs[which, query] - 1
    return Sights(query.astype(np.int32), first.astype(np.int32), last.astype(np.int32))


def shards_seen(seen: Sights, shard_of: NDArray[Any], num_shards: int) -> NDArray[np.bool_]:
    """Says whose keys each shard needs.

    Neighbouring tokens of one shard, a run, are taken as one key, and the ranges that the queries
    of a shard see are joined before keys are looked up.

    Args:
      seen: From `sights`.
      shard_of: Shard of each token in the order of the text, integer `[S]`.
      num_shards: Sequence shards, `P`.

    Returns:
      As `needed_shards`.
    """
    begins = np.concatenate([[True], shard_of[1:] != shard_of[:-1]])
    run_of = np.cumsum(begins, dtype=np.int32) - 1
    run_shard = shard_of[begins].astype(np.int64)
    query, first, last = (run_of[places] for places in seen)
    differs = np.ones(len(query), np.bool_)
    differs[1:] = query[1:] != query[:-1]
    differs[1:] |= (first[1:] != first[:-1]) | (last[1:] != last[:-1])
    query, first, last = query[differs], first[differs], last[differs]
    # The shards' ranges side by side on one line, with a gap between shards.
    width = len(run_shard) + 1
    origin = run_shard[query] * width
    joined_first, joined_stop = _join(origin + first, origin + last + 1)
    shard = joined_first // width
    return _shards_in_ranges(
        shard, joined_first - shard * width, joined_stop - shard * width, run_shard, num_shards
    )


def _join(
    lows: NDArray[np.int64], highs: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Joins ranges that overlap or touch."""
    if not len(lows):
        return lows, highs
    ascending = np.argsort(lows, kind="stable")
    lows, reach = lows[ascending], np.maximum.accumulate(highs[ascending])
    apart = lows[1:] > reach[:-1]
    begins, ends = np.concatenate([[True], apart]), np.concatenate([apart, [True]])
    return lows[begins], reach[ends]


def _shards_in_ranges(
    query_shard: NDArray[np.int64],
    lows: NDArray[np.int64],
    highs: NDArray[np.int64],
    run_shard: NDArray[np.int64],
    num_shards: int,
) -> NDArray[np.bool_]:
    """Marks the shards of the runs in each range: block by block, and the ends run by run."""
    block = max(32, num_shards // 4)
    num_blocks = -(-len(run_shard) // block)
    needs = np.zeros((num_shards, num_shards), np.bool_)
    first_block = np.minimum(-(-lows // block), highs // block)
    stop_block = highs // block
    head_stop = np.where(first_block * block < lows, highs, first_block * block)
    tail_start = np.maximum(head_stop, stop_block * block)
    for starts, stops in ((lows, head_stop), (tail_start, highs)):
        run, stop, shard = starts, stops, query_shard
        while len(run):
            inside = run < stop
            run, stop, shard = run[inside], stop[inside], shard[inside]
            needs[shard, run_shard[run]] = True
            run = run + 1
    edges = np.zeros((num_shards, num_blocks + 1), np.int32)
    np.add.at(edges, (query_shard, first_block), 1)
    np.add.at(edges, (query_shard, stop_block), -1)
    covered = np.cumsum(edges, axis=1)[:, :-1] > 0
    present = np.zeros((num_blocks, num_shards), np.bool_)
    present[np.arange(len(run_shard)) // block, run_shard] = True
    needs |= covered.astype(np.float32) @ present.astype(np.float32) > 0
    return needs
