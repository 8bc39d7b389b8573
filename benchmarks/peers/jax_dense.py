"""JAX's own `jax.nn.dot_product_attention`, which on a CPU holds all scores at once."""

from __future__ import annotations

import functools

import jax

from peers import Prepared, Setting
from peers.jax_step import prepare_step
from peers.problem import Problem


def prepare(problem: Problem, setting: Setting) -> Prepared:
    """See `Peer.prepare`."""
    assert setting.devices == 1
    attention = functools.partial(
        jax.nn.dot_product_attention, is_causal=True, implementation="xla"
    )
    return prepare_step(attention, problem)
