"""Where tokens lie and how far keys travel is data: exact for every batch, compiled once."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import farspan
from farspan.plan.hlo import instructions
from farspan.testing import (
    AttentionCase,
    attention_parity,
    dense_attention,
    place_case,
    relative_error,
)

KERNEL = farspan.XlaKernel(rows=16, key_block=8)
CAUSAL = farspan.Causal()
SHORT = (8,) * 8
"""Documents that end where shards of 8 or 16 tokens do."""


def split(strategy="ring", layout="balanced", **sizes):
    mesh = farspan.make_mesh(**(sizes or {"cp_ring": 4}))
    return farspan.ContextParallel(mesh, strategy, layout)


def hops_of(case, context):
    placement = place_case(case, case.inputs(), context)
    return tuple(int(x) for x in placement.hops_of(case.mask))


HOPS = {
    "none": (SHORT, CAUSAL, "contiguous", (0, 0)),
    "one before": ((5, 23, 1, 28), CAUSAL, "contiguous", (2, 0)),
    "one each way": ((12, 8, 20, 10, 14), CAUSAL, "zigzag", (1, 1)),
    "two after": ((5, 23, 1, 28), farspan.SlidingWindow(0, None), "contiguous", (0, 2)),
    "all": ((64,), CAUSAL, "zigzag", (3, 0)),
    "window": ((64,), farspan.SlidingWindow(9, 3), "contiguous", (1, 1)),
}


@pytest.mark.parametrize("name", HOPS)
@pytest.mark.parametrize("kv_heads", [2, 8], ids=["keys travel back", "queries travel back"])
def test_a_ring_makes_the_hops_that_the_batch_needs(name, kv_heads):
    documents, mask, layout, hops = HOPS[name]
    case = AttentionCase(mask=mask, documents=documents, num_kv_heads=kv_heads, batch=1)
    context = split(layout=layout)
    assert hops_of(case, context) == hops
    for row in attention_parity(case, context, KERNEL, placed=True):
        assert row.ok, row


@pytest.mark.parametrize(
    ("strategy", "sizes"),
    [
        ("usp", {"cp_ring": 4, "cp_ulysses": 2}),
        ("ring", {"cp_ring_outer": 2, "cp_ring": 4}),
        ("usp", {"cp_ring_outer": 2, "cp_ring": 2, "cp_ulysses": 2}),
    ],
)
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_hops_in_other_rings(strategy, sizes, layout):
    case = AttentionCase(documents=(9, 3, 12, 8, 20), batch=2)
    for row in attention_parity(case, split(strategy, layout, **sizes), KERNEL, placed=True):
        assert row.ok, row


def test_hops_serve_every_row_of_the_batch():
    case = AttentionCase(documents=(40, 4, 4, 8, 4), batch=4)
    context = split(layout="contiguous")
    alone = [hops_of(dataclasses.replace(case, batch=n), context)[0] for n in (1, 2, 4)]
    assert alone == sorted(alone)
    for row in attention_parity(case, context, KERNEL, placed=True):
        assert row.ok, row


@pytest.mark.smoke
def test_twenty_packings_compile_once_and_are_exact():
    """Orders and hops change with every batch; the program does not."""
    context = split("ring", "balanced", cp_ring=8)
    draw = np.random.default_rng(0)
    q, k, v = (draw.standard_normal((1, 128, heads, 8), np.float32) for heads in (4, 2, 2))

    @jax.jit
    def run(q, k, v, ids, placement):
        return farspan.attention(
            q, k, v, mask=CAUSAL, segment_ids=ids, context=context, kernel=KERNEL,
            placement=placement,
        )  # fmt: skip

    hops = set()
    for packing in range(20):
        count = int(draw.integers(0, 24)) if packing else 31
        cuts = np.sort(draw.choice(np.arange(1, 32) * 4, count, replace=False))
        lengths = np.diff([0, *cuts, 128])
        ids = np.repeat(np.arange(1, count + 2), lengths)[None].astype(np.int32)
        placement = farspan.place_rows(context, CAUSAL, ids)
        hops.add(tuple(map(int, placement.hops_of(CAUSAL))))
        placed = farspan.shard_sequence((q, k, v, ids), context, placement)
        out = farspan.unshard_sequence(run(*placed, placement), context, placement=placement)
        expected = dense_attention(q, k, v, mask=CAUSAL, segment_ids=ids)
        assert relative_error(out, expected) < 1e-5
    assert len(hops) > 3
    assert run._cache_size() == 1


def test_masks_that_share_a_layout_have_hops_of_their_own():
    window = CAUSAL & farspan.SlidingWindow(7, 0)
    context = split("ring", "contiguous")
    ids = np.ones((1, 64), np.int32)
    placement = farspan.place_rows(context, {CAUSAL: 1, window: 5}, ids)
    assert tuple(placement.hops_of(CAUSAL)) == (3, 0)
    assert tuple(placement.hops_of(window)) == (1, 0)
    assert placement.hops_of(farspan.Full()) is None


def test_a_halo_beside_a_global_layer_on_one_layout():
    """Nothing is permuted between a layer that sees everything and one with a window."""
    window = CAUSAL & farspan.SlidingWindow(9, 0)
    everything = split("usp", "zigzag", cp_ring=4, cp_ulysses=2)
    edges = everything.with_strategy("halo")
    case = AttentionCase(documents=(20, 30))
    q, k, v = case.inputs().tokens.values()
    ids = case.segment_ids()
    placed = farspan.shard_sequence((q, k, v, ids), everything)

    @jax.jit
    def two_layers(q, k, v, ids):
        options = {"segment_ids": ids, "kernel": KERNEL}
        x = farspan.attention(q, k, v, mask=CAUSAL, context=everything, **options)
        return farspan.attention(x, k, v, mask=window, context=edges, **options)

    first = dense_attention(q, k, v, mask=CAUSAL, segment_ids=ids)
    expected = dense_attention(first, k, v, mask=window, segment_ids=ids)
    out = farspan.unshard_sequence(two_layers(*placed), everything)
    assert relative_error(out, expected) < 1e-5
    lowered = two_layers.lower(*placed).compile().as_text()
    gathered = [i for i in instructions(lowered) if i.op == "all-gather"]
    assert all(dtype == "s32" for i in gathered for dtype, _ in i.shapes), "only labels"


def test_what_does_not_fit_is_refused():
    context, case = split(), AttentionCase(documents=(20, 30))
    q, k, v = case.inputs().tokens.values()
    with pytest.raises(ValueError, match=r"solved for each batch.*farspan.place_rows"):
        farspan.shard_sequence((q, k, v, case.segment_ids()), context)
    with pytest.raises(ValueError, match=r"solved for each batch.*farspan.place_rows"):
        farspan.attention(q, k, v, mask=CAUSAL, segment_ids=case.segment_ids(), context=context)
    placement = farspan.place_rows(context, CAUSAL, case.segment_ids()[:, :32])
    with pytest.raises(
        ValueError, match=r"made for, \('balanced', 4, 32\), got \('balanced', 4, 64\)"
    ):
        farspan.shard_sequence((q, k, v, case.segment_ids()), context, placement)
    with pytest.raises(ValueError, match=r"made for, \('balanced', 4, 32\)"):
        farspan.attention(q, k, v, mask=CAUSAL, context=context, placement=placement)
    placement = farspan.place_rows(context, CAUSAL, case.segment_ids()[:1])
    with pytest.raises(ValueError, match=r"got places of \(1, 64\) for a batch of \(2, 64\)"):
        farspan.attention(q, k, v, mask=CAUSAL, context=context, placement=placement)
    zigzag = split(layout="zigzag")
    with pytest.raises(ValueError, match=r"call place_rows with this context"):
        farspan.attention(q, k, v, mask=CAUSAL, context=zigzag, placement=placement)
    with pytest.raises(ValueError, match="placement belongs to a split sequence"):
        farspan.attention(q, k, v, mask=CAUSAL, placement=placement)
    with pytest.raises(ValueError, match="as many sequence shards, got ring 8 with 8"):
        split("ring", "zigzag", cp_ring=4, cp_ulysses=2).with_strategy("halo")


def test_uneven_rows_are_padded_and_pads_cost_nothing():
    """The solver sees padding as tokens without work."""
    context = split("ring", "balanced", cp_ring=4)
    case = AttentionCase(documents=(11, 40, 6), seq_len=61)
    for row in attention_parity(case, context, KERNEL):
        assert row.ok, row
    q = jnp.ones((1, 61, 1, 4))
    ids = np.ones((1, 61), np.int32)
    placement = farspan.place_rows(context, CAUSAL, ids)
    assert placement.token_index.shape == (1, 64)
    placed, placed_ids = farspan.shard_sequence((np.asarray(q), ids), context, placement)
    restored = farspan.unshard_sequence(placed, context, 61, placement)
    np.testing.assert_array_equal(restored, q)
    assert int((placed_ids == 0).sum()) == 3
