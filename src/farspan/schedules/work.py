"""Who computes with whose keys at each step, what travels meanwhile, and how much work that is."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from farspan.layouts import Layout
from farspan.masks import Mask, clipped_ranges, pairs_per_query
from farspan.schedules.balance import row_order
from farspan.schedules.halo import HaloTransfer
from farspan.schedules.hops import Hops
from farspan.schedules.rules import Degrees, kv_replicas
from farspan.schedules.traffic import AttentionShape, group_hops


@dataclasses.dataclass(frozen=True)
class Move:
    """Keys that travel from one sequence shard to another.

    Attributes:
      keys: Whose keys they are.
      sender: The shard that sends them.
      receiver: The shard that receives them.
      tokens: How many; None for all that the shard holds.
      steps_under: Steps whose compute needs neither these keys nor what follows from them: the
        receiver first computes with them so many steps after they set out. 0: it waits for them.
    """

    keys: int
    sender: int
    receiver: int
    tokens: int | None = None
    steps_under: int = 0


@dataclasses.dataclass(frozen=True)
class Step:
    """One step of a strategy, for every sequence shard at once.

    Attributes:
      sources: `sources[r]`: the shards whose keys shard r computes with in this step.
      moves: What sets out when the step begins.
    """

    sources: tuple[tuple[int, ...], ...]
    moves: tuple[Move, ...] = ()


def steps(
    strategy: str,
    degrees: Degrees,
    hops: Hops | None = None,
    halo: Sequence[HaloTransfer] | None = None,
) -> tuple[Step, ...]:
    """Lists the steps of one attention layer's forward.

    Args:
      strategy: A name in `STRATEGIES`.
      degrees: From `degrees`.
      hops: How far keys travel in a ring; None is all the way round.
      halo: From `halo_transfers`; None, where nothing is known of the mask, is every key.

    Returns:
      For a ring, a step for each distance: 0, 1, ..., hops.before and then -1, ..., -hops.after; at
      distance d shard r computes with the keys of shard (r - d) mod P. A ring of rings goes through
      all distances inside for each distance of the outer ring. For the others, one step.
    """
    if strategy in ("ring", "usp"):
        return _ring_steps(degrees, hops)
    shards = range(degrees.sequence)
    if halo is None:
        moves = tuple(Move(s, s, r) for r in shards for s in shards if s != r)
    else:
        moves = tuple(Move(s, s, r, part.tokens) for part in halo for s, r in part.pairs)
    came = [{r} | {move.keys for move in moves if move.receiver == r} for r in shards]
    return (Step(tuple(tuple(sorted(keys)) for keys in came), moves),)


def _ring_steps(degrees: Degrees, hops: Hops | None) -> tuple[Step, ...]:
    outer, inner = degrees.outer, degrees.sequence // degrees.outer
    shards = range(degrees.sequence)
    hops = Hops(degrees.sequence - 1, 0) if hops is None else hops
    rounds, inside = [0], _distances(hops)
    if outer > 1:
        rounds, inside = _distances(group_hops(hops, inner, outer)), _distances(Hops(inner - 1, 0))

    def shift(shard: int, groups: int, places: int) -> int:
        """The shard so many groups and places before, in rings both."""
        group, place = divmod(shard, inner)
        return (group - groups) % outer * inner + (place - places) % inner

    found: list[Step] = []
    for nth_round, around in enumerate(rounds):
        for nth, distance in enumerate(inside):
            moves: list[Move] = []
            if nth == 0:
                for far in rounds[nth_round + 1 : nth_round + 2]:
                    moves += [
                        Move(shift(r, far, 0), shift(r, _sign(far), 0), r, None, len(inside))
                        for r in shards
                    ]
            for near in inside[nth + 1 : nth + 2]:
                moves += [
                    Move(shift(r, around, near), shift(r, 0, _sign(near)), r, None, 1)
                    for r in shards
                ]
            sources = tuple((shift(r, around, distance),) for r in shards)
            found.append(Step(sources, tuple(moves)))
    return tuple(found)


def _distances(hops: Hops) -> list[int]:
    return [*range(hops.before + 1), *range(-1, -hops.after - 1, -1)]


def _sign(distance: int) -> int:
    return 1 if distance > 0 else -1


def key_bytes_per_token(degrees: Degrees, shape: AttentionShape) -> int:
    """Bytes of one token's keys and values as they travel between sequence shards in forward.

    Args:
      degrees: From `degrees`.
      shape: Sizes of the layer.
    """
    heads = shape.num_kv_heads * kv_replicas(shape.num_kv_heads, degrees.heads) // degrees.heads
    return shape.key_elements(heads) * shape.itemsize + 4 * shape.metadata_arrays


def pairs_per_shard(
    mask: Mask,
    layout: Layout,
    seq_len: int,
    num_shards: int,
    segment_ids: NDArray[np.int32] | None = None,
    key_ranges: NDArray[np.int32] | None = None,
) -> NDArray[np.int64]:
    """Counts the visible (query, key) pairs whose query each sequence shard holds.

    Args:
      mask: The mask.
      layout: The layout; a balanced one is solved for the row.
      seq_len: Tokens in the row, in the order of the text.
      num_shards: Sequence shards (`Degrees.sequence`).
      segment_ids: int32 `[S]` in the order of the text, or None.
      key_ranges: The batch's own ranges, int32 `[S, n, 2]`, if the mask reads them.

    Returns:
      int64 `[num_shards]`. Under a causal mask zigzag is equal on all shards and contiguous runs
      from 1 to 2P - 1 (in units of half a block squared, up to the diagonal).
    """
    order = row_order(layout, mask, seq_len, num_shards, segment_ids, key_ranges)
    per_query = pairs_per_query(mask, seq_len, segment_ids, key_ranges)
    return per_query[order].reshape(num_shards, -1).sum(1)


def pairs_between(
    mask: Mask,
    group_of: NDArray[Any],
    num_groups: int,
    segment_ids: NDArray[np.int32] | None = None,
    key_ranges: NDArray[np.int32] | None = None,
) -> NDArray[np.int64]:
    """Counts the visible (query, key) pairs between groups of tokens, such as shards or blocks.

    Args:
      mask: The mask.
      group_of: Group of each token in the order of the text, integer `[S]`, in 0..num_groups - 1.
      num_groups: Groups, `P`.
      segment_ids: As in `pairs_per_shard`.
      key_ranges: As in `pairs_per_shard`.

    Returns:
      int64 `[P, P]`: `[r, s]` counts the pairs of a query of group r and a key of group s.

    Cost:
      O(S + P^2) memory and O(S log S + min(S, R P) P) time, where R is the number of runs of
      neighbours of one group: a second for 2**20 tokens on 64 striped shards, a tenth if they are
      runs.
    """
    group_of = group_of.astype(np.int64)
    starts = np.flatnonzero(np.diff(group_of, prepend=-1))
    run_of = np.repeat(np.arange(len(starts)), np.diff(starts, append=len(group_of)))
    run_of = np.append(run_of, len(starts))  # of the place after the last: an empty run
    starts = np.append(starts, len(group_of))
    run_group = np.append(group_of, 0)[starts]
    # A range [lo, hi) holds the keys before hi but those before lo.
    lows, highs = _disjoint(*clipped_ranges(mask, len(group_of), segment_ids, key_ranges))
    place = np.concatenate([lows.ravel(), highs.ravel()])
    sign = np.repeat([-1.0, 1.0], highs.size)
    group = np.tile(group_of, 2 * len(highs))
    run = run_of[place]
    in_last_run = np.bincount(
        group * num_groups + run_group[run], sign * (place - starts[run]), num_groups**2
    )
    pairs = in_last_run.reshape(num_groups, num_groups)
    event, sign = _sum_equal(run * num_groups + group, sign)
    for first, keys_before in _keys_before(starts, run_group, num_groups):
        stop = first + len(keys_before)
        begin, end = np.searchsorted(event, [first * num_groups, stop * num_groups])
        for some in range(begin, end, len(keys_before)):
            part = slice(some, min(end, some + len(keys_before)))
            which, of_group = np.divmod(event[part], num_groups)
            counted = keys_before[which - first] * sign[part, None]
            _add_rows(pairs, of_group, counted)
    return np.rint(pairs).astype(np.int64)


def _disjoint(
    lows: NDArray[np.int64], highs: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Cuts the ranges of each query so that none overlap."""
    order = np.argsort(lows, axis=0, kind="stable")
    lows, highs = np.take_along_axis(lows, order, 0), np.take_along_axis(highs, order, 0)
    covered = np.maximum.accumulate(highs, axis=0)
    lows[1:] = np.maximum(lows[1:], covered[:-1])
    return lows, np.maximum(lows, highs)


