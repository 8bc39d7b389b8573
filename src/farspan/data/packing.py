"""Which documents share a row: every token is placed once, and the report adds up."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of one document's tokens that sits in one row as one segment.

    Attributes:
      document: Index of the document.
      start: Index of the first token inside the document.
      length: Number of tokens, at least 1.
    """

    document: int
    start: int
    length: int


@dataclass(frozen=True)
class PackReport:
    """What packing did with every token.

    `tokens_in == tokens_out`: packing drops and cuts off nothing. With `seq_len` tokens a row,
    `tokens_out + padded_tokens == rows * seq_len`.

    Attributes:
      documents: Documents given, empty ones included.
      empty_documents: Documents of length 0, which have no place in a row.
      split_documents: Documents longer than a row, laid out as several pieces.
      pieces: Segments over all rows.
      rows: Rows made.
      tokens_in: Tokens of all documents.
      tokens_out: Tokens of all pieces in the rows.
      padded_tokens: Slots of the rows that hold no token.
    """

    documents: int
    empty_documents: int
    split_documents: int
    pieces: int
    rows: int
    tokens_in: int
    tokens_out: int
    padded_tokens: int


def pack(
    lengths: Sequence[int], seq_len: int, *, packing: bool
) -> tuple[list[list[Piece]], PackReport]:
    """Places documents into rows of `seq_len` tokens.

    A document longer than a row is cut into pieces of `seq_len` tokens and a rest. A row holds
    whole pieces; there is no limit on their number.

    With `packing`, each piece, in the order of the documents, goes to the row with the least free
    space that still fits it, else opens a new row. Sorting the pieces by length first would pad a
    little less, but then rows of many short documents and rows of one long document would come
    apart by construction; in the given order a row's mix is that of the corpus.

    Args:
      lengths: Tokens of each document, >= 0.
      seq_len: Tokens a row, >= 1.
      packing: False gives each piece its own row.

    Returns:
      The rows, each a list of pieces in the order of their documents, and the report.

    Raises:
      ValueError: `seq_len` is below 1, or a length is negative.

    Cost: O(n log n) for n pieces, plus about sqrt(seq_len) / 64 machine words a piece.
    """
    if seq_len < 1:
        raise ValueError(f"packing: seq_len must be at least 1, got {seq_len}; use 2 or more")
    pieces = _split(lengths, seq_len)
    rows = _best_fit(pieces, seq_len) if packing else [[piece] for piece in pieces]
    tokens_out = sum(piece.length for row in rows for piece in row)
    report = PackReport(
        documents=len(lengths),
        empty_documents=sum(1 for length in lengths if length == 0),
        split_documents=sum(1 for length in lengths if length > seq_len),
        pieces=len(pieces),
        rows=len(rows),
        tokens_in=sum(lengths),
        tokens_out=tokens_out,
        padded_tokens=len(rows) * seq_len - tokens_out,
    )
    assert report.tokens_in == report.tokens_out, report
    return rows, report


def _split(lengths: Sequence[int], seq_len: int) -> list[Piece]:
    pieces: list[Piece] = []
    for document, length in enumerate(lengths):
        if length < 0:
            raise ValueError(
                f"packing: a document's length must be at least 0, got {length} for document "
                f"{document}; pass the number of its tokens"
            )
        pieces += [
            Piece(document, start, min(seq_len, length - start))
            for start in range(0, length, seq_len)
        ]
    return pieces


def _best_fit(pieces: list[Piece], seq_len: int) -> list[list[Piece]]:
    rows: list[list[Piece]] = []
    open_rows = _OpenRows(seq_len)
    for piece in pieces:
        found = open_rows.take(piece.length)
        if found is None:
            rows.append([piece])
            open_rows.put(len(rows) - 1, seq_len - piece.length)
        else:
            row, free = found
            rows[row].append(piece)
            open_rows.put(row, free - piece.length)
    return rows


class _OpenRows:
    """The rows that have free space, found by the least space that suffices.

    The amounts of free space in use are a set of bits, cut into blocks of about sqrt(seq_len)
    bits, with one more word that marks the blocks that are not empty: "the next amount from here
    up" is a shift and a lowest set bit in at most two words.
    """

    def __init__(self, seq_len: int):
        self._shift = (seq_len.bit_length() + 1) // 2
        self._blocks_in_use = 0
        self._blocks: dict[int, int] = {}
        self._rows: dict[int, list[int]] = {}

    def put(self, row: int, free: int) -> None:
        if free == 0:
            return
        self._rows.setdefault(free, []).append(row)
        block, bit = free >> self._shift, free & ((1 << self._shift) - 1)
        self._blocks[block] = self._blocks.get(block, 0) | 1 << bit
        self._blocks_in_use |= 1 << block

    def take(self, length: int) -> tuple[int, int] | None:
        """Removes and returns (row, free) with the least free >= length; None if there is none."""
        free = self._least_free(length)
        if free is None:
            return None
        rows = self._rows[free]
        row = rows.pop()
        if not rows:
            self._forget(free)
        return row, free

    def _least_free(self, length: int) -> int | None:
        block, bit = length >> self._shift, length & ((1 << self._shift) - 1)
        same_block = self._blocks.get(block, 0) >> bit
        if same_block:
            return length + _lowest_bit(same_block)
        higher = self._blocks_in_use >> (block + 1)
        if not higher:
            return None
        block += 1 + _lowest_bit(higher)
        return (block << self._shift) + _lowest_bit(self._blocks[block])

    def _forget(self, free: int) -> None:
        del self._rows[free]
        block, bit = free >> self._shift, free & ((1 << self._shift) - 1)
        self._blocks[block] &= ~(1 << bit)
        if not self._blocks[block]:
            del self._blocks[block]
            self._blocks_in_use &= ~(1 << block)


def _lowest_bit(word: int) -> int:
    return (word & -word).bit_length() - 1
