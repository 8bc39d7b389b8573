"""Which shards need whose keys, against the dense mask; and the fewest hops, against all pairs."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import farspan
from farspan.layouts import get_layout
from farspan.masks import Causal, Chunked, Full, KeyRanges, PrefixLM, SlidingWindow, Tokens, visible
from farspan.schedules.hops import Hops, hops_needed, needed_shards

MASKS = [
    Full(),
    Causal(),
    SlidingWindow(3, 0),
    SlidingWindow(0, None),
    SlidingWindow(1, 4),
    Causal() & Chunked(8),
    PrefixLM(5),
    KeyRanges(2),
    Causal() & KeyRanges(2),
    KeyRanges(1) | SlidingWindow(1, 1),
]


def dense_needs(mask, order, num_shards, segment_ids, key_ranges):
    index = np.arange(len(order), dtype=np.int32)[None]
    segment = None if segment_ids is None else segment_ids[None]
    ranges = None if key_ranges is None else key_ranges[None]
    dense = np.asarray(visible(mask, Tokens(index, segment, ranges), Tokens(index, segment)))
    dense = np.broadcast_to(dense, (1, len(order), len(order)))[0][order][:, order]
    return dense.reshape(num_shards, -1, num_shards, len(order) // num_shards).any((1, 3))


def random_documents(draw, seq_len, cuts):
    places = np.sort(draw.integers(0, seq_len + 1, cuts))
    first = draw.integers(0, 2)  # the first is padding, or none is
    return (np.searchsorted(places, np.arange(seq_len), "right") + first).astype(np.int32)


@settings(max_examples=150)
@given(
    mask=st.sampled_from(MASKS),
    layout=st.sampled_from(["contiguous", "striped", "random"]),
    num_shards=st.integers(1, 9),
    shard_tokens=st.integers(1, 30),
    cuts=st.none() | st.integers(0, 6),
    seed=st.integers(0, 2**31),
)
def test_needed_shards_are_those_of_the_dense_mask(
    mask, layout, num_shards, shard_tokens, cuts, seed
):
    draw = np.random.default_rng(seed)
    seq_len = num_shards * shard_tokens
    documents = None if cuts is None else random_documents(draw, seq_len, cuts)
    ranges = np.sort(draw.integers(0, seq_len + 1, (seq_len, 2, 2)), -1).astype(np.int32)
    if layout == "random":
        order = draw.permutation(seq_len).astype(np.int32)
    else:
        order = get_layout(layout).permutation(seq_len, num_shards)
    found = needed_shards(mask, order, num_shards, documents, ranges)
    expected = dense_needs(mask, order, num_shards, documents, ranges)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("layout", ["zigzag", "striped"])
@pytest.mark.parametrize("mask", [Causal(), SlidingWindow(40, 0), SlidingWindow(300, 20)], ids=str)
def test_long_ranges_are_exact_too(mask, layout):
    """Rows of many runs, so that whole blocks of runs are covered."""
    order = get_layout(layout).permutation(1024, 64)
    documents = np.repeat([1, 2, 0, 3], [500, 17, 100, 407]).astype(np.int32)
    found = needed_shards(mask, order, 64, documents)
    np.testing.assert_array_equal(found, dense_needs(mask, order, 64, documents, None))


def test_padding_needs_nothing():
    order = np.arange(16, dtype=np.int32)
    needs = needed_shards(Full(), order, 4, np.zeros(16, np.int32))
    assert not needs.any()
    assert hops_needed(needs) == Hops(0, 0)


def served(needs, before, after):
    query, key = np.nonzero(needs)
    distance = (query - key) % len(needs)
    backwards = (key - query) % len(needs)
    return bool(((distance <= before) | (backwards <= after)).all())


@given(num_shards=st.integers(1, 8), density=st.floats(0, 1), seed=st.integers(0, 2**31))
def test_no_pair_of_hops_serves_with_less(num_shards, density, seed):
    draw = np.random.default_rng(seed)
    needs = draw.random((num_shards, num_shards)) < density * draw.random()
    found = hops_needed(needs)
    assert found.before + found.after <= num_shards - 1
    every = [(b + a, a, b) for b in range(num_shards) for a in range(num_shards)]
    assert (found.before + found.after, found.after, found.before) == min(
        pair for pair in every if served(needs, pair[2], pair[1])
    )


def test_hops_of_known_layouts():
    def hops(layout, mask):
        return hops_needed(needed_shards(mask, get_layout(layout).permutation(512, 8), 8))

    assert hops("contiguous", farspan.Causal()) == (7, 0)
    assert hops("contiguous", SlidingWindow(63, 0)) == (1, 0)
    assert hops("contiguous", SlidingWindow(64, 0)) == (1, 0)
    assert hops("contiguous", SlidingWindow(65, 0)) == (2, 0)
    assert hops("contiguous", SlidingWindow(10, 10)) == (1, 1)
    assert hops("zigzag", SlidingWindow(10, 0)) == (1, 1)
    assert hops("striped", SlidingWindow(2, 0)) == (2, 0)