def _sum_equal(
    event: NDArray[np.int64], value: NDArray[np.float64]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Events in ascending order, once each, with the sums of their values where not 0."""
    ascending = np.argsort(event, kind="stable")
    event, value = event[ascending], value[ascending]
    begins = np.flatnonzero(np.diff(event, prepend=-1))
    event, value = event[begins], np.add.reduceat(value, begins)
    return event[value != 0], value[value != 0]


def _add_rows(
    sums: NDArray[np.float64], row: NDArray[np.int64], values: NDArray[np.float64]
) -> None:
    """Adds each row of values to the row of the sums that is named for it, in place."""
    ascending = np.argsort(row, kind="stable")
    row = row[ascending]
    begins = np.flatnonzero(np.diff(row, prepend=-1))
    sums[row[begins]] += np.add.reduceat(values[ascending], begins, axis=0)


def _keys_before(
    starts: NDArray[np.int64], run_group: NDArray[np.int64], num_groups: int
) -> Iterator[tuple[int, NDArray[np.float64]]]:
    """Counts each group's keys before each run, for some runs at a time.

    Yields:
      `(first, counts)`: the first run, and counts `[runs, num_groups]`.
    """
    lengths = np.diff(starts, append=starts[-1])
    before = np.zeros(num_groups)
    some = max(num_groups, 2048)
    for first in range(0, len(starts), some):
        group = run_group[first : first + some]
        counts = np.zeros((len(group) + 1, num_groups))
        counts[0] = before
        counts[np.arange(len(group)) + 1, group] = lengths[first : first + some]
        counts = np.cumsum(counts, axis=0)
        before = counts[-1]
        yield first, counts[:-1]


def pairs_per_step(schedule: Sequence[Step], between: NDArray[np.int64]) -> NDArray[np.int64]:
    """Counts the visible pairs that each shard computes at each step.

    Args:
      schedule: From `steps`.
      between: From `pairs_between`, with the sequence shards as groups.

    Returns:
      int64 `[num_shards, steps]`.
    """
    return np.array([
        [between[shard, list(step.sources[shard])].sum() for step in schedule]
        for shard in range(len(between))
    ])  # fmt: skip
