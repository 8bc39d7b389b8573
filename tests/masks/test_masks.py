"""A mask is one statement; dense matrix, block classes and counts must agree with it."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import farspan
from farspan.masks import Tokens, block_extents, block_map, classify, pairs_per_query, visible
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
    tokens = Tokens(jnp.asarray(index[None]), None if segment is None else segment[None])
    extents = block_extents(
        Tokens(tokens.index, None if segment is None else jnp.asarray(segment[None])), block
    )
    query = type(extents)(*(None if x is None else x[:, :, None] for x in vars(extents).values()))
    key = type(extents)(*(None if x is None else x[:, None, :] for x in vars(extents).values()))
    possible, certain = (np.asarray(x)[0] for x in classify(mask, query, key))
    dense = brute_force(mask, index, index, segment, segment)
    blocks = dense.reshape(24 // block, block, 24 // block, block)
    assert not blocks.any((1, 3))[~possible].any()
    assert blocks.all((1, 3))[certain].all()
    if block == 1:
        np.testing.assert_array_equal(possible, dense)


@pytest.mark.parametrize("mask", [farspan.Causal(), farspan.SlidingWindow(64, 0)], ids=str)
def test_blocks_off_the_diagonal_are_told_apart_exactly(mask):
    tokens = Tokens(jnp.arange(256)[None])
    extents = block_extents(tokens, 32)
    query = type(extents)(extents.index_min[:, :, None], extents.index_max[:, :, None])
    key = type(extents)(extents.index_min[:, None], extents.index_max[:, None])
    possible, certain = classify(mask, query, key)
    counts = block_map(mask, tokens, tokens, 32, 32)
    np.testing.assert_array_equal(possible, counts > 0)
    np.testing.assert_array_equal(certain, counts == 32 * 32)


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
    with pytest.raises(ValueError, match=r"must be in 0\.\.2\*\*30 - 1 or None"):
        farspan.SlidingWindow(*bounds)


def test_masks_are_values():
    mask = farspan.Causal() & farspan.SlidingWindow(3, 0)
    assert mask == farspan.Causal() & farspan.SlidingWindow(3, 0)
    assert hash(mask) == hash(farspan.Causal() & farspan.SlidingWindow(3, 0))
    assert mask != farspan.Causal() | farspan.SlidingWindow(3, 0)
