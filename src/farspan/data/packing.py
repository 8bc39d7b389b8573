"""Which documents share a row: every token is placed once, and the report adds up."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from jaxtyping import Int64, Integer

from farspan.data.open_rows import BestFit, FirstFit
from farspan.errors import unknown_choice

Packing = Literal["best_fit", "first_fit", "concatenate", "none"]
"""How documents share rows; see `pack`."""

Lengths = Int64[np.ndarray, "_"]

_CHUNK = 1 << 16


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


@dataclass(frozen=True, eq=False)
class Rows:
    """The pieces of all rows, as arrays: 24 bytes a piece and 8 a row.

    `rows[i]` is row i as a list of `Piece`, in the order of their documents.

    Attributes:
      documents: Index of each piece's document, int64 [pieces], row after row.
      starts: Index of its first token inside the document, int64 [pieces].
      lengths: Its tokens, int64 [pieces].
      offsets: Index of each row's first piece, and the number of pieces, int64 [rows + 1].
    """

    documents: Lengths
    starts: Lengths
    lengths: Lengths
    offsets: Lengths

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> list[Piece]:
        begin, end = self.offsets[row], self.offsets[row + 1]
        columns = (self.documents, self.starts, self.lengths)
        return [Piece(*of) for of in zip(*(c[begin:end].tolist() for c in columns), strict=True)]

    def __iter__(self) -> Iterator[list[Piece]]:
        return (self[row] for row in range(len(self)))

    def tokens(self) -> Lengths:
        """Returns the tokens of each row, int64 [rows]."""
        ends = np.concatenate([[0], np.cumsum(self.lengths)])
        return np.diff(ends[self.offsets])


@dataclass(frozen=True)
class PackReport:
    """What packing did with every token.

    `tokens_in == tokens_out`: packing drops and cuts off nothing. With `seq_len` tokens a row,
    `tokens_out + padded_tokens == rows * seq_len`. Each document that is not empty begins in one
    piece and each cut makes one more: `pieces == documents - empty_documents + cuts`.

    Attributes:
      documents: Documents given, empty ones included.
      empty_documents: Documents of length 0, which have no place in a row.
      split_documents: Documents laid out as several pieces.
      cuts: Places at which a document ends in one row and goes on in another.
      pieces: Segments over all rows.
      rows: Rows made.
      tokens_in: Tokens of all documents.
      tokens_out: Tokens of all pieces in the rows.
      padded_tokens: Slots of the rows that hold no token.
    """

    documents: int
    empty_documents: int
    split_documents: int
    cuts: int
    pieces: int
    rows: int
    tokens_in: int
    tokens_out: int
    padded_tokens: int


def pack(
    lengths: Sequence[int] | Integer[np.ndarray, "_"], seq_len: int, *, method: Packing = "best_fit"
) -> tuple[Rows, PackReport]:
    """Places documents into rows of `seq_len` tokens.

    There is no limit on the pieces of a row. Pieces of one document are segments of their own,
    with positions from 0, wherever they lie: what is cut apart is not attended across.

    * `best_fit`: a document longer than a row is cut into pieces of `seq_len` tokens and a rest.
      Each piece, in the order of the documents, goes to the row with the least free space that
      still fits it, else opens a new row. Sorting the pieces by length first would pad a little
      less, but then rows of many short documents and rows of one long document would come apart by
      construction; in the given order a row's mix is that of the corpus.
    * `first_fit`: the same, but to the first row that fits it. Rows hold documents that were close
      to one another, and there is a little more padding.
    * `concatenate`: documents lie one after another and are cut wherever a row ends. Only the last
      row is padded.
    * `none`: each piece has a row of its own.

    Args:
      lengths: Tokens of each document, >= 0.
      seq_len: Tokens a row, >= 1.
      method: One of these.

    Returns:
      The rows, the pieces of each in the order of their documents, and the report.

    Raises:
      ValueError: `seq_len` is below 1, a length is negative, or there is no such method.

    Cost: for n pieces O(n log n), some 1 to 2 microseconds a piece in best_fit and first_fit, and
    about 100 bytes a piece; best_fit needs sqrt(seq_len) / 64 machine words a row as well.
    """
    if seq_len < 1:
        raise ValueError(f"packing: seq_len must be at least 1, got {seq_len}; use 2 or more")
    if method not in get_args(Packing):
        raise unknown_choice("packing", method, get_args(Packing))
    sizes = np.asarray(lengths, np.int64).reshape(-1)
    _check_lengths(sizes)
    documents, starts, tokens = (
        _cut_at_row_ends(sizes, seq_len) if method == "concatenate" else _cut(sizes, seq_len)
    )
    places = _METHODS[method](tokens, seq_len)
    order = np.argsort(places, kind="stable")
    count = int(places.max()) + 1 if len(places) else 0
    rows = Rows(
        documents[order],
        starts[order],
        tokens[order],
        np.concatenate([[0], np.cumsum(np.bincount(places, minlength=count))]).astype(np.int64),
    )
    return rows, _report(sizes, rows, seq_len)


def _check_lengths(sizes: Lengths) -> None:
    if (sizes < 0).any():
        document = int(np.argmax(sizes < 0))
        raise ValueError(
            f"packing: a document's length must be at least 0, got {sizes[document]} for document "
            f"{document}; pass the number of its tokens"
        )


def _cut(sizes: Lengths, seq_len: int) -> tuple[Lengths, Lengths, Lengths]:
    """The pieces of each document, cut at multiples of `seq_len` inside it."""
    counts = -(-sizes // seq_len)
    documents = np.repeat(np.arange(len(sizes)), counts)
    firsts = np.cumsum(counts) - counts
    starts = (np.arange(len(documents)) - firsts[documents]) * seq_len
    return documents, starts, np.minimum(seq_len, sizes[documents] - starts)


def _cut_at_row_ends(sizes: Lengths, seq_len: int) -> tuple[Lengths, Lengths, Lengths]:
    """The pieces of each document, cut where the text of all documents passes a row's end."""
    ends = np.cumsum(sizes)
    total = int(ends[-1]) if len(ends) else 0
    begins = ends - sizes
    borders = np.unique(np.concatenate([begins[sizes > 0], np.arange(0, total, seq_len)]))
    # Documents that end at or before a border, empty ones among them, come before its document.
    documents = np.searchsorted(ends, borders, side="right")
    return documents, borders - begins[documents], np.diff(borders, append=total)


