"""An endless, shuffled, resumable stream of batches."""

import functools
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int32

from farspan.data.batch import Batch, build_batch, has_label, validate_ids
from farspan.data.document import Document
from farspan.data.packing import PackReport, Piece, pack
from farspan.data.sources import STDLIB, load_documents
from farspan.data.tokenizers import ByteTokenizer, Tokenizer, get_tokenizer

_STATE_VERSION = 1
_PREFETCH_BATCHES = 2
_MAX_SEED = 2**32 - 1

_Row = list[Piece]


@runtime_checkable
class _Stream(Protocol):
    """What is used of Grain's iterator."""

    def __next__(self) -> Batch: ...
    def get_state(self) -> dict[str, Any]: ...
    def set_state(self, state: dict[str, Any]) -> None: ...


class Loader(Iterator[Batch]):
    """Tokenises and packs documents once, then yields training batches without end.

    Each epoch visits every training row exactly once, in an order of its own. The last batch of an
    epoch is filled up with the first rows of the next, so no row is left out. Rows are in the
    order of the text: the layout permutes them on the way to the devices. Every process that
    builds a loader with the same arguments gets the same global batches.

    Args:
      documents: What to train on, at least one token in all.
      tokenizer: Makes the ids.
      seq_len: Tokens a row.
      packing: Whether documents share rows.
      batch_size: Rows a batch, over all devices.
      seed: Fixes the held-out rows and the order of every epoch; 0 .. 2**32 - 1.
      eval_rows: Rows held out: they never occur in training.

    Attributes:
      report: What packing did; it counts held-out rows too.
      documents_tokens: Token ids of each document, int32.
      train_rows: Rows a training epoch visits.
      eval_rows: Rows held out.

    Raises:
      ValueError: An argument is out of range, or there are fewer training rows than a batch needs.
    """

    def __init__(
        self,
        documents: Sequence[Document],
        tokenizer: Tokenizer,
        *,
        seq_len: int,
        packing: bool,
        batch_size: int,
        seed: int,
        eval_rows: int = 0,
    ):
        _check_arguments(batch_size, seed, eval_rows)
        self.documents_tokens = [_encode(tokenizer, document) for document in documents]
        lengths = [len(tokens) for tokens in self.documents_tokens]
        rows, self.report = pack(lengths, seq_len, packing=packing)
        # A row of one-token documents alone predicts nothing; a batch of such rows has no loss.
        rows = [row for row in rows if any(has_label(p, lengths[p.document]) for p in row)]
        self._rows_without_labels = self.report.rows - len(rows)
        self._train, self._eval = _hold_out(rows, eval_rows, seed)
        _check_fills_a_batch(len(self._train), batch_size, eval_rows, self.report)
        self.train_rows, self.eval_rows = len(self._train), len(self._eval)
        self._tokenizer = tokenizer
        self._seq_len = seq_len
        self._batch_size = batch_size
        # Everything the order of the batches depends on.
        self._order: dict[str, Any] = {
            "data": _digest(documents),
            "tokenizer": tokenizer.name,
            "seq_len": seq_len,
            "packing": packing,
            "batch_size": batch_size,
            "seed": seed,
            "eval_rows": eval_rows,
        }

    def __next__(self) -> Batch:
        return next(self._stream)

    def state(self) -> dict[str, Any]:
        """Returns the place in the stream: the batches yielded so far, not those prefetched.

        Returns:
          A value for `restore` that `json` can write; a few hundred bytes.
        """
        return {
            "version": _STATE_VERSION,
            "order": dict(self._order),
            "stream": self._stream.get_state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Goes to the place where `state` was taken: the next batches are those, bit for bit.

        Args:
          state: What `state` returned, in this or another process, on any number of devices.

        Raises:
          ValueError: The state belongs to other data or settings; the message names which.
        """
        if state.get("version") != _STATE_VERSION:
            raise ValueError(
                f"loader: the saved state must have version {_STATE_VERSION}, got "
                f"{state.get('version')!r}; resume with the release that saved it"
            )
        saved: dict[str, Any] = state["order"]
        changed = [
            f"{name} (saved {saved.get(name)!r}, now {value!r})"
            for name, value in self._order.items()
            if saved.get(name) != value
        ]
        if changed:
            raise ValueError(
                f"loader: a run resumes only on the data it was saved with, got another "
                f"{', '.join(changed)}; set them back, or start a new run"
            )
        self._stream.set_state(state["stream"])

    def eval_batches(self) -> Iterator[Batch]:
        """Yields the held-out rows, the same on every call; none without `eval_rows`.

        Every batch has `batch_size` rows; rows of padding fill up the last.
        """
        for start in range(0, len(self._eval), self._batch_size):
            rows = self._eval[start : start + self._batch_size]
            rows = rows + [[]] * (self._batch_size - len(rows))
            yield build_batch(rows, self.documents_tokens, self._seq_len)

    def describe(self) -> str:
        """Returns a few lines for people: what was read, packed, split, left out, held out."""
        report = self.report
        slots = report.rows * self._seq_len
        read = (
            f"{report.documents:,} documents, {report.tokens_in:,} tokens "
            f"({self._tokenizer.name}, vocabulary {self._tokenizer.vocab_size:,})"
        )
        packed = (
            f"{report.rows:,} rows of {self._seq_len:,} tokens, "
            f"{report.padded_tokens / slots:.2%} padding, {report.pieces:,} pieces, "
            f"{report.split_documents:,} documents split over rows"
        )
        used = (
            f"{self.train_rows:,} rows for training ({self.train_rows / self._batch_size:,.1f} "
            f"batches of {self._batch_size:,} an epoch), {self.eval_rows:,} held out"
        )
        lines = [read, packed, used]
        if report.empty_documents:
            lines.append(f"left out: {report.empty_documents:,} empty documents")
        if self._rows_without_labels:
            lines.append(
                f"left out: {self._rows_without_labels:,} rows of one-token documents, "
                f"in which there is nothing to predict"
            )
        return "\n".join(lines)

    @functools.cached_property
    def _stream(self) -> _Stream:
        # Built on first use: importing Grain takes seconds, and not every caller draws batches.
        return _shuffled_stream(
            self._train, self.documents_tokens, self._seq_len, self._batch_size, self._order["seed"]
        )


def make_loader(
    data: str = STDLIB,
    *,
    tokenizer: str = ByteTokenizer.name,
    seq_len: int,
    packing: bool = True,
    batch_size: int,
    seed: int = 0,
    eval_rows: int = 0,
) -> Loader:
    """Builds a loader from configuration values.

    Args:
      data: What `load_documents` takes.
      tokenizer: What `get_tokenizer` takes.
      seq_len: See `Loader`, as the others.
      packing: See `Loader`.
      batch_size: See `Loader`.
      seed: See `Loader`.
      eval_rows: See `Loader`.

    Returns:
      The loader.

    Raises:
      ValueError: See `load_documents`, `get_tokenizer` and `Loader`.
      OSError: See `load_documents`.
    """
    return Loader(
        load_documents(data),
        get_tokenizer(tokenizer),
        seq_len=seq_len,
        packing=packing,
        batch_size=batch_size,
        seed=seed,
        eval_rows=eval_rows,
    )


def _shuffled_stream(
    rows: Sequence[_Row],
    documents_tokens: Sequence[Int32[np.ndarray, "_"]],
    seq_len: int,
    batch_size: int,
    seed: int,
) -> _Stream:
    import grain  # pyright: ignore[reportMissingTypeStubs]

    def assemble(indices: Sequence[int]) -> Batch:
        return build_batch([rows[index] for index in indices], documents_tokens, seq_len)

    # `repeat` passes on indices beyond the first epoch; `shuffle` reads the epoch off the index
    # and draws another order for each. The length is then sys.maxsize, which Grain cannot round up
    # to whole batches, only down: hence `drop_remainder`, though there is no remainder.
    batches = (
        grain.MapDataset.range(len(rows))
        .seed(seed)
        .shuffle()
        .repeat()
        .batch(batch_size, drop_remainder=True, batch_fn=assemble)
    )
    options = grain.ReadOptions(
        num_threads=_PREFETCH_BATCHES, prefetch_buffer_size=_PREFETCH_BATCHES
    )
    return iter(batches.to_iter_dataset(options))


def _hold_out(rows: list[_Row], eval_rows: int, seed: int) -> tuple[list[_Row], list[_Row]]:
    # NumPy promises the raw stream of a bit generator for all releases, but not `permutation`.
    keys = np.random.PCG64(seed).random_raw(len(rows))
    order = [rows[int(index)] for index in np.argsort(keys, kind="stable")]
    split = max(0, len(order) - eval_rows)
    return order[:split], order[split:]


def _encode(tokenizer: Tokenizer, document: Document) -> Int32[np.ndarray, "tokens"]:
    tokens = tokenizer.encode(document.text)
    validate_ids(tokens, tokens, tokenizer.vocab_size, where=f"document {document.name}")
    return tokens


def _digest(documents: Sequence[Document]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for document in documents:
        digest.update(len(document.text).to_bytes(8, "little"))
        digest.update(document.text)
    return digest.hexdigest()


def _check_arguments(batch_size: int, seed: int, eval_rows: int) -> None:
    if batch_size < 1:
        raise ValueError(f"loader: batch_size must be at least 1, got {batch_size}; use 1 or more")
    if eval_rows < 0:
        raise ValueError(
            f"loader: eval_rows must be at least 0, got {eval_rows}; use 0 to hold out nothing"
        )
    if not 0 <= seed <= _MAX_SEED:
        raise ValueError(f"loader: seed must be in [0, {_MAX_SEED}], got {seed}; use one of these")


def _check_fills_a_batch(
    train_rows: int, batch_size: int, eval_rows: int, report: PackReport
) -> None:
    if train_rows >= batch_size:
        return
    smaller = f"batch_size={train_rows}, " if train_rows else ""
    fewer = "fewer eval_rows, " if eval_rows else ""
    raise ValueError(
        f"loader: the training rows must fill at least one batch, got {train_rows} rows for "
        f"batch_size={batch_size} ({report.rows} rows from {report.tokens_in} tokens, "
        f"eval_rows={eval_rows}); use {smaller}{fewer}a shorter seq_len, or more data"
    )
