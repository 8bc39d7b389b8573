"""Layouts: every token lies in exactly one slot, and comes back to its place."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farspan.layouts import LAYOUTS, get_layout

NAMES = sorted(set(LAYOUTS) - {"balanced"})
"""Layouts whose order does not depend on the batch."""


def test_zigzag_pairs_an_early_with_a_late_chunk():
    order = get_layout("zigzag").permutation(8, 2)
    np.testing.assert_array_equal(order, [0, 1, 6, 7, 2, 3, 4, 5])


def test_striped_deals_tokens_round():
    order = get_layout("striped").permutation(8, 2)
    np.testing.assert_array_equal(order, [0, 2, 4, 6, 1, 3, 5, 7])


@given(name=st.sampled_from(NAMES), shards=st.integers(1, 9), pieces=st.integers(1, 5))
def test_every_token_lies_in_one_slot(name, shards, pieces):
    layout = get_layout(name)
    seq_len = layout.multiple(shards) * pieces
    order = layout.permutation(seq_len, shards)
    np.testing.assert_array_equal(np.sort(order), np.arange(seq_len))


@pytest.mark.parametrize("name", NAMES)
def test_one_shard_keeps_the_order_of_the_text(name):
    np.testing.assert_array_equal(get_layout(name).permutation(12, 1), np.arange(12))


def test_too_short_for_zigzag_names_the_rule_and_the_remedy():
    with pytest.raises(ValueError, match=r"multiple of 2 \* 4 shards = 8, got seq_len=4; pad to 8"):
        get_layout("zigzag").permutation(4, 4)


@pytest.mark.parametrize("name", NAMES)
def test_lengths_that_do_not_divide_are_refused(name):
    with pytest.raises(ValueError, match="must be a positive multiple of"):
        get_layout(name).permutation(2999, 4)


def test_unknown_layout_names_the_nearest():
    with pytest.raises(ValueError, match='did you mean "zigzag"'):
        get_layout("zigzga")


def test_an_order_that_depends_on_the_batch_is_not_made_up():
    with pytest.raises(
        ValueError, match=r"solved for each batch.*place_rows.*or use layout zigzag"
    ):
        get_layout("balanced").permutation(16, 2)


@pytest.mark.parametrize("name", NAMES)
def test_runs_are_neighbours(name):
    """Shards are made of the runs that the layout names, in slot order."""
    layout, shards = get_layout(name), 4
    runs = layout.runs(shards)
    order = layout.permutation(48, shards).reshape(shards, -1)
    if runs is None:
        assert (np.diff(order, axis=1) != 1).all()
        return
    length = 48 // sum(map(len, runs))
    for own, tokens in zip(runs, order, strict=True):
        expected = [np.arange(run * length, (run + 1) * length) for run in own]
        np.testing.assert_array_equal(tokens, np.concatenate(expected))
