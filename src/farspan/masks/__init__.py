"""Masks: which keys may a query see, and how much work is that?"""

from farspan.masks.area import clipped_ranges, document_bounds, pairs_per_query, visible_pairs
from farspan.masks.base import (
    BlockCausal,
    Causal,
    Chunked,
    Full,
    Intersection,
    KeyRanges,
    Mask,
    PrefixLM,
    SlidingWindow,
    Union,
)
from farspan.masks.given import prefix_key_ranges, shared_prefix_key_ranges
from farspan.masks.tokens import (
    Extents,
    Tokens,
    block_map,
    classify,
    key_extents,
    query_extents,
    visible,
)

__all__ = [
    "BlockCausal",
    "Causal",
    "Chunked",
    "Extents",
    "Full",
    "Intersection",
    "KeyRanges",
    "Mask",
    "PrefixLM",
    "SlidingWindow",
    "Tokens",
    "Union",
    "block_map",
    "classify",
    "clipped_ranges",
    "document_bounds",
    "key_extents",
    "pairs_per_query",
    "prefix_key_ranges",
    "query_extents",
    "shared_prefix_key_ranges",
    "visible",
    "visible_pairs",
]