def _fill_rows(tokens: Lengths, seq_len: int) -> Lengths:
    return (np.cumsum(tokens) - tokens) // seq_len


def _own_rows(tokens: Lengths, seq_len: int) -> Lengths:
    del seq_len
    return np.arange(len(tokens))


def _into(make: Callable[[int], BestFit | FirstFit]) -> Callable[[Lengths, int], Lengths]:
    def places(tokens: Lengths, seq_len: int) -> Lengths:
        rows = make(seq_len)
        found = np.empty(len(tokens), np.int64)
        for begin in range(0, len(tokens), _CHUNK):  # Python's integers take much memory
            chunk = tokens[begin : begin + _CHUNK].tolist()
            found[begin : begin + len(chunk)] = [rows.place(length) for length in chunk]
        return found

    return places


_METHODS: dict[Packing, Callable[[Lengths, int], Lengths]] = {
    "best_fit": _into(BestFit),
    "first_fit": _into(FirstFit),
    "concatenate": _fill_rows,
    "none": _own_rows,
}


def _report(sizes: Lengths, rows: Rows, seq_len: int) -> PackReport:
    empty = int((sizes == 0).sum())
    pieces, tokens_out = len(rows.documents), int(rows.lengths.sum())
    report = PackReport(
        documents=len(sizes),
        empty_documents=empty,
        split_documents=int((np.bincount(rows.documents, minlength=1) > 1).sum()),
        cuts=pieces - (len(sizes) - empty),
        pieces=pieces,
        rows=len(rows),
        tokens_in=int(sizes.sum()),
        tokens_out=tokens_out,
        padded_tokens=len(rows) * seq_len - tokens_out,
    )
    assert report.tokens_in == report.tokens_out, report
    return report
