"""A mask is one statement; dense matrix, block classes and counts must agree with it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import farspan
from farspan.masks import (
    Tokens,
    block_map,
    classify,
    key_extents,
    pairs_per_query,
    query_extents,
    visible,
)
from farspan.masks import visible_pairs as count_pairs

PREDICATES = {
    farspan.Full(): lambda *_: True,
    farspan.Causal(): lambda q, k: k <= q,
    farspan.SlidingWindow(3, 0): lambda q, k: q - 3 <= k <= q,
    farspan.SlidingWindow(2, 5): lambda q, k: q - 2 <= k <= q + 5,
    farspan.SlidingWindow(None, 1): lambda q, k: k <= q + 1,
    farspan.SlidingWindow(0, None): lambda q, k: k >= q,
    farspan.Causal() & farspan.SlidingWindow(4, 4): lambda q, k: q - 4 <= k <= q,
    farspan.Causal() & farspan.Full(): lambda q, k: k <= q,
    farspan.SlidingWindow(1, 1) | farspan.SlidingWindow(0, 7): lambda q, k: q - 1 <= k <= q + 7,
    farspan.Causal() | farspan.SlidingWindow(0, 2): lambda q, k: k <= q + 2,
    (farspan.SlidingWindow(6, 0) | farspan.SlidingWindow(0, 3)) & farspan.Causal(): (
        lambda q, k: q - 6 <= k <= q
    ),
    farspan.Chunked(5): lambda q, k: q // 5 == k // 5,
    farspan.Causal() & farspan.Chunked(4): lambda q, k: q // 4 == k // 4 and k <= q,
    farspan.BlockCausal(3): lambda q, k: k // 3 <= q // 3,
    farspan.PrefixLM(7): lambda q, k: k <= q or k < 7,
    farspan.PrefixLM(7) & farspan.SlidingWindow(3, 2): lambda q, k: (
        (k <= q or k < 7) and q - 3 <= k <= q + 2
    ),
}
MASKS = list(PREDICATES)


def brute_force(mask, query_index, key_index, query_segment=None, key_segment=None):
    seen = np.array(
        [[bool(PREDICATES[mask](int(q), int(k))) for k in key_index] for q in query_index]
    )
    if query_segment is not None:
        seen &= (query_segment[:, None] == key_segment) & (key_segment != 0)
    return seen


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("xp", [np, jnp])
def test_dense_mask_is_the_predicate(mask, xp):
    draw = np.random.default_rng(0)
    query, key = draw.permutation(20)[:12], draw.permutation(20)
    query_segment, key_segment = draw.integers(0, 3, 12), draw.integers(0, 3, 20)
    found = visible(
        mask,
        Tokens(xp.asarray(query[None]), xp.asarray(query_segment[None])),
        Tokens(xp.asarray(key[None]), xp.asarray(key_segment[None])),
    )
    expected = brute_force(mask, query, key, query_segment, key_segment)
    np.testing.assert_array_equal(np.asarray(found)[0], expected)


def classes(mask, tokens, block):
    """Which pairs of blocks are possible and which certain, `[queries, keys]`."""
    query = jax.tree.map(lambda x: x[:, :, None], query_extents(mask, tokens, block))
    key = jax.tree.map(lambda x: x[:, None, :], key_extents(tokens, block))
    return tuple(np.asarray(x)[0] for x in classify(query, key))


@given(
    mask=st.sampled_from(MASKS),
    seed=st.integers(0, 2**31),
    block=st.sampled_from([1, 2, 4]),
    segments=st.integers(0, 4),
    permute=st.booleans(),
)
def test_classification_never_lies(mask, seed, block, segments, permute):
    """A block called empty has no visible pair; one called full has no hidden pair."""
    draw = np.random.default_rng(seed)
    index = draw.permutation(24) if permute else np.arange(24)
    segment = np.sort(draw.integers(0, segments + 1, 24))[index] if segments else None
    tokens = Tokens(
        jnp.asarray(index[None]), None if segment is None else jnp.asarray(segment[None])
    )
    possible, certain = classes(mask, tokens, block)
    dense = brute_force(mask, index, index, segment, segment)
    blocks = dense.reshape(24 // block, block, 24 // block, block)
    assert not blocks.any((1, 3))[~possible].any()
    assert blocks.all((1, 3))[certain].all()
    if block == 1:
        np.testing.assert_array_equal(possible, dense)


@pytest.mark.parametrize("mask", [farspan.Causal(), farspan.SlidingWindow(64, 0)], ids=str)
def test_blocks_off_the_diagonal_are_told_apart_exactly(mask):
    tokens = Tokens(jnp.arange(256)[None])
    possible, certain = classes(mask, tokens, 32)
    counts = block_map(mask, tokens, tokens, 32, 32)
    np.testing.assert_array_equal(possible, counts[0] > 0)
    np.testing.assert_array_equal(certain, counts[0] == 32 * 32)


@given(mask=st.sampled_from(MASKS), lengths=st.lists(st.integers(1, 9), max_size=5))
def test_pairs_are_counted_exactly(mask, lengths):
    segment = np.repeat(np.arange(1, len(lengths) + 1), lengths)
    segment = np.concatenate([segment, np.zeros(3, int)]).astype(np.int32)
    index = np.arange(len(segment))
    dense = brute_force(mask, index, index, segment, segment)
    np.testing.assert_array_equal(pairs_per_query(mask, len(index), segment), dense.sum(1))
    alone = brute_force(mask, index, index)
    assert count_pairs(mask, len(index)) == alone.sum()


@pytest.mark.smoke
def test_published_pair_counts():
    documents = np.repeat(np.arange(1, 9, dtype=np.int32), 512)
    assert count_pairs(farspan.Causal(), 4096) == 8_390_656
    assert count_pairs(farspan.Causal(), 4096, documents) == 1_050_624
    assert count_pairs(farspan.SlidingWindow(511, 0), 4096) == 1_966_336
    assert count_pairs(farspan.Full(), 4096) == 16_777_216


def test_counts_reach_past_int32():
    length = 2**22
    assert count_pairs(farspan.Causal(), length) == length * (length + 1) // 2


def test_a_document_that_comes_back_is_refused():
    with pytest.raises(ValueError, match="neighbours in the order of the text"):
        count_pairs(farspan.Causal(), 3, np.array([1, 2, 1], np.int32))


@pytest.mark.parametrize("bounds", [(-1, 0), (0, -2), (2**30, 0)])
def test_window_bounds_are_checked(bounds):
    with pytest.raises(ValueError, match=r"SlidingWindow: \w+, if not None.* in 0\.\.2\*\*30 - 1"):
        farspan.SlidingWindow(*bounds)


def test_masks_are_values():
    mask = farspan.Causal() & farspan.SlidingWindow(3, 0)
    assert mask == farspan.Causal() & farspan.SlidingWindow(3, 0)
    assert hash(mask) == hash(farspan.Causal() & farspan.SlidingWindow(3, 0))
    assert mask != farspan.Causal() | farspan.SlidingWindow(3, 0)


@pytest.mark.parametrize(
    "make",
    [
        lambda: farspan.Chunked(0),
        lambda: farspan.BlockCausal(0),
        lambda: farspan.PrefixLM(-1),
        lambda: farspan.KeyRanges(0),
        lambda: farspan.KeyRanges(2, 2),
    ],
)
def test_sizes_are_checked(make):
    with pytest.raises(ValueError, match=r"must (be in \d\.\.2\*\*30|read at least one)"):
        make()


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_reach_bounds_what_is_seen(mask):
    index = np.arange(30)
    query, key = np.nonzero(brute_force(mask, index, index))
    left, right = mask.reach()
    assert left is None or (query - key).max() <= left
    assert right is None or (key - query).max() <= right


def test_reach_of_windows():
    window = farspan.SlidingWindow(9, 3)
    assert (farspan.Causal() & window).reach() == (9, 0)
    assert (farspan.Causal() | window).reach() == (None, 3)
    assert (farspan.Chunked(4) | window).reach() == (9, 3)
    assert (farspan.Chunked(20) & farspan.Causal()).reach() == (19, 0)
    assert farspan.KeyRanges(1).reach() == (None, None)


def given_tokens(ids, ranges):
    return Tokens(np.arange(ids.shape[1])[None], ids, ranges), Tokens(
        np.arange(ids.shape[1])[None], ids
    )


def test_ranges_of_a_prefix_in_each_document():
    ids = np.array([[1] * 5 + [2] * 4 + [0] * 2, [1] * 11], np.int32)
    inside = np.zeros((2, 11), bool)
    inside[0, [0, 1, 2, 5]] = True  # three tokens of the first document, one of the second
    inside[1, [0, 3]] = True  # a later token outside the first run does not count
    ranges = farspan.prefix_key_ranges(ids, inside)
    mask = farspan.Causal() | farspan.KeyRanges(1)
    seen = np.asarray(visible(mask, *given_tokens(ids, ranges)))
    prefix = {(0, 1): range(3), (0, 2): range(5, 6), (1, 1): range(1)}
    for row, q, k in np.ndindex(2, 11, 11):
        same = ids[row, q] == ids[row, k] != 0
        expected = same and (k <= q or k in prefix[row, ids[row, q]])
        assert seen[row, q, k] == expected, (row, q, k)


def test_ranges_of_a_shared_prefix():
    """A prompt and three answers; then a document of its own, and padding."""
    ids = np.array([[1] * 4 + [2] * 3 + [3] * 2 + [4] * 3 + [5] * 2 + [0]], np.int32)
    prefix = np.where(np.isin(ids, (2, 3, 4)), 1, 0).astype(np.int32)
    joined, ranges = farspan.shared_prefix_key_ranges(ids, prefix)
    mask = farspan.Causal() & farspan.KeyRanges(2)
    seen = np.asarray(visible(mask, *given_tokens(joined, ranges)))[0]
    for q, k in np.ndindex(15, 15):
        expected = k <= q and ids[0, k] != 0 and ids[0, k] in (ids[0, q], prefix[0, q])
        assert seen[q, k] == expected, (q, k)
    counted = pairs_per_query(mask, 15, joined[0], ranges[0])
    np.testing.assert_array_equal(counted, seen.sum(1))


@pytest.mark.parametrize("prefix", [[0, 0, 2, 2], [2, 2, 0, 0], [0, 1, 1, 1]])
def test_a_prefix_must_come_first_and_stand_alone(prefix):
    ids = np.array([[1, 1, 2, 2]], np.int32)
    with pytest.raises(ValueError, match="prefix"):
        farspan.shared_prefix_key_ranges(ids, np.array([prefix], np.int32))


@given(seed=st.integers(0, 2**31), block=st.sampled_from([1, 2, 4]))
def test_classification_by_given_ranges_never_lies(seed, block):
    draw = np.random.default_rng(seed)
    index = draw.permutation(24)[None]
    ranges = draw.integers(0, 25, (1, 24, 2, 2))
    mask = farspan.Causal() & (farspan.KeyRanges(1) | farspan.KeyRanges(2, 1))
    tokens = Tokens(jnp.asarray(index), None, jnp.asarray(ranges))
    possible, certain = classes(mask, tokens, block)
    dense = np.asarray(visible(mask, tokens, tokens))[0]
    blocks = dense.reshape(24 // block, block, 24 // block, block)
    assert not blocks.any((1, 3))[~possible].any()
    assert blocks.all((1, 3))[certain].all()
