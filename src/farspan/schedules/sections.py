"""Assigns the tokens of a row to shards, so that work is equal and keys stay near their queries.

Tokens that never see one another, such as those of two documents, form islands, which may lie in
any order. Islands are put together into sections of a few neighbouring shards that have their fair
share of work; then each section's tokens are dealt to its shards. Keys travel within a section
only, but for those of the islands that are cut at its edges.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from farspan.schedules.hops import Sights

Int = NDArray[np.int64]
Float = NDArray[np.float64]


class Row(NamedTuple):
    """What the assignment needs to know of a row, in the order of the text.

    Attributes:
      work: Visible pairs of each token, weighted over the masks, float64 `[S]`.
      total: Sum of the work of the tokens before each place, float64 `[S + 1]`.
      bounds: First places of the islands, and `S`, int64.
    """

    work: Float
    total: Float
    bounds: Int


class Runs(NamedTuple):
    """Runs of neighbouring tokens: first places and places after the last, int64 `[N]` each."""

    start: Int
    stop: Int

    def of(self, which: Any) -> Runs:
        """The runs that are named by an index, or in its order."""
        return Runs(self.start[which], self.stop[which])

    def tokens(self) -> Int:
        """Places of all tokens, run after run, each from its last token to its first."""
        lengths = self.stop - self.start
        begins = np.cumsum(lengths) - lengths
        return np.repeat(self.stop - 1 + begins, lengths) - np.arange(lengths.sum())


def describe(work: Float, seen: Sequence[Sights], small_tokens: int) -> Row:
    """Finds the islands of a row.

    Args:
      work: As in `Row`.
      seen: What the queries see, for each mask.
      small_tokens: Neighbouring islands of together about so many tokens are taken as one.

    Returns:
      The row.
    """
    seq_len = len(work)
    crossing = np.zeros(seq_len + 1, np.int64)
    for query, first, last in seen:
        crossing += np.bincount(np.minimum(query, first) + 1, minlength=seq_len + 1)
        crossing -= np.bincount(np.maximum(query, last) + 1, minlength=seq_len + 1)
    crossing[0] = 0
    bounds = np.flatnonzero(np.cumsum(crossing) == 0)
    start, stop = bounds[:-1], bounds[1:]
    large = stop - start > small_tokens
    parted = large[1:] | large[:-1]
    parted |= start[1:] // small_tokens != start[:-1] // small_tokens
    kept = np.concatenate([[True], parted])
    total = np.concatenate([[0.0], np.cumsum(work)])
    return Row(work, total, np.append(start[kept], seq_len))


def cut_into_sections(row: Row, sizes: Sequence[int], shard_tokens: int) -> list[Runs]:
    """Puts islands together into sections with equal work per shard, as near as they allow.

    An island goes where the work still wanted per free token is highest, those with most work
    first. Where the tokens of the islands of a section do not add up, a small one is cut.

    Args:
      row: The row.
      sizes: Shards in each section.
      shard_tokens: Tokens per shard.

    Returns:
      For each section, in the order in which the sections have been filled, runs that add up to
      its tokens. The first and the last may be parts of islands.
    """
    tokens, work = np.diff(row.bounds), np.diff(row.total[row.bounds])
    room = np.array(sizes) * float(shard_tokens)
    wanted = np.array(sizes) * row.total[-1] / sum(sizes)
    members: list[list[int]] = [[] for _ in sizes]
    for island in np.lexsort([-tokens, -work]) if len(sizes) > 1 else range(len(tokens)):
        density = np.where(room >= tokens[island], wanted / np.maximum(room, 1), -np.inf)
        best = int(np.argmax(density))
        if room[best] < tokens[island]:
            best = int(np.argmax(room))
        members[best].append(island)
        room[best] -= tokens[island]
        wanted[best] -= work[island]
    chain: list[Int] = []
    for section in members:
        rising = np.array(section, np.int64)
        rising = rising[np.argsort(tokens[rising], kind="stable")]
        chain += [rising[::2], rising[1::2][::-1]]  # the smallest at both ends
    sequence = np.concatenate(chain)
    ends = np.cumsum(tokens[sequence])
    edges = np.cumsum(sizes) * shard_tokens
    stops = np.union1d(ends, edges)
    starts = np.concatenate([[0], stops[:-1]])
    place = np.searchsorted(ends, starts, "right")
    shift = row.bounds[sequence + 1][place] - ends[place]
    cuts = np.searchsorted(starts, edges)
    return [Runs(*part) for part in zip(
        np.split(starts + shift, cuts[:-1]), np.split(stops + shift, cuts[:-1]), strict=True
    )]  # fmt: skip


def deal(row: Row, runs: Runs, num_shards: int, piece_tokens: int, tolerance: float) -> list[Int]:
    """Deals the tokens of a section to its shards, with equal numbers and near equal work.

    The last shard takes the tokens with most work and fills up with those of the lightest islands;
    so does the shard before it, and so on while the light islands last. So later tokens of an
    island come to later shards, and keys travel one way. What is left are islands, or their
    beginnings, of about the mean work per token: each is spread over a few of the first shards.

    Args:
      row: The row.
      runs: The section, from `cut_into_sections`.
      num_shards: Its shards.
      piece_tokens: Tokens of an island that are ranked as one, and kept together where possible.
      tolerance: Deviation of a shard's work from the mean that is left, as a fraction.

    Returns:
      For each shard, places of its tokens.
    """
    later, rest = _fill(row, *_by_work(row, runs, piece_tokens), num_shards, tolerance)
    left = num_shards - len(later)
    middle, rest = _fill(row, *_outwards(row, rest), left, tolerance)
    first = _deal_pieces(row, rest, left - len(middle), piece_tokens, tolerance)
    return first + (later + middle)[::-1]


def _fill(
    row: Row, heavy: Int, light: Int, num_shards: int, tolerance: float
) -> tuple[list[Int], Int]:
    """Fills shards from two rows of tokens, as many from each as make the work right.

    Returns:
      `(shards, rest)`: tokens of the shards that could be filled, the last one first; and the
      tokens that are left for the others, at least one.
    """
    shard_tokens = (len(heavy) + len(light)) // num_shards
    heavy_sum = np.concatenate([[0.0], np.cumsum(row.work[heavy])])
    light_sum = np.concatenate([[0.0], np.cumsum(row.work[light])])
    used, filled = 0, 0

    def work(count: int) -> float:
        """Of the next shard, if it takes so many heavy tokens."""
        light_stop = filled + shard_tokens - count
        heavy_work = heavy_sum[used + count] - heavy_sum[used]
        return float(heavy_work + light_sum[light_stop] - light_sum[filled])

    shards: list[Int] = []
    for left in range(num_shards, 1, -1):
        wanted = (heavy_sum[-1] - heavy_sum[used] + light_sum[-1] - light_sum[filled]) / left
        low = max(0, shard_tokens - (len(light) - filled))
        high = min(shard_tokens, len(heavy) - used)
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if work(middle) >= wanted else (middle + 1, high)
        if abs(work(low) - wanted) > tolerance * wanted:
            break
        fill = shard_tokens - low
        shards.append(np.concatenate([heavy[used : used + low], light[filled : filled + fill]]))
        used, filled = used + low, filled + fill
    return shards, np.concatenate([heavy[used:], light[filled:]])


def _by_work(row: Row, runs: Runs, piece_tokens: int) -> tuple[Int, Int]:
    """Tokens of a section in the order in which shards take them, the last shard first.

    Returns:
      `(heavy, light)`: those of islands with at least the mean work per token, most work first;
      and those of the others, lightest island first.
    """
    lengths, work = runs.stop - runs.start, row.total[runs.stop] - row.total[runs.start]
    density = work / lengths
    is_light = density < work.sum() / lengths.sum() * (1 - 1e-9)
    # Parts of an island that is cut between two sections lie side by side.
    side = np.zeros(len(lengths))
    side[0], side[-1] = 1, -1
    ranked = np.lexsort([density, side])
    light = runs.of(ranked[is_light[ranked]])
    whole = runs.of(~is_light)
    pieces = -(-(whole.stop - whole.start) // piece_tokens)
    parent = np.repeat(np.arange(len(pieces)), pieces)
    nth = np.arange(len(parent)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    start = whole.start[parent] + nth * piece_tokens
    stop = np.minimum(start + piece_tokens, whole.stop[parent])
    per_token = (row.total[stop] - row.total[start]) / (stop - start)
    heavy = Runs(start, stop).of(np.lexsort([-start, -per_token]))
    return heavy.tokens(), light.tokens()


def _outwards(row: Row, tokens: Int) -> tuple[Int, Int]:
    """Tokens of islands, each taken from its middle outwards: wherever it is cut, so is its work.

    Returns:
      `(heavy, light)`: islands with at least the mean work per token, and those with less; those
      that differ most from the mean come first.
    """
    tokens = np.sort(tokens)
    begins = np.flatnonzero(np.diff(np.searchsorted(row.bounds, tokens, "right"), prepend=-1))
    lengths = np.diff(begins, append=len(tokens))
    density = np.add.reduceat(row.work[tokens], begins) / lengths
    mean = row.work[tokens].mean()
    rank = np.argsort(np.argsort(-np.abs(density - mean), kind="stable"))
    nth = np.arange(len(tokens)) - np.repeat(begins, lengths)
    from_end = np.minimum(nth, np.repeat(lengths, lengths) - 1 - nth)
    order = np.lexsort([-from_end, np.repeat(rank, lengths)])
    is_heavy = np.repeat(density >= mean * (1 - 1e-9), lengths)[order]
    return tokens[order[is_heavy]], tokens[order[~is_heavy]]


def _deal_pieces(
    row: Row, tokens: Int, num_shards: int, piece_tokens: int, tolerance: float
) -> list[Int]:
    """Deals tokens to shards in rounds, the heaviest piece to the shard with least work so far."""
    if num_shards == 1:
        return [tokens]
    tokens = tokens[np.lexsort([-tokens, -row.work[tokens]])]
    shard_tokens = len(tokens) // num_shards
    edges = np.linspace(0, shard_tokens, -(-shard_tokens // piece_tokens) + 1).astype(np.int64)
    loads = np.zeros(num_shards)
    dealt: list[Int] = []
    pieces: list[Float] = []
    for start, stop in itertools.pairwise(edges):
        block = tokens[start * num_shards : stop * num_shards].reshape(num_shards, -1)
        sums = row.work[block].sum(1)
        taker = np.empty(num_shards, np.int64)
        taker[np.lexsort([-np.arange(num_shards), loads])] = np.argsort(-sums, kind="stable")
        dealt.append(block[taker])
        pieces.append(sums[taker])
        loads += sums[taker]
    _even_out(dealt, np.stack(pieces), np.diff(edges), tolerance / 8)
    return list(np.concatenate(dealt, axis=1))


def _even_out(dealt: list[Int], pieces: Float, sizes: Int, tolerance: float) -> None:
    """Swaps pieces of equal size between the shards with most and least work, in place."""
    loads = pieces.sum(0)
    unlike = sizes[:, None] != sizes
    for _ in range(4 * len(loads)):
        most, least = int(np.argmax(loads)), int(np.argmin(loads))
        gap = loads[most] - loads[least]
        if gap <= tolerance * loads.mean():
            return
        change = pieces[:, most, None] - pieces[:, least]
        error = np.where(unlike, np.inf, np.abs(change - gap / 2))
        give, take = np.unravel_index(np.argmin(error), error.shape)
        moved = change[give, take]
        if not 0 < moved < gap:
            return
        dealt[give][most], dealt[take][least] = dealt[take][least], dealt[give][most].copy()
        pieces[give, most], pieces[take, least] = pieces[take, least], pieces[give, most]
        loads[most] -= moved
        loads[least] += moved
