"""The numbers that pictures show, all exact, from `farspan.masks` and `farspan.schedules`."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from farspan import schedules
from farspan.cli.drawing.rows import Row
from farspan.layouts import Balanced, Layout
from farspan.schedules.work import (
    Move,
    Step,
    key_bytes_per_token,
    pairs_between,
    pairs_per_step,
    steps,
)

Int = NDArray[np.int64]
KINDS = ("empty", "partial", "full")
_ITEM_BYTES = 2  # bfloat16


@dataclasses.dataclass(frozen=True)
class MaskFacts:
    """A mask by blocks.

    Attributes:
      row: The row.
      block_tokens: Tokens per block; the last may have fewer.
      pairs: Visible pairs, `[query blocks, key blocks]`.
      kinds: Of each block pair, an index into `KINDS`.
    """

    row: Row
    block_tokens: int
    pairs: Int
    kinds: Int

    @property
    def title(self) -> str:
        """What is shown."""
        return f"Mask {self.row.mask_text}"

    @property
    def counts(self) -> dict[str, int]:
        """Block pairs of each kind."""
        return {kind: int((self.kinds == n).sum()) for n, kind in enumerate(KINDS)}

    def facts(self) -> dict[str, Any]:
        """What is shown, as JSON."""
        return {
            **self.row.facts(),
            "block_tokens": self.block_tokens,
            "visible_pairs": int(self.pairs.sum()),
            "blocks": self.counts,
            "pairs": self.pairs.tolist(),
        }


def mask_facts(row: Row, blocks: int) -> MaskFacts:
    """Counts the visible pairs of a row by about `blocks` x `blocks` blocks."""
    block_tokens = -(-row.seq_len // blocks)
    block_of = np.arange(row.seq_len) // block_tokens
    count = int(block_of[-1]) + 1
    pairs = pairs_between(row.mask, block_of, count, row.segment_ids)
    tokens = np.bincount(block_of)
    kinds = (pairs > 0).astype(np.int64) + (pairs == np.outer(tokens, tokens))
    return MaskFacts(row, block_tokens, pairs, kinds)


class Split(NamedTuple):
    """How a row is split.

    Attributes:
      strategy: The strategy.
      layout: The layout.
      degrees: Devices per role.
    """

    strategy: str
    layout: Layout
    degrees: schedules.Degrees

    def describe(self) -> str:
        """The split in words."""
        return schedules.split_in_words(self.strategy, self.degrees)

    def devices(self, shard: int) -> str:
        """The devices of a sequence shard."""
        first, count = shard * self.degrees.heads, self.degrees.heads
        return f"{first}" if count == 1 else f"{first}-{first + count - 1}"

    def facts(self) -> dict[str, Any]:
        """The split as numbers and words."""
        degrees = dataclasses.asdict(self.degrees)
        return {"strategy": self.strategy, "layout": self.layout.name, "degrees": degrees}


@dataclasses.dataclass(frozen=True)
class LayoutFacts:
    """Who holds which tokens.

    Attributes:
      row: The row.
      split: How it is split.
      order: Place in the row of the token in each slot.
      pairs: Visible pairs per head of the queries of each device's shard.
      blocks: Parts of the row that a figure tells apart.
    """

    row: Row
    split: Split
    order: NDArray[np.int32]
    pairs: Int
    blocks: int

    @property
    def title(self) -> str:
        """What is shown."""
        total = self.split.degrees.total
        devices = "1 device" if total == 1 else f"{total} devices"
        return f"Layout {self.split.layout.name} on {devices} ({self.split.describe()})"

    @property
    def held(self) -> NDArray[np.int32]:
        """Places of the tokens of each device, `[devices, slots]`."""
        return self.order.reshape(self.split.degrees.total, -1)

    @property
    def max_over_mean(self) -> float:
        """Work of the busiest device over the mean."""
        return _max_over_mean(self.pairs)

    def runs(self, device: int) -> list[tuple[int, int]]:
        """Runs of neighbouring tokens in a device's slots: first place, place after the last."""
        return [(int(run[0]), int(run[-1]) + 1) for run in self._split_runs(device)]

    def shares(self, blocks: int) -> NDArray[np.float64]:
        """Share of each of `blocks` parts of the row that each device holds."""
        devices = len(self.held)
        count = min(blocks, self.row.seq_len)
        block = self.held.astype(np.int64) * count // self.row.seq_len
        cell = np.arange(devices)[:, None] * count + block
        tokens = np.bincount(cell.ravel(), minlength=devices * count).reshape(devices, count)
        return tokens / tokens.sum(0)

    def slot_places(self, blocks: int) -> NDArray[np.float64]:
        """Mean place in the row, from 0 to 1, of each of `blocks` parts of each device's slots."""
        edges = np.linspace(0, self.held.shape[1], min(blocks, self.held.shape[1]) + 1).astype(int)
        sums = np.add.reduceat(self.held.astype(np.float64), edges[:-1], axis=1)
        return sums / np.diff(edges) / self.row.seq_len

    def facts(self) -> dict[str, Any]:
        """What is shown, as JSON."""
        devices = [
            {"device": n, "pairs_per_head": int(pairs), "runs": len(self.runs(n))}
            | {"first_runs": self.runs(n)[:16]}
            for n, pairs in enumerate(self.pairs)
        ]
        work = {"max_over_mean": self.max_over_mean, "devices": devices}
        return {**self.row.facts(), **self.split.facts(), **work}

    def _split_runs(self, device: int) -> list[NDArray[np.int32]]:
        places = self.held[device]
        return np.split(places, np.flatnonzero(np.diff(places) != 1) + 1)


