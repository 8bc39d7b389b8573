"""The rules "this combination is possible", in one place.

The configuration, the planner and the call site all ask `check_combination`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from farspan.errors import unknown_choice
from farspan.layouts import Layout
from farspan.masks import Mask

StrategyName = Literal["all_gather", "ulysses", "ring", "usp", "halo"]
STRATEGIES: tuple[StrategyName, ...] = ("all_gather", "ulysses", "ring", "usp", "halo")
GENERAL_STRATEGIES = tuple(name for name in STRATEGIES if name != "halo")
"""Those that take every mask; `halo` takes masks of bounded reach."""

Direction = Literal["forward", "backward"]


@dataclasses.dataclass(frozen=True)
class Degrees:
    """How many devices each part of a strategy spans; their product splits the sequence.

    Attributes:
      sequence: Devices that hold different keys during attention (ring, halo or all-gather).
      heads: Devices that hold different heads during attention (Ulysses).
      outer: Of the ring's devices, how many lie along its outer ring; divides `sequence`.
    """

    sequence: int
    heads: int
    outer: int = 1

    @property
    def total(self) -> int:
        """Shards of the sequence outside attention: the context-parallel size."""
        return self.sequence * self.heads


def degrees(strategy: str, cp_ring: int, cp_ulysses: int, cp_ring_outer: int = 1) -> Degrees:
    """Splits a mesh's context axes by the role they play in a strategy.

    Args:
      strategy: A name in `STRATEGIES`.
      cp_ring: Size of the mesh axis of that name.
      cp_ulysses: Size of the mesh axis of that name.
      cp_ring_outer: Size of the mesh axis of that name.

    Returns:
      `usp` and `halo` exchange heads over `cp_ulysses`; the others use all axes as one. `ring` and
      `usp` make a ring of rings where there is an outer ring.

    Raises:
      ValueError: If the strategy is unknown.
    """
    if strategy not in STRATEGIES:
        raise unknown_choice("strategy", strategy, STRATEGIES)
    sequence = cp_ring_outer * cp_ring
    if strategy == "usp":
        return Degrees(sequence, cp_ulysses, cp_ring_outer)
    if strategy == "halo":
        return Degrees(sequence, cp_ulysses)
    if strategy == "ulysses":
        return Degrees(1, sequence * cp_ulysses)
    outer = cp_ring_outer if strategy == "ring" else 1
    return Degrees(sequence * cp_ulysses, 1, outer)


def split_in_words(strategy: str, degrees: Degrees) -> str:
    """A strategy and its sizes, such as `usp = ring 4 x ulysses 2`."""
    inner = degrees.sequence // degrees.outer
    ring = f"{degrees.outer} x {inner}" if degrees.outer > 1 else f"{degrees.sequence}"
    if strategy == "usp" or (strategy == "halo" and degrees.heads > 1):
        first = "halo" if strategy == "halo" else "ring"
        return f"{strategy} = {first} {ring} x ulysses {degrees.heads}"
    return f"{strategy} {ring if strategy == 'ring' else degrees.total}"


def window_strategy(strategy: str, layout: Layout) -> str:
    """The strategy for a model's windowed layers, whose other layers use `strategy`.

    `halo` where shards are made of known runs of neighbours, and all devices hold different keys or
    the same mesh axis exchanges heads; else the same.
    """
    split = strategy in ("all_gather", "ring", "usp")
    return "halo" if split and layout.runs(1) is not None else strategy


def sequence_multiple(layout: Layout, degrees: Degrees, ring_streams: int = 1) -> int:
    """The number that the sequence length must be a multiple of.

    The layout's chunks belong to the sequence shards; a Ulysses group, and the streams of a ring,
    split a shard evenly.
    """
    multiple = layout.multiple(degrees.sequence)
    return math.lcm(multiple, degrees.total, degrees.sequence * ring_streams)


def check_combination(
    strategy: str,
    degrees: Degrees,
    layout: Layout,
    *,
    num_heads: int,
    num_kv_heads: int,
    tensor: int = 1,
    seq_len: int | None = None,
    mask: Mask | None = None,
    head_groups: int = 1,
    ring_streams: int = 1,
    latent: bool = False,
    places_given: bool = False,
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
      mask: The mask, or None if not yet known.
      head_groups: Groups into which heads are cut.
      ring_streams: Streams in which a ring sends.
      latent: Whether keys and values come from a latent (MLA).
      places_given: Whether the places of tokens are data (`positions`).

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
    if head_groups > 1:
        _check_head_groups(
            strategy, degrees, local_heads, num_kv_heads // tensor, head_groups, latent
        )
    if ring_streams > 1 and strategy not in ("ring", "usp"):
        raise ValueError(
            "ring_streams: only ring and usp have a ring to cut into streams, got "
            f"strategy={strategy}, ring_streams={ring_streams}; use ring_streams=1"
        )
    if strategy == "halo":
        _check_halo(layout, mask, places_given)
    if seq_len is not None:
        check_length(strategy, degrees, layout, seq_len, ring_streams)


def check_length(
    strategy: str, degrees: Degrees, layout: Layout, seq_len: int, ring_streams: int = 1
) -> None:
    """Raises ValueError if rows of `seq_len` tokens cannot be cut evenly."""
    layout.check(seq_len, degrees.sequence)
    multiple = sequence_multiple(layout, degrees, ring_streams)
    if seq_len % multiple:
        raise ValueError(
            f"{strategy}: seq_len must be a multiple of {multiple} for {degrees.total} shards, "
            f"got seq_len={seq_len}; pad to {-(-seq_len // multiple) * multiple}"
        )


def kv_replicas(num_kv_heads: int, degree: int) -> int:
    """Copies of each kv head that Ulysses sends so that every device gets whole heads."""
    return math.lcm(num_kv_heads, degree) // num_kv_heads


def _check_head_groups(
    strategy: str, degrees: Degrees, num_heads: int, num_kv_heads: int, groups: int, latent: bool
) -> None:
    if latent:
        heads = num_heads // degrees.heads
        fits = [n for n in range(1, heads + 1) if heads % n == 0]
        rule = "must divide the query heads on a device once they are exchanged"
    else:
        if strategy not in ("all_gather", "ulysses"):
            raise ValueError(
                "head_groups: only all_gather and ulysses cut heads of keys and values into "
                f"groups, got strategy={strategy}, head_groups={groups}; use head_groups=1"
            )
        rule = (
            "must divide the kv heads on a device, and leave query heads that the Ulysses degree "
            "divides"
        )
        fits = [
            n
            for n in range(1, num_kv_heads + 1)
            if num_kv_heads % n == 0 and num_heads // n % degrees.heads == 0
        ]
    if groups not in fits:
        raise ValueError(
            f"head_groups: {rule}, got head_groups={groups}, num_heads={num_heads}, "
            f"num_kv_heads={num_kv_heads}, degree={degrees.heads}; use head_groups="
            + ", ".join(map(str, fits))
        )


def _check_halo(layout: Layout, mask: Mask | None, places_given: bool) -> None:
    if layout.runs(1) is None:
        raise ValueError(
            "halo: each shard must be made of known runs of neighbouring tokens, got layout "
            f"{layout.name}; use layout contiguous or zigzag, or strategy ring"
        )
    if mask is not None and None in mask.reach():
        raise ValueError(
            "halo: the mask must bound how far a query sees, to the left and to the right, got "
            f"{mask} with reach {mask.reach()}; use for example Causal() & SlidingWindow(left, 0), "
            "or strategy ring"
        )
    if places_given:
        raise ValueError(
            "halo: the window must be measured in tokens of the row, got explicit positions; leave "
            "positions out, or use strategy ring"
        )
