"""The balanced order: equal tokens, near equal work, few hops."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farspan.layouts import get_layout
from farspan.masks import (
    Causal,
    Chunked,
    Full,
    KeyRanges,
    PrefixLM,
    SlidingWindow,
    pairs_per_query,
    prefix_key_ranges,
)
from farspan.schedules.balance import balanced_order, imbalance
from farspan.schedules.hops import hops_needed, needed_shards

WINDOW_AND_GLOBAL = {Causal(): 4.0, SlidingWindow(15, 0): 20.0}
LOCAL_TOKENS = 512


def lognormal(seq_len, seed):
    draw = np.random.default_rng(seed)
    lengths = np.maximum(1, LOCAL_TOKENS / 2 * np.exp(draw.standard_normal(seq_len // 8)))
    documents = np.repeat(np.arange(1, len(lengths) + 1), lengths.astype(int))
    assert len(documents) >= seq_len
    return documents[:seq_len].astype(np.int32)


def short_and_long(seq_len):
    documents = np.arange(seq_len, dtype=np.int32) // 64 + 1
    documents[seq_len // 2 :] = documents[-1]
    return documents


LAWS = {
    "one document": lambda _: (Causal(), None),
    "lognormal 0": lambda seq_len: (Causal(), lognormal(seq_len, 0)),
    "lognormal 1": lambda seq_len: (Causal(), lognormal(seq_len, 1)),
    "short and long": lambda seq_len: (Causal(), short_and_long(seq_len)),
    "window": lambda _: (SlidingWindow(127, 0), None),
    "prefix": lambda seq_len: (PrefixLM(seq_len // 4), None),
    "both ways": lambda seq_len: (Full(), lognormal(seq_len, 2)),
}


def total_hops(mask, order, num_shards, segment_ids=None):
    return sum(hops_needed(needed_shards(mask, order, num_shards, segment_ids)))


@pytest.mark.parametrize("num_shards", [2, 8, 24])
@pytest.mark.parametrize("law", LAWS)
def test_work_is_balanced_within_the_tolerance(law, num_shards):
    seq_len = num_shards * LOCAL_TOKENS
    mask, documents = LAWS[law](seq_len)
    order = balanced_order(mask, seq_len, num_shards, documents)
    work = pairs_per_query(mask, seq_len, documents)
    assert imbalance(work, order, num_shards) <= 1.02
    hops = total_hops(mask, order, num_shards, documents)
    for layout in ("contiguous", "zigzag", "striped"):
        other = get_layout(layout).permutation(seq_len, num_shards)
        if imbalance(work, other, num_shards) <= 1.02:
            assert hops <= total_hops(mask, other, num_shards, documents)


@settings(max_examples=60)
@given(
    mask=st.sampled_from(
        [Causal(), Full(), SlidingWindow(3, 0), Causal() & Chunked(16), KeyRanges(1),
         {Causal(): 1.0, SlidingWindow(2, 2): 3.0}]
    ),
    num_shards=st.integers(1, 9),
    shard_tokens=st.integers(1, 70),
    cuts=st.integers(0, 9),
    granularity_tokens=st.integers(1, 40),
    seed=st.integers(0, 2**31),
)  # fmt: skip
def test_any_row_gets_an_order(mask, num_shards, shard_tokens, cuts, granularity_tokens, seed):
    draw = np.random.default_rng(seed)
    seq_len = num_shards * shard_tokens
    places = np.sort(draw.integers(0, seq_len + 1, cuts))
    documents = np.searchsorted(places, np.arange(seq_len), "right").astype(np.int32)  # 0: padding
    ranges = np.sort(draw.integers(0, seq_len + 1, (seq_len, 1, 2)), -1).astype(np.int32)
    order, again = (
        balanced_order(
            mask, seq_len, num_shards, documents, ranges, granularity_tokens=granularity_tokens
        )
        for _ in range(2)
    )
    assert order.dtype == np.int32
    np.testing.assert_array_equal(order, again)
    np.testing.assert_array_equal(np.sort(order), np.arange(seq_len))
    assert (np.diff(order.reshape(num_shards, -1), axis=1) > 0).all(), "slots sorted by place"


def test_documents_that_unbalance_every_fixed_layout():
    documents = np.repeat([1, 2], [4, 12]).astype(np.int32)
    work = pairs_per_query(Causal(), 16, documents)
    order = balanced_order(Causal(), 16, 2, documents)
    assert work[order].reshape(2, 8).sum(1).tolist() == [44, 44]


def test_what_is_balanced_already_stays_in_the_order_of_the_text():
    documents = np.repeat(np.arange(1, 17), 256).astype(np.int32)
    order = balanced_order(Causal(), 4096, 8, documents)
    np.testing.assert_array_equal(order, np.arange(4096))


def test_documents_stay_near_home():
    """Documents of unlike work are put together so that no keys need travel."""
    lengths = [256, 256, 128, 128, 128, 128] * 2 + [64] * 16 + [256] * 4
    documents = np.repeat(np.arange(1, len(lengths) + 1), lengths).astype(np.int32)
    order = balanced_order(Causal(), 4096, 4, documents, tolerance=0.05)
    assert imbalance(pairs_per_query(Causal(), 4096, documents), order, 4) <= 1.05
    assert total_hops(Causal(), order, 4, documents) <= 1


def test_one_order_serves_masks_together():
    order = balanced_order(WINDOW_AND_GLOBAL, 4096, 8)
    work = sum(weight * pairs_per_query(mask, 4096) for mask, weight in WINDOW_AND_GLOBAL.items())
    assert imbalance(work, order, 8) <= 1.02
    # The layers with a window keep their few hops.
    assert total_hops(SlidingWindow(15, 0), order, 8) <= 2


def test_ranges_of_the_batch_count_as_work():
    documents = np.repeat([1, 2, 3], [1000, 600, 448]).astype(np.int32)
    in_prefix = np.concatenate([np.arange(n) < n // 2 for n in (1000, 600, 448)])
    ranges = prefix_key_ranges(documents[None], in_prefix[None])[0]
    mask = Causal() | KeyRanges(1)
    order = balanced_order(mask, 2048, 4, documents, ranges)
    work = pairs_per_query(mask, 2048, documents, ranges)
    assert imbalance(work, order, 4) <= 1.02
    assert imbalance(work, np.arange(2048, dtype=np.int32), 4) > 1.02


def test_no_work_is_balanced():
    documents = np.zeros(64, np.int32)
    order = balanced_order(Causal(), 64, 4, documents)
    np.testing.assert_array_equal(order, np.arange(64))
    assert imbalance(pairs_per_query(Causal(), 64, documents), order, 4) == 1.0


def test_refusals_give_rule_values_and_remedy():
    with pytest.raises(ValueError, match=r"multiple of num_shards, got seq_len=30.*pad to 32"):
        balanced_order(Causal(), 30, 4)
    with pytest.raises(ValueError, match=r"weights above 0, got \{\}"):
        balanced_order({}, 32, 4)
    with pytest.raises(ValueError, match="granularity_tokens=0"):
        balanced_order(Causal(), 32, 4, granularity_tokens=0)
