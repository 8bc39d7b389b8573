"""The balanced layout of one row: equal tokens and near equal work per shard, with few hops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from farspan.layouts import LAYOUTS, Balanced, Layout
from farspan.masks import Mask, pairs_per_query
from farspan.schedules.hops import Sights, hops_needed, shards_seen, sights
from farspan.schedules.sections import Row, cut_into_sections, deal, describe

Float = NDArray[np.float64]
Shards = NDArray[np.unsignedinteger[Any]]


def balanced_order(
    masks: Mask | Mapping[Mask, float] | Mapping[Mask, int],
    seq_len: int,
    num_shards: int,
    segment_ids: NDArray[np.int32] | None = None,
    key_ranges: NDArray[np.int32] | None = None,
    *,
    granularity_tokens: int = 128,
    tolerance: float = 0.02,
) -> NDArray[np.int32]:
    """Solves for the order of one row that balances the work of attention.

    Many orders are made and measured exactly; see `farspan.schedules.sections` for those that are
    made for the row.

    Args:
      masks: The mask; or masks and the number of layers that use each. The work of a token is the
        weighted sum of the keys it sees, and the hops of an order the weighted sum of what each
        mask needs.
      seq_len: Tokens in the row, `S`, a multiple of `num_shards`.
      num_shards: Sequence shards, `P`.
      segment_ids: Document of each token in the order of the text, int32 `[S]`, 0 for padding;
        None for one document. The tokens of a document must be neighbours.
      key_ranges: The batch's own ranges in the order of the text, int32 `[S, n, 2]`, if a mask
        reads them.
      granularity_tokens: Tokens that are kept together where work is mixed over shards, if the
        shards are large enough to balance so.
      tolerance: How far a shard's work may exceed the mean, as a fraction.

    Returns:
      int32 `[S]`: the place in the row of the token in each slot; shard r holds the slots
      r * S / P .. (r + 1) * S / P, sorted by place. Of the orders within the tolerance, one with
      the fewest hops; if there is none, the best balanced. Equal arguments give equal orders.

    Raises:
      ValueError: If the tokens do not divide evenly into shards, or an argument is out of range.

    Cost:
      O(S) time for each of some tens of orders: one to two seconds for 2**20 tokens on 64 shards.
    """
    mixed = {masks: 1.0} if isinstance(masks, Mask) else masks
    weights = {mask: float(weight) for mask, weight in mixed.items()}
    _check(weights, seq_len, num_shards, granularity_tokens, tolerance)
    work = np.zeros(seq_len)
    for mask, weight in weights.items():
        work += weight * pairs_per_query(mask, seq_len, segment_ids, key_ranges)
    seen = [sights(mask, seq_len, segment_ids, key_ranges) for mask in weights]
    search = _Search(_Problem(work, seen, list(weights.values()), num_shards, tolerance))
    _offer_orders(search, seq_len, granularity_tokens)
    assert search.shard_of is not None
    return np.argsort(search.shard_of, kind="stable").astype(np.int32)


def row_order(
    layout: Layout,
    masks: Mask | Mapping[Mask, float] | Mapping[Mask, int],
    seq_len: int,
    num_shards: int,
    segment_ids: NDArray[np.int32] | None = None,
    key_ranges: NDArray[np.int32] | None = None,
) -> NDArray[np.int32]:
    """The order of one row under any layout: that of the layout, or `balanced_order`.

    Takes and returns what `balanced_order` does.
    """
    if isinstance(layout, Balanced):
        return balanced_order(masks, seq_len, num_shards, segment_ids, key_ranges)
    return layout.permutation(seq_len, num_shards)


def imbalance(work_per_query: NDArray[Any], order: NDArray[np.int32], num_shards: int) -> float:
    """Compares the work of the busiest shard with the mean.

    Args:
      work_per_query: Visible keys of each token in the order of the text, `[S]`.
      order: Place in the row of the token in each slot, int32 `[S]`.
      num_shards: Sequence shards; divides `S`.

    Returns:
      Greatest over mean; 1.0 if there is no work.
    """
    return _max_over_mean(work_per_query[order].reshape(num_shards, -1).sum(1))


class _Problem(NamedTuple):
    """What orders are measured by.

    Attributes:
      work: Of each token in the order of the text, weighted over the masks, `[S]`.
      seen: What the queries see, for each mask.
      weights: Of the masks.
      num_shards: Sequence shards.
      tolerance: As in `balanced_order`.
    """

    work: Float
    seen: Sequence[Sights]
    weights: Sequence[float]
    num_shards: int
    tolerance: float

    def imbalance(self, shard_of: Shards) -> float:
        return _max_over_mean(np.bincount(shard_of, self.work, self.num_shards))

    def hops(self, shard_of: Shards) -> float:
        return sum(
            weight * sum(hops_needed(shards_seen(seen, shard_of, self.num_shards)))
            for weight, seen in zip(self.weights, self.seen, strict=True)
        )


class _Search:
    """The best order found so far.

    Attributes:
      shard_of: Shard of each token in the order of the text.
      score: What orders are compared by, the least being the best.
    """

    def __init__(self, problem: _Problem) -> None:
        self.problem = problem
        self.shard_of: Shards | None = None
        self.score: tuple[float, ...] = (2.0,)

    @property
    def balanced(self) -> bool:
        """Whether it is within the tolerance."""
        return self.score[0] == 0

    def may_gain(self, imbalance: float) -> bool:
        """Whether an order of at least that imbalance could be better than all before."""
        return imbalance <= 1 + self.problem.tolerance or (1.0, round(imbalance, 3)) < self.score

    def offer(self, shard_of: Shards) -> bool:
        """Keeps an order if it is better than all before; says whether it is."""
        found = self.problem.imbalance(shard_of)
        if not self.may_gain(found):
            return False
        if found <= 1 + self.problem.tolerance:
            score = (0.0, self.problem.hops(shard_of), round(found, 3))
        else:
            score = (1.0, round(found, 3))
        if score >= self.score:
            return False
        self.score, self.shard_of = score, shard_of
        return True


def _offer_orders(search: _Search, seq_len: int, granularity_tokens: int) -> None:
    """Offers orders, the simplest first."""
    num_shards, shard_tokens = search.problem.num_shards, seq_len // search.problem.num_shards
    for name in ("contiguous", "zigzag"):
        _offer_layout(search, name, seq_len)
    row = describe(search.problem.work, search.problem.seen, max(1, shard_tokens // 32))
    piece_tokens = max(1, min(granularity_tokens, shard_tokens // 16))
    below, best, smaller = 0, 0, 0
    for size in _section_sizes(num_shards):
        if _offer_sections(search, row, size, piece_tokens):
            best, smaller = size, below
        below = size
    for size in range(smaller + 1, best, max(1, (best - smaller) // 8)):
        _offer_sections(search, row, size, piece_tokens)
    _offer_layout(search, "striped", seq_len)
    while not search.balanced and piece_tokens > 1:
        piece_tokens = -(-piece_tokens // 4)
        _offer_sections(search, row, num_shards, piece_tokens)


def _section_sizes(num_shards: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12 and so on up to all shards."""
    powers = [2**n for n in range(num_shards.bit_length())]
    sizes = {size for power in powers for size in (power, power + power // 2)}
    return [size for size in sorted(sizes) if size < num_shards] + [num_shards]


def _offer_layout(search: _Search, name: str, seq_len: int) -> None:
    num_shards = search.problem.num_shards
    if seq_len % LAYOUTS[name].multiple(num_shards):
        return
    shard_of = np.empty(seq_len, np.min_scalar_type(num_shards))
    order = LAYOUTS[name].permutation(seq_len, num_shards)
    shard_of[order] = np.arange(seq_len) // (seq_len // num_shards)
    search.offer(shard_of)


def _offer_sections(search: _Search, row: Row, size: int, piece_tokens: int) -> bool:
    """Offers an order of sections of so many shards; says whether it is the best so far."""
    num_shards, seq_len = search.problem.num_shards, len(row.work)
    shard_tokens = seq_len // num_shards
    sizes = [size] * (num_shards // size)
    if num_shards % size:
        sizes.append(num_shards % size)
    sections = cut_into_sections(row, sizes, shard_tokens)
    loads = [(row.total[runs.stop] - row.total[runs.start]).sum() for runs in sections]
    if not search.may_gain(_max_over_mean(np.array(loads) / sizes, row.total[-1] / num_shards)):
        return False
    shard_of = np.empty(seq_len, np.min_scalar_type(num_shards))
    shard = 0
    for runs, count in zip(sections, sizes, strict=True):
        for tokens in deal(row, runs, count, piece_tokens, search.problem.tolerance / 2):
            shard_of[tokens] = shard
            shard += 1
    return search.offer(shard_of)


def _check(
    weights: Mapping[Mask, float],
    seq_len: int,
    num_shards: int,
    granularity_tokens: int,
    tolerance: float,
) -> None:
    if num_shards < 1 or seq_len < 1 or seq_len % num_shards:
        shards = max(1, num_shards)
        raise ValueError(
            "balanced_order: seq_len must be a positive multiple of num_shards, got "
            f"seq_len={seq_len}, num_shards={num_shards}; pad to "
            f"{max(1, -(-seq_len // shards)) * shards} (segment id 0 marks padding)"
        )
    if not weights or min(weights.values()) <= 0:
        raise ValueError(
            "balanced_order: masks must name at least one mask, with weights above 0, got "
            f"{dict(weights)}; leave out masks that no layer uses"
        )
    if granularity_tokens < 1 or tolerance < 0:
        raise ValueError(
            "balanced_order: granularity_tokens must be at least 1 and tolerance at least 0, got "
            f"granularity_tokens={granularity_tokens}, tolerance={tolerance}; the defaults are "
            "128 and 0.02"
        )


def _max_over_mean(loads: NDArray[Any], mean: float | None = None) -> float:
    mean = float(loads.mean()) if mean is None else mean
    return float(loads.max() / mean) if mean > 0 else 1.0
