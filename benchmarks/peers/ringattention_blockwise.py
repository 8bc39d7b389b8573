"""The `ringattention` package (arXiv:2310.01889's own code), alone or as a ring.

It runs with the jax of its time only (0.4.x): give an interpreter that holds both with
`--peer-python`. It knows no grouped kv heads, so they are repeated, and shards contiguously.
"""

from __future__ import annotations

import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from peers import Prepared, Setting
from peers.jax_step import compile_step, to_host
from peers.problem import Problem

_CHUNK = 512
_AXIS = "ring"


def prepare(problem: Problem, setting: Setting) -> Prepared:
    """See `Peer.prepare`."""
    flag = f"--xla_force_host_platform_device_count={setting.devices}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}"
    mesh = Mesh(np.array(jax.devices()[: setting.devices]), (_AXIS,))
    spec = PartitionSpec(None, _AXIS)
    ring = _ring(problem, setting.devices)

    def attention(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        key, value = (jnp.repeat(x, problem.group, 2) for x in (key, value))
        return _shard_map(ring, mesh, spec)(query, key, value)

    arrays = [jax.device_put(x, NamedSharding(mesh, spec)) for x in problem.inputs()]
    return Prepared(compile_step(attention, arrays), to_host)


def _ring(problem: Problem, devices: int) -> Any:
    from ringattention import ringattention_jax  # starts jax, so the flag comes first

    chunk = min(_CHUNK, problem.seq_len // devices)
    options = {
        "causal_block_size": 1,
        "query_chunk_size": chunk,
        "key_chunk_size": chunk,
        "deterministic": True,
        "dropout_rng": None,
        "attn_pdrop": 0.0,
        "dtype": jnp.float32,
        "policy": jax.checkpoint_policies.nothing_saveable,
        "precision": None,
        "prevent_cse": False,
    }

    def ring(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        return ringattention_jax(query, key, value, None, None, None, _AXIS, True, options)

    return ring


def _shard_map(function: Any, mesh: Mesh, spec: PartitionSpec) -> Any:
    from jax.experimental.shard_map import shard_map  # where the jax of its time has it

    return shard_map(function, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec, check_rep=False)
