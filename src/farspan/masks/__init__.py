"""Masks: which keys may a query see, and how much work is that?"""

from farspan.masks.area import pairs_per_query, visible_pairs
from farspan.masks.base import Causal, Full, Intersection, Mask, SlidingWindow, Union
from farspan.masks.tokens import Extents, Tokens, block_extents, block_map, classify, visible

__all__ = [
    "Causal",
    "Extents",
    "Full",
    "Intersection",
    "Mask",
    "SlidingWindow",
    "Tokens",
    "Union",
    "block_extents",
    "block_map",
    "classify",
    "pairs_per_query",
    "visible",
    "visible_pairs",
]
