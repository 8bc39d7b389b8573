"""The compiled program sends exactly what `farspan.schedules` says, and keeps no more than that."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import farspan
from farspan import schedules
from farspan.plan.hlo import collectives, instructions
from farspan.testing.compiled import AttentionLayer as Layer
from farspan.testing.compiled import compile_attention, expected_collectives

CAUSAL = farspan.Causal()
WINDOW = farspan.Causal() & farspan.SlidingWindow(11, 0)


def compile_pass(context, layer, *, gradients):
    """Compiles the layer with blocks that are smaller than its few tokens."""
    kernel = farspan.XlaKernel(rows=64, key_block=16)
    return compile_attention(context, layer, gradients=gradients, kernel=kernel)


def split(strategy, ring, ulysses, *, outer=1, layout="zigzag", **options):
    mesh = farspan.make_mesh(cp_ring_outer=outer, cp_ring=ring, cp_ulysses=ulysses)
    return farspan.ContextParallel(mesh, strategy, layout, **options)


MESHES = [
    ("all_gather", 8, 1), ("all_gather", 2, 2), ("ring", 8, 1), ("ring", 4, 2), ("ring", 2, 1),
    ("ulysses", 1, 8), ("ulysses", 1, 2), ("usp", 4, 2), ("usp", 2, 4), ("usp", 2, 2),
]  # fmt: skip
WHOLE = [mesh for mesh in MESHES if mesh[1] * mesh[2] == 8]
PLAIN = [(mesh, {}, Layer()) for mesh in MESHES]
PLAIN += [(mesh, {}, Layer(metadata=())) for mesh in WHOLE]
PLAIN += [(mesh, {}, Layer(metadata=("segment_ids", "positions"))) for mesh in WHOLE]
MULTI_HEAD = Layer(num_kv_heads=8)
LATENT = Layer(latent=(12, 4))
GIVEN = Layer(mask=CAUSAL | farspan.KeyRanges(2))
SPECIAL = [
    # queries travel in backward, where that is fewer bytes
    (("ring", 4, 1), {}, MULTI_HEAD), (("usp", 4, 2), {}, MULTI_HEAD),
    (("ring", 4, 1), {}, dataclasses.replace(GIVEN, num_kv_heads=8)),
    (("usp", 2, 2), {}, GIVEN),
    # a latent travels in place of keys and values
    (("ring", 8, 1), {}, LATENT), (("all_gather", 4, 1), {}, LATENT),
    (("ulysses", 1, 4), {}, LATENT), (("usp", 2, 2), {}, LATENT),
    # the gradient of sinks is summed over devices, beside that of a latent's matrices
    (("ring", 4, 1), {}, Layer(sinks=True)),
    (("ulysses", 1, 4), {}, Layer(latent=(12, 4), sinks=True)),
    # groups of heads share one latent: nothing more is sent
    (("all_gather", 4, 1), {"head_groups": 4}, LATENT), (("usp", 2, 2), {"head_groups": 2}, LATENT),
    # heads are cut into groups
    (("all_gather", 4, 1), {"head_groups": 2}, Layer()),
    (("ulysses", 1, 2), {"head_groups": 4}, MULTI_HEAD),
    (("ulysses", 1, 4), {"head_groups": 2}, Layer()),
    # a ring of rings
    (("ring", 4, 1), {"outer": 2}, Layer()), (("usp", 2, 2), {"outer": 2}, Layer()),
    (("ring", 2, 1), {"outer": 4}, MULTI_HEAD), (("ring", 2, 1), {"outer": 2}, LATENT),
    # parts of a visitor go round different rings
    (("ring", 8, 1), {"ring_streams": 4}, Layer()),
    (("usp", 4, 2), {"ring_streams": 2}, MULTI_HEAD),
    (("ring", 4, 1), {"ring_streams": 2}, dataclasses.replace(GIVEN, num_kv_heads=8)),
    (("ring", 4, 1), {"outer": 2, "ring_streams": 2}, LATENT),
    # a window: only the edges of neighbours, or only the hops that it reaches
    (("halo", 8, 1), {}, Layer(WINDOW)), (("halo", 4, 1), {"layout": "contiguous"}, Layer(WINDOW)),
    (("halo", 4, 2), {}, Layer(WINDOW, latent=(12, 4))),
    (("halo", 4, 1), {}, Layer(farspan.SlidingWindow(20, 3), metadata=())),
    (("ring", 8, 1), {}, Layer(WINDOW)), (("ring", 8, 1), {"layout": "contiguous"}, Layer(WINDOW)),
    (("usp", 4, 2), {"layout": "contiguous"}, Layer(farspan.SlidingWindow(20, 3))),
    (("ring", 4, 1), {"outer": 2, "layout": "contiguous"}, Layer(WINDOW)),
]  # fmt: skip


@pytest.mark.parametrize(("mesh", "options", "layer"), PLAIN + SPECIAL)
def test_counts_and_bytes_equal_the_formulas(mesh, options, layer):
    context = split(*mesh, **options)
    compiled = compile_pass(context, layer, gradients=True)
    assert collectives(compiled.as_text()) == expected_collectives(
        context, layer, ("forward", "backward")
    )


@pytest.mark.parametrize("mesh", [("ring", 4, 1), ("usp", 2, 2)])
def test_forward_alone_sends_its_part(mesh):
    compiled = compile_pass(split(*mesh), Layer(), gradients=False)
    assert collectives(compiled.as_text()) == expected_collectives(
        split(*mesh), Layer(), ("forward",)
    )


def test_a_rings_memory_does_not_grow_with_its_degree():
    """At fixed local length, forward and backward: no stack of visiting keys or partial outputs."""
    local = 256
    sizes = []
    for degree in (2, 4, 8):
        context = farspan.ContextParallel(farspan.make_mesh(cp_ring=degree), "ring", "zigzag")
        layer = Layer(seq_len=local * degree)
        compiled = compile_pass(context, layer, gradients=True)
        sizes.append(compiled.memory_analysis().temp_size_in_bytes)
        shapes = {dims for found in instructions(compiled.as_text()) for _, dims in found.shapes}
        whole = [s for s in shapes if local * degree in s and len(s) > 2]
        assert not whole, whole
    assert sizes[0] <= sizes[1], sizes  # two devices have no visiting keys to pass on
    assert abs(sizes[1] - sizes[2]) < 1024, sizes  # beside loop counters


@pytest.mark.parametrize("strategy", ["all_gather", "ulysses", "ring", "usp"])
def test_backward_keeps_no_more_than_forwards_shards(strategy):
    """What is saved between the passes is q, k, v, out and lse of this device, and no gather."""
    context = farspan.ContextParallel(
        farspan.make_mesh(cp_ring=2, cp_ulysses=2), strategy, "zigzag"
    )
    q = jnp.zeros((1, 64, 8, 16))
    k = jnp.zeros((1, 64, 2, 16))

    def loss(q, k, v):
        return farspan.attention(q, k, v, mask=farspan.Causal(), context=context).sum()

    from jax._src.ad_checkpoint import saved_residuals

    saved = [aval.size for aval, _ in saved_residuals(loss, q, k, k)]
    assert sum(saved) <= q.size * 2 + k.size * 2 + 64 * 8 + 8
    assert np.max(saved) <= q.size


@pytest.mark.parametrize("mesh", [("all_gather", 4, 1), ("ring", 4, 1)])
def test_a_latent_is_expanded_for_one_group_of_heads_at_a_time(mesh):
    layer = Layer(
        seq_len=1024, num_heads=32, batch=1, latent=(12, 4), value_dim=16, metadata=()
    )  # fmt: skip
    needed = [
        compile_pass(split(*mesh, head_groups=groups), layer, gradients=True)
        .memory_analysis()
        .temp_size_in_bytes
        for groups in (1, 8)
    ]
    at_once = layer.seq_len // (4 if mesh[0] == "ring" else 1)
    expanded = at_once * layer.num_heads * (layer.head_dim + layer.value_dim) * 4
    assert needed[0] - needed[1] > expanded


@pytest.mark.parametrize("mesh", [("all_gather", 4, 1), ("ulysses", 1, 4)])
def test_two_groups_of_heads_are_held_and_not_all(mesh):
    """Memory falls with the number of groups; the bytes that are sent do not change."""
    layer = Layer(seq_len=1024, num_heads=32, num_kv_heads=16, metadata=(), batch=1)
    compiled = {
        groups: compile_pass(split(*mesh, head_groups=groups), layer, gradients=False)
        for groups in (1, 4)
    }
    shape = layer.shape()
    held = {
        groups: schedules.held_key_bytes(
            mesh[0], split(*mesh).degrees, shape, schedules.Options(head_groups=groups)
        )
        for groups in compiled
    }
    saved = held[1] - held[4]
    temporaries = {n: c.memory_analysis().temp_size_in_bytes for n, c in compiled.items()}
    assert saved > 0
    assert temporaries[1] - temporaries[4] >= saved
