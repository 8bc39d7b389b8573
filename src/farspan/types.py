"""Constants and names that every layer shares."""

from typing import Any

PAD_SEGMENT_ID = 0
"""Segment id of padding, which never attends, is never attended to, and yields 0 and gradient 0."""

IGNORE_LABEL = -100
"""Label of a token whose prediction does not enter the loss."""

ATTENTION_NAMES = ("attention_out", "attention_lse")
"""Names of attention's output and log-sum-exp for `jax.checkpoint` policies; keep both or none."""

Leaf = Any
"""A leaf of a pytree: an array, or what stands in its place in a tree of the same form (a shape, a
sharding, the names of its axes)."""
