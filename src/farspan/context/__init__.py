"""Context parallelism: exact attention over a sequence that is split over devices."""

from farspan.context.api import attention
from farspan.context.parallel import ContextParallel
from farspan.context.sequence import shard_sequence, unshard_sequence

__all__ = [
    "ContextParallel",
    "attention",
    "shard_sequence",
    "unshard_sequence",
]
