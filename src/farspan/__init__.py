"""Farspan: exact training of language models on sequences of millions of tokens, in JAX.

Public names are imported on first use, so that `import farspan` is quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from farspan import schedules, testing
    from farspan.context import (
        ContextParallel,
        Placement,
        attention,
        attention_fn,
        latent_attention,
        place_rows,
        shard_sequence,
        unshard_sequence,
    )
    from farspan.dist import make_mesh
    from farspan.kernels import SplashKernel, XlaKernel
    from farspan.masks import (
        BlockCausal,
        Causal,
        Chunked,
        Full,
        KeyRanges,
        Mask,
        PrefixLM,
        SlidingWindow,
        prefix_key_ranges,
        shared_prefix_key_ranges,
    )

__version__ = "0.1.0"

_HOMES = {
    "BlockCausal": "farspan.masks",
    "Causal": "farspan.masks",
    "Chunked": "farspan.masks",
    "ContextParallel": "farspan.context",
    "Full": "farspan.masks",
    "KeyRanges": "farspan.masks",
    "Mask": "farspan.masks",
    "Placement": "farspan.context",
    "PrefixLM": "farspan.masks",
    "SlidingWindow": "farspan.masks",
    "SplashKernel": "farspan.kernels",
    "XlaKernel": "farspan.kernels",
    "attention": "farspan.context",
    "attention_fn": "farspan.context",
    "latent_attention": "farspan.context",
    "make_mesh": "farspan.dist",
    "place_rows": "farspan.context",
    "prefix_key_ranges": "farspan.masks",
    "schedules": "farspan",
    "shard_sequence": "farspan.context",
    "shared_prefix_key_ranges": "farspan.masks",
    "testing": "farspan",
    "unshard_sequence": "farspan.context",
}

__all__ = [
    "BlockCausal",
    "Causal",
    "Chunked",
    "ContextParallel",
    "Full",
    "KeyRanges",
    "Mask",
    "Placement",
    "PrefixLM",
    "SlidingWindow",
    "SplashKernel",
    "XlaKernel",
    "attention",
    "attention_fn",
    "latent_attention",
    "make_mesh",
    "place_rows",
    "prefix_key_ranges",
    "schedules",
    "shard_sequence",
    "shared_prefix_key_ranges",
    "testing",
    "unshard_sequence",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'farspan' has no attribute {name!r}")
    if home == "farspan":
        return importlib.import_module(f"farspan.{name}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
