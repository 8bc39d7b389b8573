"""Which edges of other shards' runs a shard needs under a mask of bounded reach."""

from __future__ import annotations

import functools
from collections import defaultdict
from typing import NamedTuple

import numpy as np

from farspan.layouts import Layout
from farspan.masks import Mask
from farspan.schedules.hops import Hops, hops_needed


class HaloTransfer(NamedTuple):
    """One transfer of keys, of all shards at once.

    Attributes:
      slot: First slot of the keys in the shard that sends them.
      tokens: Keys sent.
      pairs: (source, target) shards.
      first_index: For each shard, the place in the row of the first key it receives; None where it
        receives nothing.
    """

    slot: int
    tokens: int
    pairs: tuple[tuple[int, int], ...]
    first_index: tuple[int | None, ...]


def halo_transfers(
    layout: Layout, num_shards: int, shard_tokens: int, mask: Mask
) -> tuple[HaloTransfer, ...]:
    """Lists what brings every shard the keys that its queries may see and it does not hold.

    Args:
      layout: A layout whose shards are runs of neighbours (`Layout.runs` is not None).
      num_shards: Sequence shards.
      shard_tokens: Tokens in each.
      mask: A mask whose `reach` is bounded on both sides.

    Returns:
      The transfers. No shard receives a key twice, or one of its own.
    """
    needs = _needed_edges(layout, num_shards, shard_tokens, mask)
    assert needs is not None, "check_combination refuses what has no bounded reach"
    sources: dict[tuple[int, int, int], dict[int, int]] = defaultdict(dict)
    for need in needs:
        key = (need.slot, need.tokens, (need.target - need.source) % num_shards)
        sources[key][need.target] = need.first_index
    return tuple(
        HaloTransfer(
            slot,
            tokens,
            tuple(((target - shift) % num_shards, target) for target in sorted(firsts)),
            tuple(firsts.get(shard) for shard in range(num_shards)),
        )
        for (slot, tokens, shift), firsts in sorted(sources.items())
    )


def reach_hops(layout: Layout, num_shards: int, shard_tokens: int, mask: Mask) -> Hops | None:
    """Hops that a ring needs under a mask of bounded reach, whatever the documents.

    Args:
      layout: The layout.
      num_shards: Sequence shards.
      shard_tokens: Tokens in each.
      mask: The mask.

    Returns:
      The hops, or None where the mask or the layout sets no bound.
    """
    needs = _needed_edges(layout, num_shards, shard_tokens, mask)
    if needs is None:
        return None
    matrix = np.zeros((num_shards, num_shards), np.bool_)
    for need in needs:
        matrix[need.target, need.source] = True
    return hops_needed(matrix)


class _Need(NamedTuple):
    """Keys at an edge of a run that another shard needs."""

    source: int
    target: int
    slot: int
    tokens: int
    first_index: int


@functools.lru_cache
def _needed_edges(
    layout: Layout, num_shards: int, shard_tokens: int, mask: Mask
) -> tuple[_Need, ...] | None:
    left, right = mask.reach()
    runs = layout.runs(num_shards)
    if left is None or right is None or runs is None:
        return None
    length = shard_tokens // len(runs[0])
    home = {run: (shard, n) for shard, own in enumerate(runs) for n, run in enumerate(own)}
    needs: list[_Need] = []
    for target, own in enumerate(runs):
        for run, (source, n) in home.items():
            if source == target:
                continue
            tail = max(_edge(left, own_run - run, length) for own_run in own)
            head = max(_edge(right, run - own_run, length) for own_run in own)
            if tail + head >= length:
                tail, head = length, 0
            for tokens, start in ((tail, length - tail), (head, 0)):
                if tokens:
                    place = _Need(source, target, n * length + start, tokens, run * length + start)
                    needs.append(place)
    return tuple(needs)


def _edge(reach: int, runs_away: int, length: int) -> int:
    """Keys of a run that a query of a later run (by `runs_away`) may see, looking back."""
    if runs_away < 1:
        return 0
    return min(max(0, reach - (runs_away - 1) * length), length)
