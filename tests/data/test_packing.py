"""Every token has exactly one place, whatever the lengths."""

import bisect
import inspect
from collections import Counter
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farspan.data import Packing, Piece, pack

LENGTHS = st.lists(st.integers(0, 200), max_size=60)
METHODS = st.sampled_from(get_args(Packing))


def layout(lengths, seq_len, method="best_fit"):
    rows, _ = pack(lengths, seq_len, method=method)
    return [[(piece.document, piece.start, piece.length) for piece in row] for row in rows]


@given(LENGTHS, st.integers(1, 80), METHODS)
def test_every_token_is_placed_once_and_the_report_adds_up(lengths, seq_len, method):
    rows, report = pack(lengths, seq_len, method=method)
    pieces = [piece for row in rows for piece in row]
    placed = sorted(
        (piece.document, piece.start + offset) for piece in pieces for offset in range(piece.length)
    )
    assert placed == [(d, t) for d, length in enumerate(lengths) for t in range(length)]
    assert all(rows)
    assert all(sum(piece.length for piece in row) <= seq_len for row in rows)
    assert report.tokens_in == report.tokens_out == sum(lengths)
    assert report.tokens_out + report.padded_tokens == report.rows * seq_len
    assert (report.rows, report.pieces) == (len(rows), len(pieces))
    assert report.documents == len(lengths)
    assert report.empty_documents == lengths.count(0)
    pieces_of = Counter(piece.document for piece in pieces)
    assert report.split_documents == sum(count > 1 for count in pieces_of.values())
    assert report.cuts == len(pieces) - len(pieces_of)
    assert rows.tokens().tolist() == [sum(piece.length for piece in row) for row in rows]


@given(LENGTHS, st.integers(1, 80))
def test_a_piece_goes_where_it_leaves_least_space(lengths, seq_len):
    free: list[int] = []
    for length in (n for total in lengths for n in split(total, seq_len)):
        place = bisect.bisect_left(free, length)
        left = (free.pop(place) if place < len(free) else seq_len) - length
        if left:
            bisect.insort(free, left)
    rows, _ = pack(lengths, seq_len)
    used = [sum(piece.length for piece in row) for row in rows]
    assert sorted(seq_len - tokens for tokens in used if tokens < seq_len) == free


def split(length, seq_len):
    return [min(seq_len, length - start) for start in range(0, length, seq_len)]


@given(LENGTHS, st.integers(1, 80), METHODS)
def test_packing_is_deterministic_and_keeps_the_order_within_a_row(lengths, seq_len, method):
    rows = layout(lengths, seq_len, method)
    assert rows == layout(lengths, seq_len, method)
    assert all(row == sorted(row) for row in rows)


def test_best_fit_by_hand():
    assert layout([6, 7, 2, 3, 10, 1], 10) == [
        [(0, 0, 6), (3, 0, 3), (5, 0, 1)],
        [(1, 0, 7), (2, 0, 2)],
        [(4, 0, 10)],
    ]


@given(LENGTHS, st.integers(1, 80))
def test_first_fit_takes_the_first_row_with_space(lengths, seq_len):
    free: list[int] = []
    expected: list[list[int]] = []
    for length in (n for total in lengths for n in split(total, seq_len)):
        row = next((i for i, space in enumerate(free) if space >= length), len(free))
        if row == len(free):
            free.append(seq_len)
            expected.append([])
        free[row] -= length
        expected[row].append(length)
    found = [[n for _, _, n in row] for row in layout(lengths, seq_len, "first_fit")]
    assert found == expected


@given(LENGTHS, st.integers(1, 80))
def test_concatenated_rows_are_full_but_for_the_last_and_in_the_order_of_the_text(lengths, seq_len):
    rows, report = pack(lengths, seq_len, method="concatenate")
    assert rows.tokens()[:-1].tolist() == [seq_len] * (len(rows) - 1 if len(rows) else 0)
    assert report.padded_tokens < seq_len
    text = [(p.document, p.start + i) for row in rows for p in row for i in range(p.length)]
    assert text == [(d, t) for d, length in enumerate(lengths) for t in range(length)]


def test_concatenate_by_hand():
    assert layout([6, 0, 7, 3, 4], 10, "concatenate") == [
        [(0, 0, 6), (2, 0, 4)],
        [(2, 4, 3), (3, 0, 3), (4, 0, 4)],
    ]


def test_document_longer_than_a_row_is_split_not_cut():
    # 100 tokens in rows of 64, as in the reports of silently truncated documents.
    rows, report = pack([100], 64)
    assert list(rows) == [[Piece(0, 0, 64)], [Piece(0, 64, 36)]]
    assert (report.split_documents, report.tokens_out, report.padded_tokens) == (1, 100, 28)


def test_without_packing_each_piece_has_its_row():
    rows, report = pack([3, 0, 10, 1], 4, method="none")
    assert [row[0].length for row in rows] == [3, 4, 4, 2, 1]
    assert report.rows == report.pieces == 5


def test_many_one_token_documents_share_a_row_without_limit():
    # A static maximum of segments in a row is where another packer corrupted attention.
    rows, report = pack([1] * 64, 64)
    assert [len(row) for row in rows] == [64]
    assert report.padded_tokens == 0
    rows, _ = pack([1] * 1000, 64)
    assert [len(row) for row in rows] == [64] * 15 + [40]


def test_nothing_to_pack():
    rows, report = pack([], 8)
    assert list(rows) == []
    assert report.rows == report.tokens_in == report.padded_tokens == 0
    rows, report = pack([0, 0], 8)
    assert (len(rows), report.empty_documents) == (0, 2)


def test_large_rows_and_many_documents():
    lengths = [(i * 7919) % 300_000 + 1 for i in range(5_000)]
    rows, report = pack(lengths, 1 << 24)
    assert report.padded_tokens < report.tokens_out // 100
    assert len(rows) == -(-report.tokens_in // (1 << 24))


@pytest.mark.parametrize("method", get_args(Packing))
def test_tens_of_thousands_of_documents_make_rows_without_objects(method):
    lengths = np.arange(40_000) % 977 + 1
    rows, report = pack(lengths, 2048, method=method)
    assert rows.documents.nbytes == 8 * report.pieces
    assert report.tokens_out == lengths.sum()
    if method != "none":
        assert report.padded_tokens < report.tokens_out // 50


def test_unknown_method_is_refused():
    with pytest.raises(ValueError, match=r"packing must be one of .*did you mean \"best_fit\""):
        inspect.unwrap(pack)([1], 8, method="best_fitt")


@pytest.mark.parametrize("seq_len", [0, -1])
def test_row_must_hold_a_token(seq_len):
    with pytest.raises(ValueError, match=f"seq_len must be at least 1, got {seq_len}"):
        pack([1], seq_len)


def test_negative_length_is_refused():
    with pytest.raises(ValueError, match="got -2 for document 1"):
        pack([1, -2], 8)
