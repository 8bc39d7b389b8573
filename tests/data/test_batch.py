"""Labels, segments and positions of every slot, and the check of ids."""

import dataclasses
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farspan.data import Packing, Piece, build_batch, pack, validate_ids
from farspan.types import IGNORE_LABEL, PAD_SEGMENT_ID

X = IGNORE_LABEL
METHODS = st.sampled_from(get_args(Packing))


def ids(*values):
    return np.array(values, np.int32)


def batch_of(documents, seq_len, method="best_fit"):
    rows, report = pack([len(d) for d in documents], seq_len, method=method)
    return build_batch(rows, documents, seq_len), report


def test_packed_row_by_hand():
    batch, _ = batch_of([ids(10, 11, 12), ids(20), ids(30, 31)], 8)
    assert batch.tokens.tolist() == [[10, 11, 12, 20, 30, 31, 0, 0]]
    assert batch.labels.tolist() == [[11, 12, X, X, 31, X, X, X]]
    assert batch.segment_ids.tolist() == [[1, 1, 1, 2, 3, 3, 0, 0]]
    assert batch.positions.tolist() == [[0, 1, 2, 0, 0, 1, 0, 0]]


def test_split_document_is_supervised_across_the_cut():
    batch, _ = batch_of([np.arange(10, dtype=np.int32)], 4)
    assert batch.tokens.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 0]]
    assert batch.labels.tolist() == [[1, 2, 3, 4], [5, 6, 7, 8], [9, X, X, X]]
    assert batch.positions.tolist() == [[0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 0, 0]]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=20), st.integers(1, 30), METHODS)
def test_every_token_but_a_documents_first_is_predicted_once(lengths, seq_len, method):
    starts = np.cumsum([0, *lengths])
    documents = [
        np.arange(start, start + length, dtype=np.int32)
        for start, length in zip(starts, lengths, strict=False)
    ]
    batch, report = batch_of(documents, seq_len, method)
    assert [a.dtype for a in dataclasses.astuple(batch)] == [np.int32] * 4
    assert {a.shape for a in dataclasses.astuple(batch)} == {(report.rows, seq_len)}
    real = batch.segment_ids != PAD_SEGMENT_ID
    assert sorted(batch.tokens[real].tolist()) == list(range(sum(lengths)))
    labelled = batch.labels != IGNORE_LABEL
    assert not (labelled & ~real).any()
    # Ids count on through a document, so the next token is the id plus one.
    assert (batch.labels[labelled] == batch.tokens[labelled] + 1).all()
    expected = set(range(sum(lengths))) - set(starts[:-1].tolist())
    assert sorted(batch.labels[labelled].tolist()) == sorted(expected)


def test_document_cut_at_a_rows_end_goes_on_in_the_next_as_a_segment_with_positions_from_0():
    batch, _ = batch_of([ids(10, 11, 12), ids(20, 21, 22)], 4, "concatenate")
    assert batch.tokens.tolist() == [[10, 11, 12, 20], [21, 22, 0, 0]]
    assert batch.labels.tolist() == [[11, 12, X, 21], [22, X, X, X]]
    assert batch.segment_ids.tolist() == [[1, 1, 1, 2], [1, 1, 0, 0]]
    assert batch.positions.tolist() == [[0, 1, 2, 0], [0, 1, 0, 0]]


def test_only_scored_tokens_are_labels_also_across_a_cut():
    documents = [np.arange(6, dtype=np.uint16), np.arange(10, 13, dtype=np.uint16)]
    scored = [np.array([True, False, True, False, True, True]), None]
    rows, _ = pack([6, 3], 4)
    batch = build_batch(rows, documents, 4, scored)
    assert batch.tokens.tolist() == [[0, 1, 2, 3], [4, 5, 0, 0], [10, 11, 12, 0]]
    assert batch.labels.tolist() == [[X, 2, X, 4], [5, X, X, X], [11, 12, X, X]]
    assert batch.tokens.dtype == batch.labels.dtype == np.int32


def test_boundaries_come_from_documents_never_from_an_end_token():
    a, b, eos, c, d = 1, 2, 9, 3, 4
    batch, _ = batch_of([ids(a, b, eos), ids(c, eos, d)], 8)
    assert batch.segment_ids.tolist() == [[1, 1, 1, 2, 2, 2, 0, 0]]
    assert batch.labels.tolist() == [[b, eos, X, eos, d, X, X, X]]


def test_sixty_four_one_token_documents_are_sixty_four_segments():
    batch, _ = batch_of([ids(7)] * 64, 64)
    assert batch.segment_ids.tolist() == [list(range(1, 65))]
    assert (batch.positions == 0).all()
    assert (batch.labels == IGNORE_LABEL).all()


@pytest.mark.parametrize("length", [2999, 63])
def test_lengths_that_divide_nothing_are_padded_and_pads_are_marked(length):
    seq_len = length + 1
    batch, report = batch_of([np.full(length, 5, np.int32)], seq_len)
    assert report.padded_tokens == 1
    assert (batch.labels[0] != IGNORE_LABEL).sum() == length - 1
    assert [array[0, -1] for array in dataclasses.astuple(batch)] == [0, X, PAD_SEGMENT_ID, 0]


def test_empty_row_is_all_padding():
    batch = build_batch([[]], [], 3)
    assert batch.segment_ids.tolist() == [[PAD_SEGMENT_ID] * 3]
    assert batch.labels.tolist() == [[X] * 3]


def test_row_that_overflows_is_refused():
    with pytest.raises(ValueError, match=r"must fit seq_len, got 5 .* row 0 with seq_len=4"):
        build_batch([[Piece(0, 0, 5)]], [np.arange(5, dtype=np.int32)], 4)


def test_piece_outside_its_document_is_refused():
    with pytest.raises(ValueError, match="must lie inside its document"):
        build_batch([[Piece(0, 3, 3)]], [np.arange(5, dtype=np.int32)], 8)


class TestValidateIds:
    def test_valid_ids_and_ignored_labels_pass(self):
        validate_ids(ids(0, 96), ids(96, IGNORE_LABEL), 97)
        validate_ids(np.zeros((2, 0), np.int32), np.zeros((2, 0), np.int32), 97)

    @pytest.mark.parametrize("bad", [97, 1000, -1, -99])
    def test_label_out_of_range_is_named(self, bad):
        labels = np.array([[1, IGNORE_LABEL], [2, bad]], np.int32)
        with pytest.raises(ValueError, match=rf"labels .* got {bad} at index \(1, 1\) with vocab"):
            validate_ids(np.zeros_like(labels), labels, 97)

    @pytest.mark.parametrize("bad", [97, -1, IGNORE_LABEL])
    def test_token_out_of_range_is_named(self, bad):
        with pytest.raises(ValueError, match=rf"rows: token ids .* got {bad} at index \(1,\)"):
            validate_ids(ids(0, bad), ids(0, 1), 97, where="rows")
