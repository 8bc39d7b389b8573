"""The compiled program sends exactly what `farspan.schedules` says, and keeps no more than that."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import farspan
from farspan import schedules
from farspan.plan.hlo import collectives, instructions

HEADS, KV_HEADS, DIM, VALUE_DIM, BATCH = 8, 2, 16, 24, 2
MESHES = [
    ("all_gather", 8, 1), ("all_gather", 2, 2), ("ring", 8, 1), ("ring", 4, 2), ("ring", 2, 1),
    ("ulysses", 1, 8), ("ulysses", 1, 2), ("usp", 4, 2), ("usp", 2, 4), ("usp", 2, 2),
]  # fmt: skip


def compile_pass(context, seq_len, *, gradients, metadata=("segment_ids",)):
    """Compiles attention, or attention and its gradients, for arrays as a model shards them."""
    sharding = context.sharding(4)

    def array(heads, dim):
        return jax.ShapeDtypeStruct((BATCH, seq_len, heads, dim), jnp.float32, sharding=sharding)

    arrays = [array(HEADS, DIM), array(KV_HEADS, DIM), array(KV_HEADS, VALUE_DIM)]
    labels = {
        name: jax.ShapeDtypeStruct((BATCH, seq_len), jnp.int32, sharding=context.sharding(2))
        for name in metadata
    }

    def forward(q, k, v, labels):
        return farspan.attention(
            q, k, v, mask=farspan.Causal(), context=context, return_lse=True, **labels,
            kernel=farspan.XlaKernel(rows=64, key_block=16),
        )  # fmt: skip

    def both(q, k, v, labels, dout):
        (out, lse), pull = jax.vjp(lambda q, k, v: forward(q, k, v, labels), q, k, v)
        return out, lse, pull((dout, jnp.zeros_like(lse)))

    operands = (*arrays, labels)
    if gradients:
        return jax.jit(both).lower(*operands, array(HEADS, VALUE_DIM)).compile()
    return jax.jit(forward).lower(*operands).compile()


def expected(strategy, context, seq_len, directions, metadata):
    shape = schedules.AttentionShape(
        BATCH, seq_len, HEADS, KV_HEADS, DIM, VALUE_DIM, 4,
        segments="segment_ids" in metadata, positions="positions" in metadata,
    )  # fmt: skip
    totals = {}
    for direction in directions:
        for found in schedules.collectives(strategy, context.degrees, shape, direction):
            count, size = totals.get(found.op, (0, 0))
            totals[found.op] = (count + found.count, size + found.operand_bytes)
    return totals


CASES = [(*mesh, ("segment_ids",)) for mesh in MESHES] + [
    (*mesh, metadata)
    for mesh in MESHES
    if mesh[1] * mesh[2] == 8
    for metadata in ((), ("segment_ids", "positions"))
]


@pytest.mark.parametrize(("strategy", "cp_ring", "cp_ulysses", "metadata"), CASES)
def test_counts_and_bytes_equal_the_formulas(strategy, cp_ring, cp_ulysses, metadata):
    mesh = farspan.make_mesh(cp_ring=cp_ring, cp_ulysses=cp_ulysses)
    context = farspan.ContextParallel(mesh, strategy, "zigzag")
    compiled = compile_pass(context, 64, gradients=True, metadata=metadata)
    directions = ("forward", "backward")
    assert collectives(compiled.as_text()) == expected(strategy, context, 64, directions, metadata)


@pytest.mark.parametrize(("strategy", "cp_ring", "cp_ulysses"), [("ring", 4, 1), ("usp", 2, 2)])
def test_forward_alone_sends_its_part(strategy, cp_ring, cp_ulysses):
    mesh = farspan.make_mesh(cp_ring=cp_ring, cp_ulysses=cp_ulysses)
    context = farspan.ContextParallel(mesh, strategy, "zigzag")
    compiled = compile_pass(context, 64, gradients=False)
    assert collectives(compiled.as_text()) == expected(
        strategy, context, 64, ("forward",), ("segment_ids",)
    )


def test_a_rings_memory_does_not_grow_with_its_degree():
    """At fixed local length, forward and backward: no stack of visiting keys or partial outputs."""
    local = 256
    sizes = []
    for degree in (2, 4, 8):
        context = farspan.ContextParallel(farspan.make_mesh(cp_ring=degree), "ring", "zigzag")
        compiled = compile_pass(context, local * degree, gradients=True)
        sizes.append(compiled.memory_analysis().temp_size_in_bytes)
        shapes = {dims for found in instructions(compiled.as_text()) for _, dims in found.shapes}
        whole = [s for s in shapes if local * degree in s and len(s) > 2]
        assert not whole, whole
    assert sizes[0] <= sizes[1] == sizes[2], sizes  # two devices have no visiting keys to pass on


@pytest.mark.parametrize("strategy", ["all_gather", "ulysses", "ring", "usp"])
def test_backward_keeps_no_more_than_forwards_shards(strategy):
    """What is saved between the passes is q, k, v, out and lse of this device, and no gather."""
    context = farspan.ContextParallel(
        farspan.make_mesh(cp_ring=2, cp_ulysses=2), strategy, "zigzag"
    )
    q = jnp.zeros((1, 64, HEADS, DIM))
    k = jnp.zeros((1, 64, KV_HEADS, DIM))

    def loss(q, k, v):
        return farspan.attention(q, k, v, mask=farspan.Causal(), context=context).sum()

    from jax._src.ad_checkpoint import saved_residuals

    saved = [aval.size for aval, _ in saved_residuals(loss, q, k, k)]
    assert sum(saved) <= q.size * 2 + k.size * 2 + 64 * HEADS + 8
    assert np.max(saved) <= q.size
