"""Steps: keys are where they are needed. Counts of pairs: against the dense mask."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farspan import schedules
from farspan.layouts import get_layout
from farspan.masks import (
    BlockCausal,
    Causal,
    Chunked,
    Full,
    KeyRanges,
    PrefixLM,
    SlidingWindow,
    Tokens,
    pairs_per_query,
    visible,
    visible_pairs,
)
from farspan.schedules import AttentionShape, Degrees, Hops, Options
from farspan.schedules.work import (
    key_bytes_per_token,
    pairs_between,
    pairs_per_shard,
    pairs_per_step,
    steps,
)

MASKS = [
    Full(),
    Causal(),
    SlidingWindow(3, 0),
    SlidingWindow(0, None),
    Causal() & Chunked(8),
    BlockCausal(4),
    PrefixLM(5),
    SlidingWindow(2, 2) | Chunked(5),
    KeyRanges(1) | SlidingWindow(1, 1),
    Causal() & KeyRanges(2),
]
WINDOW = Causal() & SlidingWindow(20, 0)


def dense_mask(mask, seq_len, segment_ids, key_ranges):
    index = np.arange(seq_len, dtype=np.int32)[None]
    segment = None if segment_ids is None else segment_ids[None]
    query, key = Tokens(index, segment, key_ranges[None]), Tokens(index, segment)
    dense = np.asarray(visible(mask, query, key))
    return np.broadcast_to(dense, (1, seq_len, seq_len))[0]


def random_documents(draw, seq_len, cuts):
    places = np.sort(draw.integers(0, seq_len + 1, cuts))
    first = draw.integers(0, 2)  # the first is padding, or none is
    return (np.searchsorted(places, np.arange(seq_len), "right") + first).astype(np.int32)


@settings(max_examples=200)
@given(
    mask=st.sampled_from(MASKS),
    runs=st.booleans(),
    num_groups=st.integers(1, 9),
    seq_len=st.integers(1, 80),
    cuts=st.none() | st.integers(0, 6),
    seed=st.integers(0, 2**31),
)
def test_pairs_between_groups_are_those_of_the_dense_mask(
    mask, runs, num_groups, seq_len, cuts, seed
):
    draw = np.random.default_rng(seed)
    documents = None if cuts is None else random_documents(draw, seq_len, cuts)
    ranges = np.sort(draw.integers(0, seq_len + 1, (seq_len, 2, 2)), -1).astype(np.int32)
    group_of = draw.integers(0, num_groups, seq_len)
    group_of = np.sort(group_of) if runs else group_of
    found = pairs_between(mask, group_of, num_groups, documents, ranges)
    member = np.arange(num_groups)[:, None] == group_of
    dense = dense_mask(mask, seq_len, documents, ranges)
    np.testing.assert_array_equal(found, member.astype(int) @ dense @ member.T)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped", "balanced"])
def test_pairs_between_many_runs_add_up_to_the_work_of_each_shard(layout):
    seq_len, shards = 12288, 6
    documents = np.repeat([1, 2, 3, 0], [7000, 88, 5000, 200]).astype(np.int32)
    mask, layout = Causal() & SlidingWindow(999, 0) | Chunked(64), get_layout(layout)
    order = schedules.row_order(layout, mask, seq_len, shards, documents)
    shard_of = np.empty(seq_len, np.uint8)
    shard_of[order] = np.arange(seq_len) // (seq_len // shards)
    found = pairs_between(mask, shard_of, shards, documents)
    per_shard = pairs_per_shard(mask, layout, seq_len, shards, documents)
    np.testing.assert_array_equal(found.sum(1), per_shard)
    assert found.sum() == visible_pairs(mask, seq_len, documents)


def test_the_balanced_layout_is_solved_for_the_row():
    documents = np.repeat([1, 2, 0], [300, 100, 112]).astype(np.int32)
    layout = get_layout("balanced")
    order = schedules.row_order(layout, Causal(), 512, 4, documents)
    np.testing.assert_array_equal(order, schedules.balanced_order(Causal(), 512, 4, documents))
    work = pairs_per_shard(Causal(), layout, 512, 4, documents)
    assert work.sum() == pairs_per_query(Causal(), 512, documents).sum()
    assert work.max() <= 1.02 * work.mean()


RINGS = [
    (Degrees(6, 1), None),
    (Degrees(6, 1), Hops(2, 1)),
    (Degrees(6, 1), Hops(0, 3)),
    (Degrees(6, 1), Hops(0, 0)),
    (Degrees(4, 2), Hops(1, 1)),
    (Degrees(6, 1, 3), None),
    (Degrees(8, 1, 4), Hops(2, 2)),
    (Degrees(8, 2, 4), Hops(1, 0)),
    (Degrees(4, 1, 4), Hops(2, 1)),
    (Degrees(1, 1), None),
]


@pytest.mark.parametrize(("degrees", "hops"), RINGS)
def test_rings_pass_on_what_they_hold_to_where_it_is_needed(degrees, hops):
    listed = steps("usp", degrees, hops)
    assert listed[0].sources == tuple((r,) for r in range(degrees.sequence))
    met = [[step.sources[0][0] for step in listed]]
    assert len(set(met[0])) == len(met[0])
    arrived = []
    for start, step in enumerate(listed):
        for move in step.moves:
            assert move.keys in (move.sender, *step.sources[move.sender])
            needed = start + move.steps_under
            assert needed > start
            assert listed[needed].sources[move.receiver] == (move.keys,)
            arrived.append((needed, move.receiver))
    later = itertools.product(range(1, len(listed)), range(degrees.sequence))
    assert sorted(arrived) == list(later)


@pytest.mark.parametrize(("degrees", "hops"), RINGS)
def test_a_ring_reaches_all_shards_within_its_hops(degrees, hops):
    shards, inner = degrees.sequence, degrees.sequence // degrees.outer
    before, after = hops or (shards - 1, 0)
    for shard in range(shards):
        met = {step.sources[shard][0] for step in steps("ring", degrees, hops)}
        reached = {(shard - d) % shards for d in range(-after, before + 1)}
        assert reached <= met
        if degrees.outer == 1:
            assert reached == met
        else:  # whole groups
            assert len(met) % inner == 0


@pytest.mark.parametrize(("strategy", "degrees", "hops"), [
    *[("usp", degrees, hops) for degrees, hops in RINGS],
    ("all_gather", Degrees(6, 1), None),
    ("halo", Degrees(6, 1), None),
    ("halo", Degrees(4, 2), None),
    ("ulysses", Degrees(1, 4), None),
])  # fmt: skip
@pytest.mark.parametrize("labels", [{}, {"segments": True, "positions": True}])
def test_moves_are_the_bytes_that_collectives_send(strategy, degrees, hops, labels):
    labels = {"segments": True} if labels and strategy == "halo" else labels
    shard_tokens = 48
    seq_len = shard_tokens * degrees.sequence
    shape = AttentionShape(1, seq_len, 8, 2, 16, 8, 2, **labels)
    halo = None
    if strategy == "halo":
        halo = schedules.halo_transfers(
            get_layout("zigzag"), degrees.sequence, shard_tokens, WINDOW
        )
    options = Options(hops, 1, tuple(part.tokens for part in halo or ()))
    sent = np.zeros(degrees.sequence, int)
    for step in steps(strategy, degrees, hops, halo):
        for move in step.moves:
            tokens = shard_tokens if move.tokens is None else move.tokens
            sent[move.sender] += tokens * key_bytes_per_token(degrees, shape)
    expected = sum(
        found.sent_bytes
        for found in schedules.collectives(strategy, degrees, shape, "forward", options)
        if found.op == "collective-permute" or strategy == "all_gather"
    )
    if strategy == "halo":  # shards at the ends of the text send less
        assert sent.max() <= expected
        assert sent.sum() > 0.5 * expected * degrees.sequence
    else:
        assert set(sent.tolist()) == {expected}


@settings(max_examples=60)
@given(
    strategy=st.sampled_from(["ring", "usp", "all_gather", "halo", "ulysses"]),
    layout=st.sampled_from(["contiguous", "zigzag"]),
    outer=st.sampled_from([1, 2]),
    cuts=st.integers(0, 6),
    seed=st.integers(0, 2**31),
)
def test_steps_compute_every_visible_pair(strategy, layout, outer, cuts, seed):
    seq_len, layout = 96, get_layout(layout)
    split = schedules.degrees(strategy, 4 // outer, 2, outer)
    shards = split.sequence
    documents = random_documents(np.random.default_rng(seed), seq_len, cuts)
    order = layout.permutation(seq_len, shards)
    shard_of = np.empty(seq_len, int)
    shard_of[order] = np.arange(seq_len) // (seq_len // shards)
    between = pairs_between(WINDOW, shard_of, shards, documents)
    needs = schedules.needed_shards(WINDOW, order, shards, documents)
    np.testing.assert_array_equal(needs, between > 0)
    halo = None
    if strategy == "halo":
        halo = schedules.halo_transfers(layout, shards, seq_len // shards, WINDOW)
    listed = steps(strategy, split, schedules.hops_needed(needs), halo)
    work = pairs_per_step(listed, between)
    assert work.shape == (shards, len(listed))
    np.testing.assert_array_equal(work.sum(1), between.sum(1))
