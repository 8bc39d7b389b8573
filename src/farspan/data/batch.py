"""Rows of pieces to the arrays a model trains on."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar, runtime_checkable

import numpy as np
from jaxtyping import Bool, Int32, Integer

from farspan.data.packing import Piece
from farspan.types import IGNORE_LABEL, PAD_SEGMENT_ID

Tokens = Integer[np.ndarray, "_"]
Scored = Bool[np.ndarray, "_"]
_T_co = TypeVar("_T_co", covariant=True)


@runtime_checkable
class Documents(Protocol[_T_co]):
    """An array for each document, by its index: a list, or views of one large array."""

    def __getitem__(self, index: int, /) -> _T_co: ...


@dataclass(frozen=True, eq=False)
class Batch:
    """Rows in the order of the text, on the host. All arrays are int32 [B, S], global.

    Attributes:
      tokens: Token ids; 0 in padding.
      labels: The token that follows in the document; `IGNORE_LABEL` where none does, where that one
        is not scored, and in padding.
      segment_ids: 1, 2, ... for the pieces of a row; `PAD_SEGMENT_ID` in padding.
      positions: 0, 1, ... from the start of each piece; 0 in padding.
    """

    tokens: Int32[np.ndarray, "B S"]
    labels: Int32[np.ndarray, "B S"]
    segment_ids: Int32[np.ndarray, "B S"]
    positions: Int32[np.ndarray, "B S"]


def build_batch(
    rows: Iterable[Sequence[Piece]],
    documents_tokens: Documents[Tokens],
    seq_len: int,
    documents_scored: Documents[Scored | None] | None = None,
) -> Batch:
    """Lays rows of pieces out as arrays, padded at the end of each row.

    Labels are made here, before a layout permutes the row. A document cut at the end of a row
    continues in another; the last token of such a piece has the first token of the next piece as
    its label, since that is what follows in the text. So over all rows each token but the first of
    its document is predicted exactly once, and only a document's last token has no label. Of
    documents with scored tokens, only these are predicted.

    Args:
      rows: The pieces of each row. An empty row is all padding.
      documents_tokens: Token ids of every document, integers [tokens], each below 2**31.
      seq_len: Tokens a row.
      documents_scored: For every document, bool [tokens], which of its tokens may be labels; None
        for all of them.

    Returns:
      The batch, [rows, seq_len].

    Raises:
      ValueError: The pieces of a row exceed `seq_len`, or a piece exceeds its document.
    """
    rows = list(rows)
    batch = empty_batch(len(rows), seq_len)
    for row, pieces in enumerate(rows):
        fill_row(batch, row, pieces, documents_tokens, documents_scored)
    return batch


def empty_batch(rows: int, seq_len: int) -> Batch:
    """Returns a batch of `rows` rows of `seq_len` slots, all of them padding."""
    shape = (rows, seq_len)
    return Batch(
        tokens=np.zeros(shape, np.int32),
        labels=np.full(shape, IGNORE_LABEL, np.int32),
        segment_ids=np.full(shape, PAD_SEGMENT_ID, np.int32),
        positions=np.zeros(shape, np.int32),
    )


def fill_row(
    batch: Batch,
    row: int,
    pieces: Sequence[Piece],
    documents_tokens: Documents[Tokens],
    documents_scored: Documents[Scored | None] | None = None,
) -> None:
    """Lays the pieces of one row out in `batch`, in place.

    Args:
      batch: Its row `row` is all padding.
      row: Index of the row.
      pieces: See `build_batch`, as the others.
      documents_tokens: See `build_batch`.
      documents_scored: See `build_batch`.

    Raises:
      ValueError: See `build_batch`.
    """
    seq_len = batch.tokens.shape[1]
    end = 0
    for segment, piece in enumerate(pieces, start=PAD_SEGMENT_ID + 1):
        begin, end = end, end + piece.length
        document = documents_tokens[piece.document]
        _check_fits(row, end, seq_len, piece, len(document))
        following = slice(piece.start + 1, piece.start + piece.length + 1)
        labels = document[following]
        scored = documents_scored[piece.document] if documents_scored is not None else None
        if scored is not None:
            labels = np.where(scored[following], labels, np.int32(IGNORE_LABEL))
        batch.tokens[row, begin:end] = document[piece.start : piece.start + piece.length]
        batch.labels[row, begin : begin + len(labels)] = labels
        batch.segment_ids[row, begin:end] = segment
        batch.positions[row, begin:end] = np.arange(piece.length, dtype=np.int32)


def validate_ids(
    tokens: Integer[np.ndarray, "..."],
    labels: Integer[np.ndarray, "..."],
    vocab_size: int,
    *,
    where: str = "batch",
) -> None:
    """Checks that a model with this vocabulary can embed the tokens and score the labels.

    Out of range, a gather on an accelerator would clamp the id or give NaN, with no word said.

    Args:
      tokens: Ids, any shape; each must be in [0, vocab_size).
      labels: Ids, any shape; each must be in [0, vocab_size), or `IGNORE_LABEL`.
      vocab_size: Rows of the embedding.
      where: What the ids belong to, for the message.

    Raises:
      ValueError: An id is out of range; the message gives its place and value.
    """
    _check_range(f"{where}: token ids must be in [0, vocab_size)", tokens, vocab_size, None)
    rule = f"{where}: labels must be in [0, vocab_size) or {IGNORE_LABEL}"
    _check_range(rule, labels, vocab_size, IGNORE_LABEL)


def _check_range(
    rule: str, ids: Integer[np.ndarray, "..."], vocab_size: int, allowed: int | None
) -> None:
    # Two reductions settle the usual case without an array of flags.
    if ids.size == 0 or (ids.min() >= 0 and ids.max() < vocab_size):
        return
    bad = (ids < 0) | (ids >= vocab_size)
    if allowed is not None:
        bad &= ids != allowed
    if bad.any():
        place = tuple(int(index) for index in np.argwhere(bad)[0])
        raise ValueError(
            f"{rule}, got {ids[place]} at index {place} with vocab_size={vocab_size}; "
            f"use the tokenizer the model was made for, or a vocab_size that covers it"
        )


def _check_fits(row: int, end: int, seq_len: int, piece: Piece, document_tokens: int) -> None:
    if end > seq_len:
        raise ValueError(
            f"batch: the pieces of a row must fit seq_len, got {end} tokens or more in row {row} "
            f"with seq_len={seq_len}; pack with this seq_len"
        )
    if piece.start < 0 or piece.length < 1 or piece.start + piece.length > document_tokens:
        raise ValueError(
            f"batch: a piece must lie inside its document, got {piece} of a document with "
            f"{document_tokens} tokens; pack the documents that are passed here"
        )