def layout_facts(row: Row, split: Split, blocks: int) -> LayoutFacts:
    """Places a row and counts the work."""
    order, between = _placed(row, split)
    work = np.repeat(between.sum(1), split.degrees.heads)
    return LayoutFacts(row, split, order, work, blocks)


class Transfer(NamedTuple):
    """Moves of one step that differ in their shards only.

    Attributes:
      shift: How much further in the ring of shards they go.
      moves: How many there are.
      tokens: Tokens of each.
      size_bytes: Bytes of each, per device.
      steps_under: As in `Move`.
    """

    shift: int
    moves: int
    tokens: int
    size_bytes: int
    steps_under: int


@dataclasses.dataclass(frozen=True)
class ScheduleFacts:
    """Who computes what when, and what travels.

    Attributes:
      row: The row.
      split: How it is split.
      heads: Query heads that each device attends with.
      hops: How far keys travel in a ring.
      schedule: The steps.
      pairs: Visible pairs per head, `[sequence shards, steps]`.
      token_bytes: Bytes of one token's keys that travel.
      collectives: Of one layer, forward and backward.
    """

    row: Row
    split: Split
    heads: int
    hops: schedules.Hops
    schedule: tuple[Step, ...]
    pairs: Int
    token_bytes: int
    collectives: dict[schedules.Direction, tuple[schedules.Collective, ...]]

    @property
    def title(self) -> str:
        """What is shown."""
        return f"Schedule of {self.split.describe()}, layout {self.split.layout.name}"

    @property
    def max_over_mean(self) -> float:
        """Work of the busiest device over the mean."""
        return _max_over_mean(self.pairs.sum(1))

    @property
    def slowest_over_mean(self) -> float:
        """The same if all devices wait for the slowest at each step."""
        mean = self.pairs.sum() / len(self.pairs)
        return float(self.pairs.max(0).sum() / mean) if mean else 1.0

    def tokens(self, tokens: int | None) -> int:
        """Tokens of a move."""
        return self.row.seq_len // self.split.degrees.sequence if tokens is None else tokens

    @functools.cached_property
    def arrivals(self) -> list[list[tuple[Move, int]]]:
        """Moves that each step is the first to need, and the steps in which they set out."""
        found: list[list[tuple[Move, int]]] = [[] for _ in self.schedule]
        for start, step in enumerate(self.schedule):
            for move in step.moves:
                found[start + move.steps_under].append((move, start))
        return found

    def transfers(self, step: int) -> list[Transfer]:
        """The same, summed up."""
        shards = self.split.degrees.sequence
        found: dict[tuple[int, int, int], int] = {}
        for move, _ in self.arrivals[step]:
            shift = (move.receiver - move.sender) % shards
            shift -= shards * (shift > shards // 2)
            key = (shift, self.tokens(move.tokens), move.steps_under)
            found[key] = found.get(key, 0) + 1
        return [
            Transfer(shift, count, tokens, tokens * self.token_bytes, under)
            for (shift, tokens, under), count in sorted(found.items())
        ]

    def sent_bytes(self, direction: schedules.Direction) -> int:
        """Bytes that leave a device for one layer."""
        return sum(found.sent_bytes for found in self.collectives[direction])

    def facts(self) -> dict[str, Any]:
        """What is shown, as JSON."""
        listed = [
            {
                "sources": step.sources,
                "pairs_per_head": self.pairs[:, n].tolist(),
                "arrivals": [self._move(move, start) for move, start in self.arrivals[n]],
            }
            for n, step in enumerate(self.schedule)
        ]
        sent = {
            direction: {
                "sent_bytes_per_device": self.sent_bytes(direction),
                "collectives": [dataclasses.asdict(each) for each in found],
            }
            for direction, found in self.collectives.items()
        }
        return {
            **self.row.facts(),
            **self.split.facts(),
            "heads_per_device": self.heads,
            "hops": self.hops._asdict(),
            "max_over_mean": self.max_over_mean,
            "slowest_over_mean": self.slowest_over_mean,
            "steps": listed,
            **sent,
        }

    def _move(self, move: Move, start: int) -> dict[str, int]:
        tokens = self.tokens(move.tokens)
        sent = {"tokens": tokens, "bytes": tokens * self.token_bytes, "sent_in_step": start}
        return {"keys": move.keys, "sender": move.sender, "receiver": move.receiver, **sent}


def schedule_facts(
    row: Row, split: Split, heads: int, kv_heads: int, head_dim: int
) -> ScheduleFacts:
    """Lists the steps of one layer, bfloat16, and counts work and bytes."""
    strategy, layout, degrees = split
    shards = degrees.sequence
    order, between = _placed(row, split)
    shape = schedules.AttentionShape(
        batch=1,
        seq_len=row.seq_len,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=head_dim,
        itemsize=_ITEM_BYTES,
        segments=row.segment_ids is not None,
        positions=isinstance(layout, Balanced),
    )
    hops, halo = schedules.Hops(0, 0), None
    if strategy == "halo":
        halo = schedules.halo_transfers(layout, shards, row.seq_len // shards, row.mask)
    elif strategy in ("ring", "usp"):
        needs = schedules.needed_shards(row.mask, order, shards, row.segment_ids)
        hops = schedules.hops_needed(needs)
    schedule = steps(strategy, degrees, hops, halo)
    options = schedules.Options(hops, 1, tuple(part.tokens for part in halo or ()))
    collectives: dict[schedules.Direction, tuple[schedules.Collective, ...]] = {
        direction: schedules.collectives(strategy, degrees, shape, direction, options)
        for direction in ("forward", "backward")
    }
    pairs, size = pairs_per_step(schedule, between), key_bytes_per_token(degrees, shape)
    return ScheduleFacts(
        row, split, heads // degrees.heads, hops, schedule, pairs, size, collectives
    )


Facts = MaskFacts | LayoutFacts | ScheduleFacts


def _placed(row: Row, split: Split) -> tuple[NDArray[np.int32], Int]:
    """Order of the row, and the visible pairs between sequence shards."""
    shards = split.degrees.sequence
    order = schedules.row_order(split.layout, row.mask, row.seq_len, shards, row.segment_ids)
    shard_of = np.empty(row.seq_len, np.int64)
    shard_of[order] = np.arange(row.seq_len) // (row.seq_len // shards)
    return order, pairs_between(row.mask, shard_of, shards, row.segment_ids)


def _max_over_mean(work: Int) -> float:
    return float(work.max() / work.mean()) if work.any() else 1.0
