"""Where the tokens of a batch lie, and how far their keys must travel: data, made on the host."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax
import numpy as np
from jaxtyping import Int
from numpy.typing import NDArray

from farspan import schedules
from farspan.context.parallel import ContextParallel
from farspan.masks import Mask
from farspan.types import Leaf


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Placement:
    """What a batch's documents decide. A pytree: pass it into jit, and no packing recompiles.

    Attributes:
      token_index: Place in its row of the token in each slot, int32 `[B, S']`, in the order of the
        layout and sharded like the batch; None where the layout alone says it.
      hops: For each mask, how far keys must travel in a ring; int32 scalars.
      masks: The masks that hops are known for. Static.
      layout, shards, seq_len: What it was made for: the layout, the sequence shards, and the tokens
        in a row as placed. Static.
    """

    token_index: Leaf | None
    hops: tuple[schedules.Hops, ...]
    masks: tuple[Mask, ...] = dataclasses.field(metadata={"static": True})
    layout: str = dataclasses.field(metadata={"static": True})
    shards: int = dataclasses.field(metadata={"static": True})
    seq_len: int = dataclasses.field(metadata={"static": True})

    def hops_of(self, mask: Mask) -> schedules.Hops | None:
        """Hops that a mask needs; None where they are not known."""
        return self.hops[self.masks.index(mask)] if mask in self.masks else None

    def check(self, context: ContextParallel, seq_len: int) -> None:
        """Raises ValueError if it was made for another split, or for rows of another length.

        That it was made for other documents of the same length cannot be seen.
        """
        made = (self.layout, self.shards, self.seq_len)
        used = (context.layout, context.degrees.sequence, seq_len)
        if made != used:
            raise ValueError(
                "a placement must be used with the layout, the sequence shards and the tokens per "
                f"row that it was made for, {made}, got {used}; call place_rows with this context "
                "and the segment_ids of these rows"
            )


def place_rows(
    context: ContextParallel,
    masks: Mask | Mapping[Mask, float] | Mapping[Mask, int],
    segment_ids: Int[np.ndarray, "B S"],
    key_ranges: Int[np.ndarray, "B S n 2"] | None = None,
) -> Placement:
    """Decides where the tokens of a batch lie and how far their keys must travel.

    Call it on the host for each batch, beside `shard_sequence`, and pass the result to both
    `shard_sequence` and `attention`. The layout `balanced` needs it. With any layout it lets a ring
    make only as many hops as the longest document of the batch needs.

    Args:
      context: Mesh, strategy and layout.
      masks: The mask; or, for a model that mixes masks on one layout, each mask and the number of
        layers that use it.
      segment_ids: Document of each token, in the order of the text, 0 for padding.
      key_ranges: The batch's own ranges, if a mask reads them.

    Returns:
      The placement, for rows padded to the next multiple of `context.sequence_multiple`.

    Raises:
      ValueError: If a document's tokens are not neighbours.

    Cost:
      Host time: a few milliseconds per 100,000 tokens for the hops; `schedules.balanced_order` for
      the layout `balanced`.
    """
    orders, hops, weights = solve_rows(context, masks, segment_ids, key_ranges)
    index = jax.device_put(orders, context.sharding(2)) if context.layout == "balanced" else None
    return Placement(
        index, hops, weights, context.layout, context.degrees.sequence, orders.shape[1]
    )


def solve_rows(
    context: ContextParallel,
    masks: Mask | Mapping[Mask, float] | Mapping[Mask, int],
    segment_ids: Int[np.ndarray, "B S"],
    key_ranges: Int[np.ndarray, "B S n 2"] | None = None,
) -> tuple[NDArray[np.int32], tuple[schedules.Hops, ...], tuple[Mask, ...]]:
    """What `place_rows` decides, on the host.

    Returns:
      Place in its row of the token in each slot, int32 `[B, S']`, whatever the layout; hops of each
      mask; the masks.
    """
    weights = {masks: 1.0} if isinstance(masks, Mask) else dict(masks)
    shards, layout = context.degrees.sequence, context.layout_object
    padding = -segment_ids.shape[1] % context.sequence_multiple
    ids = np.pad(np.asarray(segment_ids, np.int32), ((0, 0), (0, padding)))
    ranges: list[NDArray[np.int32] | None] = [None] * len(ids)
    if key_ranges is not None:
        wide = ((0, 0), (0, padding), (0, 0), (0, 0))
        ranges = list(np.pad(np.asarray(key_ranges, np.int32), wide))
    seq_len = ids.shape[1]
    orders = [
        schedules.row_order(layout, weights, seq_len, shards, row, own)
        for row, own in zip(ids, ranges, strict=True)
    ]
    hops: list[schedules.Hops] = []
    for mask in weights:
        needs = [
            schedules.needed_shards(mask, order, shards, row, own)
            for order, row, own in zip(orders, ids, ranges, strict=True)
        ]
        found = schedules.hops_needed(np.any(needs, axis=0))
        hops.append(schedules.Hops(np.int32(found.before), np.int32(found.after)))
    return np.stack(orders), tuple(hops), tuple(weights)
