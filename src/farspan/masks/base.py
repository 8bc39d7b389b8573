"""Masks: which keys may a query see?

A mask is stated once, as the ranges of keys each query sees, and everything else (the dense
matrix, the classification of blocks, exact pair counts) follows from that one statement:

    query i sees key j  <=>  lo_n(i) <= j < hi_n(i) for some range n.

The extremes of the bounds over a block of queries bound the keys that any (or all) of them see, so
a block is classified from four numbers a range.

What depends on the data (the prefix of each document, a prefix that documents share) is stated in
the same form: `KeyRanges` reads the ranges of each query from an array that comes with the batch.
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

Reach = tuple[int | None, int | None]


class Mask(abc.ABC):
    """Which keys a query may see, by place in the row. Immutable, hashable, combined by & and |."""

    @property
    def given_ranges(self) -> int:
        """Ranges per query that the mask reads from `key_ranges`, which comes with a batch."""
        return 0

    @abc.abstractmethod
    def key_ranges(self, query_index: Any, given: Any | None = None) -> Ranges:
        """Gives the half-open ranges of keys that each query sees.

        Args:
          query_index: Place of each query in its row, int32 `[...]`, NumPy or JAX.
          given: The batch's own ranges of each query, int32 `[..., given_ranges or more, 2]`, or
            None where the mask reads none.

        Returns:
          Pairs `(lo, hi)`, each a Python int or an integer array that broadcasts against
          `query_index`. A query sees the union; ranges may overlap or be empty.
        """

    @abc.abstractmethod
    def reach(self) -> Reach:
        """Bounds how far from a query its keys lie.

        Returns:
          `(left, right)`: a query sees no key more than `left` places before it and none more than
          `right` places after it; None where there is no such bound.
        """

    def __and__(self, other: Mask) -> Mask:
        return Intersection(self, other)

    def __or__(self, other: Mask) -> Mask:
        return Union(self, other)


@dataclasses.dataclass(frozen=True)
class Full(Mask):
    """Every query sees every key."""

    def key_ranges(self, query_index: Any, given: Any | None = None) -> Ranges:
        """See `Mask.key_ranges`."""
        del query_index, given
        return ((-UNBOUNDED, UNBOUNDED),)

    def reach(self) -> Reach:
        """See `Mask.reach`."""
        return None, None


@dataclasses.dataclass(frozen=True)
class Causal(Mask):
    """A query sees itself and every key before it."""

    def key_ranges(self, query_index: Any, given: Any | None = None) -> Ranges:
        """See `Mask.key_ranges`."""
        del given
        return ((-UNBOUNDED, query_index + 1),)

    def reach(self) -> Reach:
        """See `Mask.reach`."""
        return None, 0


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
            if value is not None:
                _check_size(f"SlidingWindow: {name}, if not None (unbounded),", value, 0)

    def key_ranges(self, query_index: Any, given: Any | None = None) -> Ranges:
        """See `Mask.key_ranges`."""
        del given
        lo = -UNBOUNDED if self.left is None else query_index - self.left
        hi = UNBOUNDED if self.right is None else query_index + (self.right + 1)
        return ((lo, hi),)

    def reach(self) -> Reach:
        """See `Mask.reach`."""
        return self.left, self.right


@dataclasses.dataclass(frozen=True)
class Chunked(Mask):
    """A query sees the keys of its own chunk: places `[n * size, (n + 1) * size)` of the row.

    `Causal() & Chunked(8192)` is the chunked-local attention of Llama 4.

    Attributes:
      size: Tokens per chunk, at least 1.

    Raises:
      ValueError: If the size is not in 1..2**30 - 1.
    """

    size: int

    def __post_init__(self) -> None:
        _check_size("Chunked: size", self.size, 1)

    def key_ranges(self, query_index: Any, given: Any | None = None) -> Ranges:
        """See `Mask.key_ranges`."""
        del given
        start = query_index // self.size * self.size
        return ((start, start + self.size),)

    def reach(self) -> Reach:
        """See `Mask.reach`."""
        return self.size - 1, self.size - 1


@dataclasses.dataclass(frozen=True)
class BlockCausal(Mask):
    """Both ways inside a block of `size` places, causal across blocks, as in block diffusion.

    Attributes:
      size: Tokens per block, at least 1; 1 is `Causal`.

    Raises:
      ValueError: If the size is not in 1..2**30 - 1.

    Source: Block Diffusion, arXiv:2503.09573.
    """

    size: int

    def __post_init__(self) -> None:
        _check_size("BlockCausal: size", self.size, 1)

    def key_ranges(self, query_index: Any, given: Any | None = None) -> Ranges:
        """See `Mask.key_ranges`."""
        del given
        return ((-UNBOUNDED, query_index // self.size * self.size + self.size),)

    def reach(self) -> Reach:
        """See `Mask.reach`."""
        return None, self.size - 1


@dataclasses.dataclass(frozen=True)
class PrefixLM(Mask):
    """Every query sees the first `length` keys of its row; beyond them, attention is causal.

    For prefixes that differ from row to row or document to document, see `prefix_key_ranges`.

    Attributes:
      length: Tokens in the prefix, at least 0; 0 is `Causal`.

    Raises:
      ValueError: If the length is not in 0..2**30 - 1.

    Source: T5, arXiv:1910.10683, section 3.2.1.
    """

    length: int

    def __post_init__(self) -> None:
        _check_size("PrefixLM: length", self.length, 0)

    def key_ranges(self, query_index: Any, given: Any | None = None) -> Ranges:
        """See `Mask.key_ranges`."""
        del given
        return ((-UNBOUNDED, (query_index + 1).clip(min=self.length)),)

    def reach(self) -> Reach:
        """See `Mask.reach`."""
        return None, max(0, self.length - 1)


@dataclasses.dataclass(frozen=True)
class KeyRanges(Mask):
    """A query sees the ranges of keys that come with the batch, as the argument `key_ranges`.

    It states any mask that depends on the data. `Causal() | KeyRanges(1)` with the prefix of each
    document is a packed prefix-LM (`prefix_key_ranges`); `Causal() & KeyRanges(2)` lets several
    documents see one shared prefix, and not each other (`shared_prefix_key_ranges`).

    Attributes:
      stop: The ranges after the last that the mask reads.
      start: The first range that it reads; another than 0 lets two masks read ranges apart.

    Raises:
      ValueError: If there is no range from `start` to `stop`.
    """

    stop: int
    start: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise ValueError(
                f"KeyRanges: must read at least one range, got start={self.start}, "
                f"stop={self.stop}; KeyRanges(n) reads the first n"
            )

    @property
    def given_ranges(self) -> int:
        """See `Mask.given_ranges`."""
        return self.stop

    def key_ranges(self, query_index: Any, given: Any | None = None) -> Ranges:
        """See `Mask.key_ranges`."""
        del query_index
        assert given is not None, "the mask reads ranges; pass key_ranges along"
        return tuple((given[..., n, 0], given[..., n, 1]) for n in range(self.start, self.stop))

    def reach(self) -> Reach:
        """See `Mask.reach`."""
        return None, None


@dataclasses.dataclass(frozen=True)
class _Pair(Mask):
    """Two masks as one.

    Attributes:
      first, second: The masks.
    """

    first: Mask
    second: Mask

    @property
    def given_ranges(self) -> int:
        """See `Mask.given_ranges`."""
        return max(self.first.given_ranges, self.second.given_ranges)


class Intersection(_Pair):
    """A query sees a key that both masks let it see."""

    def key_ranges(self, query_index: Any, given: Any | None = None) -> Ranges:
        """See `Mask.key_ranges`."""
        return tuple(
            (_later(lo, other_lo), _earlier(hi, other_hi))
            for lo, hi in self.first.key_ranges(query_index, given)
            for other_lo, other_hi in self.second.key_ranges(query_index, given)
        )

    def reach(self) -> Reach:
        """See `Mask.reach`."""
        left, right = zip(self.first.reach(), self.second.reach(), strict=True)
        return _least(*left), _least(*right)


class Union(_Pair):
    """A query sees a key that either mask lets it see."""

    def key_ranges(self, query_index: Any, given: Any | None = None) -> Ranges:
        """See `Mask.key_ranges`."""
        first = self.first.key_ranges(query_index, given)
        return first + self.second.key_ranges(query_index, given)

    def reach(self) -> Reach:
        """See `Mask.reach`."""
        left, right = zip(self.first.reach(), self.second.reach(), strict=True)
        return _greatest(*left), _greatest(*right)


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


def _least(first: int | None, second: int | None) -> int | None:
    """The smaller of two bounds, None being no bound."""
    if first is None or second is None:
        return second if first is None else first
    return min(first, second)


def _greatest(first: int | None, second: int | None) -> int | None:
    """The greater of two bounds, None being no bound."""
    return None if first is None or second is None else max(first, second)


def _check_size(what: str, value: int, least: int) -> None:
    if not least <= value < 2**30:
        raise ValueError(f"{what} must be in {least}..2**30 - 1, got {value}")
