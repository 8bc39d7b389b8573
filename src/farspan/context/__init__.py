"""Context parallelism: exact attention over a sequence that is split over devices."""

from farspan.context.api import AttentionOptions, attention, latent_attention
from farspan.context.drop_in import attention_fn
from farspan.context.parallel import ContextParallel
from farspan.context.placement import Placement, place_rows, solve_rows
from farspan.context.sequence import shard_sequence, unshard_sequence

__all__ = [
    "AttentionOptions",
    "ContextParallel",
    "Placement",
    "attention",
    "attention_fn",
    "latent_attention",
    "place_rows",
    "shard_sequence",
    "solve_rows",
    "unshard_sequence",
]
