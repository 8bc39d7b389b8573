"""What became of every document, token and row: figures that add up."""

import dataclasses
from dataclasses import dataclass

from farspan.data.packing import PackReport


@dataclass(frozen=True)
class Counts:
    """What a loader made of its data, in one epoch or, in streaming, so far.

    `tokens_in - tokens_left_out + tokens_repeated == tokens_packed`;
    `tokens_packed + tokens_padded == rows * seq_len`; and
    `tokens_packed == tokens_train + tokens_eval + tokens_unlabelled`, as for the rows.

    Attributes:
      documents: Documents of the data, empty ones included.
      documents_empty: Documents without a token.
      documents_left_out: Documents left out by length weights below 1.
      documents_repeated: Times that a document is seen again in the epoch, by length weights.
      documents_split: Documents laid out as several pieces, each time that they are seen.
      pieces: Segments over all rows.
      rows: Rows packed.
      rows_train: Rows to train on.
      rows_eval: Rows held out.
      rows_unlabelled: Rows left out, since nothing in them is predicted.
      tokens_in: Tokens of the data.
      tokens_left_out: Tokens of the documents left out.
      tokens_repeated: Tokens of the documents seen again.
      tokens_packed: Tokens in rows.
      tokens_padded: Slots of rows without a token.
      tokens_train: Tokens in the rows to train on.
      tokens_eval: Tokens in the rows held out.
      tokens_unlabelled: Tokens in the rows left out.
    """

    documents: int = 0
    documents_empty: int = 0
    documents_left_out: int = 0
    documents_repeated: int = 0
    documents_split: int = 0
    pieces: int = 0
    rows: int = 0
    rows_train: int = 0
    rows_eval: int = 0
    rows_unlabelled: int = 0
    tokens_in: int = 0
    tokens_left_out: int = 0
    tokens_repeated: int = 0
    tokens_packed: int = 0
    tokens_padded: int = 0
    tokens_train: int = 0
    tokens_eval: int = 0
    tokens_unlabelled: int = 0

    def __add__(self, other: "Counts") -> "Counts":
        mine, theirs = dataclasses.asdict(self), dataclasses.asdict(other)
        return Counts(**{name: mine[name] + theirs[name] for name in mine})

    def lines(self, seq_len: int) -> list[str]:
        """Returns the figures for people, a line each for what was read, packed, left out."""
        slots = max(1, self.rows * seq_len)
        found = [f"{self.documents:,} documents, {self.tokens_in:,} tokens"]
        found.append(
            f"{self.rows:,} rows of {seq_len:,} tokens: {self.tokens_packed:,} tokens in "
            f"{self.pieces:,} pieces, {self.tokens_padded:,} padded "
            f"({self.tokens_padded / slots:.2%}), {self.documents_split:,} documents split"
        )
        if self.documents_repeated:
            found.append(
                f"seen again: {self.documents_repeated:,} documents, {self.tokens_repeated:,} "
                f"tokens, by their length weights"
            )
        if self.documents_left_out:
            found.append(
                f"left out: {self.documents_left_out:,} documents, {self.tokens_left_out:,} "
                f"tokens, by their length weights"
            )
        if self.documents_empty:
            found.append(f"left out: {self.documents_empty:,} empty documents")
        if self.rows_unlabelled:
            found.append(
                f"left out: {self.rows_unlabelled:,} rows, {self.tokens_unlabelled:,} tokens, in "
                f"which there is nothing to predict"
            )
        return found


def packed(report: PackReport) -> Counts:
    """Returns the part of the counts that a report of packing gives."""
    return Counts(
        documents_split=report.split_documents,
        pieces=report.pieces,
        rows=report.rows,
        tokens_packed=report.tokens_out,
        tokens_padded=report.padded_tokens,
    )
