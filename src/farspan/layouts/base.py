"""Layouts: which tokens does each shard of a row hold?

A layout cuts a row of `seq_len` tokens into `num_shards` shards of equal length. `token_index` is
the one statement of a layout; the permutation of a row follows from it. The row is permuted once,
on the host, before it is placed on devices: inside jit, a permutation of a sharded axis gathers
the whole row on every device.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Any

import numpy as np
from numpy.typing import NDArray

from farspan.errors import unknown_choice


@dataclasses.dataclass(frozen=True)
class Layout(abc.ABC):
    """Assignment of tokens to shards. Immutable and hashable.

    Attributes:
      name: The word that selects it.
      chunks_per_shard: Pieces that each shard is made of; shards divide evenly into them.
    """

    name: str
    chunks_per_shard: int

    @abc.abstractmethod
    def token_index(self, shard: Any, seq_len: int, num_shards: int, slots: Any) -> Any:
        """Gives the places in the row of the tokens in one shard.

        Args:
          shard: Which shard, int, may be traced.
          seq_len: Tokens in the row; a multiple of `multiple(num_shards)`.
          num_shards: Number of shards.
          slots: `arange(seq_len // num_shards)`, int32, NumPy or JAX.

        Returns:
          int32 `[seq_len // num_shards]`: the place in the row of the token in each slot.
        """

    def runs(self, num_shards: int) -> list[tuple[int, ...]] | None:
        """The runs of neighbouring tokens that each shard is made of.

        Returns:
          For each shard, the numbers of its runs in the row, in slot order; runs are equally long.
          None where shards are not made of runs that are known beforehand.
        """
        del num_shards
        return None

    def multiple(self, num_shards: int) -> int:
        """The number that `seq_len` must be a multiple of."""
        return self.chunks_per_shard * num_shards

    def permutation(self, seq_len: int, num_shards: int) -> NDArray[np.int32]:
        """Order of the tokens in the row as placed: shard after shard.

        Args:
          seq_len: Tokens in the row.
          num_shards: Number of shards.

        Returns:
          int32 `[seq_len]`; `row[permutation]` is the row as placed.

        Raises:
          ValueError: If `seq_len` is not a multiple of `multiple(num_shards)`.
        """
        self.check(seq_len, num_shards)
        slots = np.arange(seq_len // num_shards, dtype=np.int32)
        shards = [self.token_index(s, seq_len, num_shards, slots) for s in range(num_shards)]
        return np.concatenate(shards).astype(np.int32)

    def check(self, seq_len: int, num_shards: int) -> None:
        """Raises ValueError if the layout cannot cut `seq_len` tokens into `num_shards` shards."""
        multiple = self.multiple(num_shards)
        if seq_len < 1 or seq_len % multiple:
            pieces = f"{self.chunks_per_shard} * " if self.chunks_per_shard > 1 else ""
            padded = max(1, -(-seq_len // multiple)) * multiple
            raise ValueError(
                f"layout {self.name}: seq_len must be a positive multiple of {pieces}{num_shards} "
                f"shards = {multiple}, got seq_len={seq_len}; pad to {padded} (segment id 0 marks "
                "padding; farspan.shard_sequence does it), or use another number of shards"
            )


class Contiguous(Layout):
    """Shard r holds the r-th run of neighbours. Under a causal mask the last shard works most."""

    def __init__(self) -> None:
        super().__init__("contiguous", 1)

    def token_index(self, shard: Any, seq_len: int, num_shards: int, slots: Any) -> Any:
        """See `Layout.token_index`."""
        return shard * (seq_len // num_shards) + slots

    def runs(self, num_shards: int) -> list[tuple[int, ...]]:
        """See `Layout.runs`."""
        return [(shard,) for shard in range(num_shards)]


class Zigzag(Layout):
    """Of 2P chunks, shard r holds chunks r and 2P - 1 - r: equal work under a causal mask."""

    def __init__(self) -> None:
        super().__init__("zigzag", 2)

    def token_index(self, shard: Any, seq_len: int, num_shards: int, slots: Any) -> Any:
        """See `Layout.token_index`."""
        chunk = seq_len // (2 * num_shards)
        late = slots >= chunk
        return shard * chunk + slots + late * (2 * num_shards - 2 - 2 * shard) * chunk

    def runs(self, num_shards: int) -> list[tuple[int, ...]]:
        """See `Layout.runs`."""
        return [(shard, 2 * num_shards - 1 - shard) for shard in range(num_shards)]


class Striped(Layout):
    """Shard r holds tokens r, r + P, r + 2P, ...: near-equal work on every pair of shards.

    Source: Striped Attention, arXiv:2311.09431.
    """

    def __init__(self) -> None:
        super().__init__("striped", 1)

    def token_index(self, shard: Any, seq_len: int, num_shards: int, slots: Any) -> Any:
        """See `Layout.token_index`."""
        del seq_len
        return slots * num_shards + shard


class Balanced(Layout):
    """Each batch gets an order of its own, solved on the host from the work of its documents.

    The order is data and not code: it comes with the batch (`farspan.place_rows`), and a new
    packing compiles nothing anew.
    """

    def __init__(self) -> None:
        super().__init__("balanced", 1)

    def token_index(self, shard: Any, seq_len: int, num_shards: int, slots: Any) -> Any:
        """Raises ValueError: there is no order without a batch."""
        del shard, seq_len, num_shards, slots
        raise self.no_order()

    @staticmethod
    def no_order() -> ValueError:
        """The error of a call without the order of its rows."""
        return ValueError(
            "layout balanced: the order of a row is solved for each batch, got none; make it with "
            "placement = farspan.place_rows(context, mask, segment_ids) and pass it on as "
            "placement=, or use layout zigzag"
        )


LAYOUTS: dict[str, Layout] = {
    layout.name: layout for layout in (Contiguous(), Zigzag(), Striped(), Balanced())
}


def get_layout(name: str) -> Layout:
    """Looks a layout up by name; an unknown name raises ValueError naming the nearest."""
    if name not in LAYOUTS:
        raise unknown_choice("layout", name, LAYOUTS)
    return LAYOUTS[name]
