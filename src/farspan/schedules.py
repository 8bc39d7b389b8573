"""Who holds, sends and computes what at each step, and what it costs.

The one owner of the rules "this combination is possible": the configuration, the planner and the
call site all ask `check_combination`. The formulas count exactly what the strategies in
`farspan.context` send; tests hold them against the collectives of the compiled program.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from farspan.errors import unknown_choice
from farspan.layouts import Layout
from farspan.masks import Mask, pairs_per_query

StrategyName = Literal["all_gather", "ulysses", "ring", "usp"]
STRATEGIES: tuple[StrategyName, ...] = ("all_gather", "ulysses", "ring", "usp")
Direction = Literal["forward", "backward"]


@dataclasses.dataclass(frozen=True)
class Degrees:
    """How many devices each part of a strategy spans; their product splits the sequence.

    Attributes:
      sequence: Devices that hold different keys during attention (ring or all-gather).
      heads: Devices that hold different heads during attention (Ulysses).
    """

    sequence: int
    heads: int

    @property
    def total(self) -> int:
        """Shards of the sequence outside attention: the context-parallel size."""
        return self.sequence * self.heads


def degrees(strategy: str, cp_ring: int, cp_ulysses: int) -> Degrees:
    """Splits a mesh's two context axes by the role they play in a strategy.

    Args:
      strategy: A name in `STRATEGIES`.
      cp_ring: Size of the mesh axis of that name.
      cp_ulysses: Size of the mesh axis of that name.

    Returns:
      `usp` rings over the first axis and exchanges heads over the second; the others use both
      axes as one.

    Raises:
      ValueError: If the strategy is unknown.
    """
    if strategy not in STRATEGIES:
        raise unknown_choice("strategy", strategy, STRATEGIES)
    if strategy == "usp":
        return Degrees(cp_ring, cp_ulysses)
    if strategy == "ulysses":
        return Degrees(1, cp_ring * cp_ulysses)
    return Degrees(cp_ring * cp_ulysses, 1)


def sequence_multiple(layout: Layout, degrees: Degrees) -> int:
    """The number that the sequence length must be a multiple of.

    The layout's chunks belong to the sequence shards; a Ulysses group splits a shard evenly.
    """
    return math.lcm(layout.multiple(degrees.sequence), degrees.total)


def check_combination(
    strategy: str,
    degrees: Degrees,
    layout: Layout,
    *,
    num_heads: int,
    num_kv_heads: int,
    tensor: int = 1,
    seq_len: int | None = None,
) -> None:
    """Raises if a combination cannot be computed exactly.

    Args:
      strategy: A name in `STRATEGIES`.
      degrees: From `degrees`.
      layout: The layout.
      num_heads: Query heads, `H`, over all devices.
      num_kv_heads: Key and value heads, `K`, over all devices.
      tensor: Size of the tensor axis, over which heads are split first.
      seq_len: Tokens per row, `S`, or None if not yet known.

    Raises:
      ValueError: With the rule, the values and the remedy.
    """
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(
            "attention: num_heads must be a positive multiple of num_kv_heads, "
            f"got num_heads={num_heads}, num_kv_heads={num_kv_heads}"
        )
    if num_kv_heads % tensor:
        raise ValueError(
            "tensor parallelism: num_kv_heads must be a multiple of the tensor axis, "
            f"got num_kv_heads={num_kv_heads}, tensor={tensor}; "
            f"use tensor={math.gcd(num_kv_heads, tensor)}"
        )
    local_heads = num_heads // tensor
    if local_heads % degrees.heads:
        fits = [d for d in range(1, local_heads + 1) if local_heads % d == 0]
        raise ValueError(
            f"{strategy}: the query heads on a device must divide evenly over the Ulysses degree, "
            f"got num_heads={num_heads}, tensor={tensor}, degree={degrees.heads}; "
            f"use a degree of {', '.join(map(str, fits))}, or strategy ring or all_gather"
        )
    if seq_len is not None:
        layout.check(seq_len, degrees.sequence)
        if seq_len % degrees.total:
            multiple = sequence_multiple(layout, degrees)
            raise ValueError(
                f"{strategy}: seq_len must be a multiple of {multiple} for {degrees.total} shards, "
                f"got seq_len={seq_len}; pad to {-(-seq_len // multiple) * multiple}"
            )


def kv_replicas(num_kv_heads: int, degree: int) -> int:
    """Copies of each kv head that Ulysses sends so that every device gets whole heads."""
    return math.lcm(num_kv_heads, degree) // num_kv_heads


@dataclasses.dataclass(frozen=True)
class Step:
    """One step of a strategy, for every sequence shard at once.

    Attributes:
      sources: `sources[r]`: the shards whose keys shard r computes with in this step.
      sends_to: `sends_to[r]`: the shard that r passes its visiting keys to under this step's
        compute; None where nothing is passed on.
    """

    sources: tuple[tuple[int, ...], ...]
    sends_to: tuple[int, ...] | None


def steps(strategy: str, degrees: Degrees) -> tuple[Step, ...]:
    """Lists the steps of one attention layer's forward.

    Returns:
      For a ring over P shards, P steps: at step t shard r computes with the keys of shard
      (r - t) mod P. For the others, one step in which each sequence shard has every key.
    """
    shards = range(degrees.sequence)
    if strategy in ("ring", "usp"):
        following = tuple((r + 1) % degrees.sequence for r in shards)
        return tuple(
            Step(
                tuple(((r - t) % degrees.sequence,) for r in shards),
                following if t < degrees.sequence - 1 else None,
            )
            for t in shards
        )
    return (Step(tuple(tuple(shards) for _ in shards), None),)


def pairs_per_shard(
    mask: Mask,
    layout: Layout,
    seq_len: int,
    num_shards: int,
    segment_ids: NDArray[np.int32] | None = None,
) -> NDArray[np.int64]:
    """Counts the visible (query, key) pairs whose query each sequence shard holds.

    Args:
      mask: The mask.
      layout: The layout.
      seq_len: Tokens in the row, in the order of the text.
      num_shards: Sequence shards (`Degrees.sequence`).
      segment_ids: int32 `[S]` in the order of the text, or None.

    Returns:
      int64 `[num_shards]`. Under a causal mask zigzag is equal on all shards and contiguous runs
      from 1 to 2P - 1 (in units of half a block squared, up to the diagonal).
    """
    per_query = pairs_per_query(mask, seq_len, segment_ids)
    return per_query[layout.permutation(seq_len, num_shards)].reshape(num_shards, -1).sum(1)


def ulysses_break_even_degree(num_heads: int, num_kv_heads: int) -> float:
    """Degree above which Ulysses sends fewer bytes than a ring in forward: 1 + H / K.

    A ring sends 2 * S * K * D * (P - 1) / P elements per device, Ulysses
    (2 * H + 2 * K) * D * S / P * (P - 1) / P.
    """
    return 1 + num_heads / num_kv_heads


@dataclasses.dataclass(frozen=True)
class AttentionShape:
    """Sizes of one attention layer on one data-parallel replica.

    Attributes:
      batch: Rows per replica, `B`.
      seq_len: Tokens per row, `S`.
      num_heads, num_kv_heads: Heads per tensor shard, `H` and `K`.
      head_dim, value_dim: `D` and `Dv`.
      itemsize: Bytes per element of q, k, v and out.
      segments: Whether rows carry segment ids.
      positions: Whether rows carry explicit positions.
    """

    batch: int
    seq_len: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    itemsize: int
    segments: bool = False
    positions: bool = False

    @property
    def metadata_arrays(self) -> int:
        """int32 arrays of `[B, S]` that travel with the keys."""
        return int(self.segments) + int(self.positions)


@dataclasses.dataclass(frozen=True)
class Collective:
    """A kind of collective that one device takes part in during one layer's pass.

    Attributes:
      op: `collective-permute`, `all-gather`, `all-to-all` or `reduce-scatter`.
      count: How often it runs.
      operand_bytes: Bytes that the device puts in, summed over the runs.
      group: Devices that take part.
    """

    op: str
    count: int
    operand_bytes: int
    group: int

    @property
    def sent_bytes(self) -> int:
        """Bytes that leave the device."""
        if self.op == "collective-permute":
            return self.operand_bytes
        if self.op == "all-gather":
            return self.operand_bytes * (self.group - 1)
        return self.operand_bytes * (self.group - 1) // self.group


def collectives(
    strategy: str, degrees: Degrees, shape: AttentionShape, direction: Direction
) -> tuple[Collective, ...]:
    """Lists what one device sends for one attention layer.

    Partial outputs and gradients are merged in float32, so gradients of keys and values travel
    as 4 bytes an element in a ring and in an all-gather's reduce-scatter.

    Args:
      strategy: A name in `STRATEGIES`.
      degrees: From `degrees`.
      shape: Sizes of the layer.
      direction: `forward` or `backward` (which fetches keys and values anew: no strategy keeps
        more than its own shard between the passes).

    Returns:
      Collectives with exact counts and bytes; empty where the degree is 1.
    """
    if strategy == "all_gather":
        found = _all_gather(degrees, shape, direction)
    else:
        found = _head_exchange(degrees, shape, direction) + _ring(degrees, shape, direction)
    return tuple(c for c in found if c.group > 1 and c.count > 0)


def sent_bytes(strategy: str, degrees: Degrees, shape: AttentionShape, direction: Direction) -> int:
    """Bytes that leave one device for one attention layer in one direction."""
    return sum(c.sent_bytes for c in collectives(strategy, degrees, shape, direction))


def choose_ulysses_degree(num_heads: int, num_kv_heads: int, size: int, *, tensor: int = 1) -> int:
    """Chooses how much of a context-parallel size exchanges heads.

    Args:
      num_heads: Query heads.
      num_kv_heads: Key and value heads.
      size: Context-parallel size.
      tensor: Size of the tensor axis.

    Returns:
      Of all splits ring x ulysses of `size` that the heads allow, the Ulysses degree that sends
      fewest bytes over forward and backward; the greatest among equals.
    """
    heads, kv_heads = num_heads // tensor, max(1, num_kv_heads // tensor)
    shape = AttentionShape(1, 16 * size, heads, kv_heads, 128, 128, 2)

    def cost(ulysses: int) -> tuple[int, int]:
        split = Degrees(size // ulysses, ulysses)
        sent = sent_bytes("usp", split, shape, "forward")
        return sent + sent_bytes("usp", split, shape, "backward"), -ulysses

    return min((u for u in range(1, size + 1) if size % u == 0 and heads % u == 0), key=cost)


def choose_strategy(
    num_heads: int, num_kv_heads: int, size: int, *, tensor: int = 1
) -> tuple[StrategyName, int]:
    """Chooses a strategy by the bytes it sends, for `strategy="auto"`.

    Args:
      num_heads: As in `choose_ulysses_degree`.
      num_kv_heads: As in `choose_ulysses_degree`.
      size: As in `choose_ulysses_degree`.
      tensor: As in `choose_ulysses_degree`.

    Returns:
      `(strategy, ulysses_degree)`: ring, usp or ulysses, as the best degree is 1, less than `size`,
      or `size`.
    """
    ulysses = choose_ulysses_degree(num_heads, num_kv_heads, size, tensor=tensor)
    if ulysses == size:
        return "ulysses", ulysses
    return ("ring", 1) if ulysses == 1 else ("usp", ulysses)


def _all_gather(degrees: Degrees, shape: AttentionShape, direction: Direction) -> list[Collective]:
    local = shape.batch * shape.seq_len // degrees.total
    kv_elements = local * shape.num_kv_heads * (shape.head_dim + shape.value_dim)
    metadata = shape.metadata_arrays
    gathered = kv_elements * shape.itemsize + metadata * local * 4
    found = [Collective("all-gather", 2 + metadata, gathered, degrees.sequence)]
    if direction == "backward":
        scattered = kv_elements * 4 * degrees.sequence
        found.append(Collective("reduce-scatter", 2, scattered, degrees.sequence))
    return found


def _ring(degrees: Degrees, shape: AttentionShape, direction: Direction) -> list[Collective]:
    hops = degrees.sequence - 1
    tokens = shape.batch * shape.seq_len // degrees.sequence
    kv_heads = shape.num_kv_heads * kv_replicas(shape.num_kv_heads, degrees.heads) // degrees.heads
    kv_elements = tokens * kv_heads * (shape.head_dim + shape.value_dim)
    metadata = shape.metadata_arrays
    per_hop = kv_elements * shape.itemsize + metadata * tokens * 4
    arrays = 2 + metadata
    if direction == "backward":
        per_hop += kv_elements * 4
        arrays += 2
    return [Collective("collective-permute", hops * arrays, hops * per_hop, degrees.sequence)]


def _head_exchange(
    degrees: Degrees, shape: AttentionShape, direction: Direction
) -> list[Collective]:
    local = shape.batch * shape.seq_len // degrees.total
    replicas = kv_replicas(shape.num_kv_heads, degrees.heads)
    query = local * shape.num_heads * shape.head_dim
    out = local * shape.num_heads * shape.value_dim
    per_row = local * shape.num_heads * 4
    kv_elements = local * shape.num_kv_heads * replicas * (shape.head_dim + shape.value_dim)
    operand = (query + out + kv_elements) * shape.itemsize + per_row
    count = 5  # q, k, v in; out, lse back
    if direction == "backward":
        # q, k, v, dout, lse, delta in; dq, dk, dv back; replicas are summed in float32
        gradient_size = shape.itemsize if replicas == 1 else 4
        operand += per_row + query * shape.itemsize + kv_elements * gradient_size
        count = 9
    found = [Collective("all-to-all", count, operand, degrees.heads)]
    if shape.metadata_arrays:
        metadata = shape.metadata_arrays
        found.append(Collective("all-gather", metadata, metadata * local * 4, degrees.heads))
    return found
