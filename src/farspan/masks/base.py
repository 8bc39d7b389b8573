"""Masks: which keys may a query see?

A mask is stated once, as the ranges of keys each query sees, and everything else (the dense
matrix, the classification of blocks, exact pair counts) follows from that one statement:

    query i sees key j  <=>  lo_n(i) <= j < hi_n(i) for some range n.

Every `lo` and `hi` must be non-decreasing in `i`. Then the extremes of a block of queries bound
the keys that any (or all) of them see, and a block is classified from four numbers.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Any

UNBOUNDED = 2**31 - 1
"""Largest int32: as `hi`, no upper bound; its negative, as `lo`, no lower bound."""

Bound = Any
"""A Python int (static: the same for every query) or an integer array, NumPy or JAX."""

Ranges = tuple[tuple[Bound, Bound], ...]


class Mask(abc.ABC):
    """Which keys a query may see, by place in the row. Immutable, hashable, combined by & and |."""

    @abc.abstractmethod
    def key_ranges(self, query_index: Any) -> Ranges:
        """Gives the half-open ranges of keys that each query sees.

        Args:
          query_index: Place of each query in its row, int32, any shape, NumPy or JAX.

        Returns:
          Pairs `(lo, hi)`, each a Python int or an array of the shape of `query_index`, each
          non-decreasing in `query_index`. A query sees the union; ranges may overlap.
        """

    def __and__(self, other: Mask) -> Mask:
        return Intersection(self, other)

    def __or__(self, other: Mask) -> Mask:
        return Union(self, other)


@dataclasses.dataclass(frozen=True)
class Full(Mask):
    """Every query sees every key."""

    def key_ranges(self, query_index: Any) -> Ranges:
        """See `Mask.key_ranges`."""
        del query_index
        return ((-UNBOUNDED, UNBOUNDED),)


@dataclasses.dataclass(frozen=True)
class Causal(Mask):
    """A query sees itself and every key before it."""

    def key_ranges(self, query_index: Any) -> Ranges:
        """See `Mask.key_ranges`."""
        return ((-UNBOUNDED, query_index + 1),)


@dataclasses.dataclass(frozen=True)
class SlidingWindow(Mask):
    """A query sees itself, `left` keys before it and `right` keys after it.

    The token itself is not counted, so Hugging Face's `sliding_window=W` is
    `SlidingWindow(left=W - 1, right=0)`.

    Attributes:
      left: Keys before the query, at least 0; None is unbounded.
      right: Keys after the query, at least 0; None is unbounded.

    Raises:
      ValueError: If a bound is negative or not below 2**30.
    """

    left: int | None
    right: int | None

    def __post_init__(self) -> None:
        for name, value in (("left", self.left), ("right", self.right)):
            if value is not None and not 0 <= value < 2**30:
                raise ValueError(
                    f"SlidingWindow: {name} must be in 0..2**30 - 1 or None (unbounded), "
                    f"got {value}"
                )

    def key_ranges(self, query_index: Any) -> Ranges:
        """See `Mask.key_ranges`."""
        lo = -UNBOUNDED if self.left is None else query_index - self.left
        hi = UNBOUNDED if self.right is None else query_index + (self.right + 1)
        return ((lo, hi),)


@dataclasses.dataclass(frozen=True)
class Intersection(Mask):
    """A query sees a key that both masks let it see."""

    first: Mask
    second: Mask

    def key_ranges(self, query_index: Any) -> Ranges:
        """See `Mask.key_ranges`."""
        return tuple(
            (_later(lo, other_lo), _earlier(hi, other_hi))
            for lo, hi in self.first.key_ranges(query_index)
            for other_lo, other_hi in self.second.key_ranges(query_index)
        )


@dataclasses.dataclass(frozen=True)
class Union(Mask):
    """A query sees a key that either mask lets it see."""

    first: Mask
    second: Mask

    def key_ranges(self, query_index: Any) -> Ranges:
        """See `Mask.key_ranges`."""
        return self.first.key_ranges(query_index) + self.second.key_ranges(query_index)


def _later(first: Bound, second: Bound) -> Bound:
    """The greater of two lower bounds; static bounds stay static."""
    if isinstance(first, int):
        first, second = second, first
    if isinstance(first, int):
        return max(first, second)
    unbounded = isinstance(second, int) and second == -UNBOUNDED
    return first if unbounded else first.clip(min=second)


def _earlier(first: Bound, second: Bound) -> Bound:
    """The smaller of two upper bounds; static bounds stay static."""
    if isinstance(first, int):
        first, second = second, first
    if isinstance(first, int):
        return min(first, second)
    unbounded = isinstance(second, int) and second == UNBOUNDED
    return first if unbounded else first.clip(max=second)
