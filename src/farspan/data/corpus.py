"""One source packed into rows: which are trained on, and which are held out."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Bool, Int64

from farspan.data.batch import Batch, empty_batch, fill_row
from farspan.data.cache.store import TokenStore
from farspan.data.counts import Counts, packed
from farspan.data.mixture import LengthWeights
from farspan.data.packing import Packing, PackReport, Rows, pack
from farspan.data.seeds import derive_seed, permutation, uniform

Indices = Int64[np.ndarray, "_"]


@dataclass(frozen=True, eq=False)
class Corpus:
    """The rows of one source.

    Attributes:
      store: Its tokens.
      rows: All rows, among them those in which nothing is predicted.
      train: Rows to train on, int64.
      held_out: Rows never trained on, int64; no token of theirs is in a row to train on.
      counts: What packing and choosing did.
    """

    store: TokenStore
    rows: Rows
    train: Indices
    held_out: Indices
    counts: Counts

    def fill(self, batch: Batch, place: int, row: int) -> None:
        """Lays row `row` out as row `place` of `batch`."""
        fill_row(batch, place, self.rows[row], self.store.documents, self.store.documents_scored)


def build_corpus(
    store: TokenStore,
    *,
    seq_len: int,
    packing: Packing,
    seed: int,
    length_weights: LengthWeights | None = None,
    held_out: int = 0,
) -> Corpus:
    """Packs a source and chooses the rows to hold out.

    Each document is packed once; from these rows some are held out, and only then are documents
    packed again that are seen several times an epoch. One of which a part is held out is not.

    Args:
      store: Tokens of the source.
      seq_len: Tokens a row.
      packing: See `pack`.
      seed: Fixes the choice of rows, and of documents under fractions of weights.
      length_weights: How often documents are seen; None: each once.
      held_out: Rows to hold out; all where there are not more.

    Returns:
      The rows.

    Raises:
      ValueError: See `pack`.
    """
    lengths = store.lengths
    weights = length_weights or LengthWeights()
    draws = uniform(len(lengths), derive_seed(seed, "occurrences"))
    times = weights.occurrences(lengths, draws)
    once = np.flatnonzero(times > 0)
    rows, report = pack_documents(lengths, once, seq_len, packing)
    labelled = np.flatnonzero(labelled_rows(rows, store.lengths, _piece_is_scored(store)))
    order = labelled[permutation(len(labelled), derive_seed(seed, "held out"))]
    split = max(0, len(order) - held_out)
    train, held = np.sort(order[:split]), np.sort(order[split:])
    counts = packed(report)
    if (times > 1).any():
        times = _without_held_out(times, rows, held)
        rounds = [np.flatnonzero(times > n) for n in range(1, int(times.max()))]
        again = np.concatenate([np.zeros(0, np.int64), *rounds])
        again_rows, again_report = pack_documents(lengths, again, seq_len, packing)
        more = labelled_rows(again_rows, store.lengths, _piece_is_scored(store))
        train = np.concatenate([train, len(rows) + np.flatnonzero(more)])
        rows, counts = _join(rows, again_rows), counts + packed(again_report)
    sizes = rows.tokens()
    missing = times == 0
    counts = replace(
        counts,
        documents=len(lengths) + store.empty_documents,
        documents_empty=store.empty_documents,
        documents_left_out=int(missing.sum()),
        documents_repeated=int(np.maximum(times - 1, 0).sum()),
        rows_train=len(train),
        rows_eval=len(held),
        rows_unlabelled=len(rows) - len(train) - len(held),
        tokens_in=int(lengths.sum()),
        tokens_left_out=int(lengths[missing].sum()),
        tokens_repeated=int((np.maximum(times - 1, 0) * lengths).sum()),
        tokens_train=int(sizes[train].sum()),
        tokens_eval=int(sizes[held].sum()),
        tokens_unlabelled=int(sizes.sum() - sizes[train].sum() - sizes[held].sum()),
    )
    return Corpus(store, rows, train, held, counts)


def pack_documents(
    lengths: Indices, documents: Indices, seq_len: int, packing: Packing
) -> tuple[Rows, PackReport]:
    """Packs some of the documents, in the order given and as often as each occurs in it.

    Args:
      lengths: Tokens of every document, int64.
      documents: Which of them, int64.
      seq_len: See `pack`.
      packing: See `pack`.

    Returns:
      See `pack`; pieces name documents as `lengths` does.
    """
    rows, report = pack(lengths[documents], seq_len, method=packing)
    return replace(rows, documents=documents[rows.documents]), report


def labelled_rows(
    rows: Rows, lengths: Indices, is_scored: Callable[[int, int, int], bool] | None
) -> Bool[np.ndarray, "rows"]:
    """Says of each row whether any token in it is predicted.

    A row of one-token documents alone predicts nothing; a batch of such rows would have no loss.

    Args:
      rows: The rows.
      lengths: Tokens of each document, int64.
      is_scored: Says of (document, begin, end) whether any of these tokens may be a label; None:
        each may.
    """
    ends = lengths[rows.documents]
    begins = rows.starts + 1
    labelled = begins < ends
    if is_scored is not None:
        ends = np.minimum(begins + rows.lengths, ends)
        for piece in np.flatnonzero(labelled):
            labelled[piece] = is_scored(
                int(rows.documents[piece]), int(begins[piece]), int(ends[piece])
            )
    counts = np.concatenate([[0], np.cumsum(labelled)])
    return np.diff(counts[rows.offsets]) > 0


def _piece_is_scored(store: TokenStore) -> Callable[[int, int, int], bool] | None:
    scored = store.documents_scored
    if scored is None:
        return None
    return lambda document, begin, end: bool(scored[document][begin:end].any())


def _without_held_out(times: Indices, rows: Rows, held: Indices) -> Indices:
    """`times`, but once for documents of which a piece is held out."""
    row_of_piece = np.repeat(np.arange(len(rows)), np.diff(rows.offsets))
    touched = rows.documents[np.isin(row_of_piece, held)]
    times = times.copy()
    times[touched] = np.minimum(times[touched], 1)
    return times


def _join(first: Rows, second: Rows) -> Rows:
    return Rows(
        np.concatenate([first.documents, second.documents]),
        np.concatenate([first.starts, second.starts]),
        np.concatenate([first.lengths, second.lengths]),
        np.concatenate([first.offsets, len(first.documents) + second.offsets[1:]]),
    )


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Rows for evaluation.

    Attributes:
      rows: For each corpus, which of its rows, int64.
      seq_len: Tokens a row.
      batch_size: Rows a batch.
    """

    rows: Sequence[tuple[Corpus, Indices]]
    seq_len: int
    batch_size: int

    def __len__(self) -> int:
        return sum(len(rows) for _, rows in self.rows)

    def batches(self) -> Iterator[Batch]:
        """Yields batches of `batch_size` rows; rows of padding fill up the last."""
        batch, filled = empty_batch(self.batch_size, self.seq_len), 0
        for corpus, rows in self.rows:
            for row in rows:
                corpus.fill(batch, filled, int(row))
                filled += 1
                if filled == self.batch_size:
                    yield batch
                    batch, filled = empty_batch(self.batch_size, self.seq_len), 0
        if filled:
            yield batch
