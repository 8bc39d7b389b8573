"""Farspan: exact training of language models on sequences of millions of tokens, in JAX.

Public names are imported on first use, so that `import farspan` is quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from farspan import schedules, testing
    from farspan.context import ContextParallel, attention, shard_sequence, unshard_sequence
    from farspan.dist import make_mesh
    from farspan.kernels import XlaKernel
    from farspan.masks import Causal, Full, Mask, SlidingWindow

__version__ = "0.1.0"

_HOMES = {
    "Causal": "farspan.masks",
    "ContextParallel": "farspan.context",
    "Full": "farspan.masks",
    "Mask": "farspan.masks",
    "SlidingWindow": "farspan.masks",
    "XlaKernel": "farspan.kernels",
    "attention": "farspan.context",
    "make_mesh": "farspan.dist",
    "schedules": "farspan",
    "shard_sequence": "farspan.context",
    "testing": "farspan",
    "unshard_sequence": "farspan.context",
}

__all__ = [
    "Causal",
    "ContextParallel",
    "Full",
    "Mask",
    "SlidingWindow",
    "XlaKernel",
    "attention",
    "make_mesh",
    "schedules",
    "shard_sequence",
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
