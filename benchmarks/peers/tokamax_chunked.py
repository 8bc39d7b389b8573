"""Tokamax's `xla_chunked` attention: blockwise, in plain XLA, like farspan's kernel."""

from __future__ import annotations

import functools

import tokamax

from peers import Prepared, Setting
from peers.jax_step import prepare_step
from peers.problem import Problem


def prepare(problem: Problem, setting: Setting) -> Prepared:
    """See `Peer.prepare`."""
    assert setting.devices == 1
    attention = functools.partial(
        tokamax.dot_product_attention, is_causal=True, implementation="xla_chunked"
    )
    return prepare_step(attention, problem)
