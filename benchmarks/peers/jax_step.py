"""What the implementations in JAX share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from peers import Prepared
from peers.problem import Problem

Attention = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def prepare_step(attention: Attention, problem: Problem) -> Prepared:
    """Compiles forward and backward of an attention function on one device."""
    return Prepared(compile_step(attention, [jax.device_put(x) for x in problem.inputs()]), to_host)


def compile_step(attention: Attention, arrays: Sequence[jax.Array]) -> Callable[[], Any]:
    """Compiles `(query, key, value, dout) -> (out, dq, dk, dv)` for these arrays.

    Compiled ahead of the first run, so that the compiler's memory is not counted as the run's.
    """

    def both(query: jax.Array, key: jax.Array, value: jax.Array, dout: jax.Array) -> Any:
        out, pull = jax.vjp(attention, query, key, value)
        return out, *pull(dout)

    compiled = jax.jit(both).lower(*arrays).compile()
    return lambda: jax.block_until_ready(compiled(*arrays))


def to_host(outputs: Sequence[jax.Array]) -> list[Any]:
    """NumPy arrays."""
    return [np.asarray(x) for x in outputs]
