"""Farspan's `xla` kernel, alone or under one of its strategies on virtual CPU devices."""

from __future__ import annotations

import functools
from typing import Any

import jax

import farspan
from farspan.dist import ensure_devices
from peers import Prepared, Setting
from peers.jax_step import compile_step, prepare_step, to_host
from peers.problem import Problem


def prepare(problem: Problem, setting: Setting) -> Prepared:
    """See `Peer.prepare`. Options: `strategy`, and the kernel's `rows` and `key_block`."""
    options = dict(setting.options)
    strategy = options.pop("strategy", None)
    attention = functools.partial(
        farspan.attention, mask=farspan.Causal(), kernel=farspan.XlaKernel(**options)
    )
    if strategy is None:
        return prepare_step(attention, problem)
    ensure_devices(setting.devices)
    context = farspan.ContextParallel(_mesh(strategy, setting.devices), strategy, "zigzag")
    # Sharded once, outside the measurement, as in training, where the data pipeline does it.
    arrays = farspan.shard_sequence(tuple(problem.inputs()), context)
    step = compile_step(functools.partial(attention, context=context), arrays)

    def gathered(outputs: Any) -> list[Any]:
        return to_host(farspan.unshard_sequence(tuple(outputs), context))

    return Prepared(step, gathered)


def _mesh(strategy: str, devices: int) -> jax.sharding.Mesh:
    if strategy == "ulysses":
        return farspan.make_mesh(cp_ulysses=devices)
    if strategy == "usp":
        return farspan.make_mesh(cp_ring=devices // 2, cp_ulysses=2)
    return farspan.make_mesh(cp_ring=devices)
