"""The loader over tokenised data that lies in the cache: any row at any time."""

import functools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int64

from farspan.data.baseline import entropy
from farspan.data.batch import Batch, empty_batch
from farspan.data.corpus import Corpus, HeldOut
from farspan.data.counts import Counts
from farspan.data.loader import Loader
from farspan.data.mixture import Interleave, Part
from farspan.data.seeds import derive_seed

_PREFETCH_BATCHES = 2


@runtime_checkable
class _Stream(Protocol):
    """What is used of Grain's iterator."""

    def __next__(self) -> Batch: ...
    def get_state(self) -> dict[str, Any]: ...
    def set_state(self, state: dict[str, Any]) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True, eq=False)
class Member:
    """One source of a loader.

    Attributes:
      part: What the mixture says of it.
      corpus: Its rows.
    """

    part: Part
    corpus: Corpus


class RandomAccessLoader(Loader):
    """Yields the rows of tokenised sources, each shuffled as a whole and anew in every epoch.

    Each epoch of a source visits every training row of it exactly once. The last batch of an epoch
    is filled up with the first rows of the next, so no row is left out. Rows of several sources
    alternate by their weights.

    Args:
      members: The sources.
      held_out: Rows for evaluation.
      order: See `Loader`; it holds the seed.
      vocab_size: See `Loader`.
      description: What is said of the tokenizer.

    Raises:
      ValueError: There are fewer training rows than a batch needs.
    """

    def __init__(
        self,
        members: Sequence[Member],
        *,
        held_out: HeldOut,
        order: dict[str, Any],
        vocab_size: int,
        description: str,
    ):
        self._members = members
        self._interleave = Interleave([member.part.weight for member in members])
        self._batch_size, self._seq_len = held_out.batch_size, held_out.seq_len
        self._description = description
        _check_fills_a_batch(members, self._batch_size)
        counts = [member.corpus.store.token_counts for member in members]
        shares = self._interleave.shares
        mixed = np.sum(
            [s * of / max(1, of.sum()) for s, of in zip(shares, counts, strict=True)], axis=0
        )
        super().__init__(
            order=order,
            held_out=held_out,
            vocab_size=vocab_size,
            unigram_loss=entropy(mixed),
        )

    def __next__(self) -> Batch:
        return next(self._stream)

    def document_lengths(self) -> Int64[np.ndarray, "documents"]:
        """See `Loader`."""
        return np.concatenate([member.corpus.store.lengths for member in self._members])

    def describe(self) -> str:
        """See `Loader`."""
        found = [self._description]
        for member, share in zip(self._members, self._interleave.shares, strict=True):
            counts = member.corpus.counts
            found += [f"{member.part.data} ({share:.2%} of the rows):"] * (len(self._members) > 1)
            found += counts.lines(self._seq_len)
            batches = counts.rows_train / (self._batch_size * share)
            found.append(
                f"{counts.rows_train:,} rows for training, each seen once in {batches:,.1f} "
                f"batches of {self._batch_size:,}"
            )
        found.append(f"{self.eval_rows:,} rows held out")
        return "\n".join(found)

    def close(self) -> None:
        """See `Loader`."""
        if "_stream" in self.__dict__:
            self._stream.close()

    def _position(self) -> Any:
        return self._stream.get_state()

    def _go_to(self, position: Any) -> None:
        self._stream.set_state(position)

    def _counts(self) -> Counts:
        return sum((member.corpus.counts for member in self._members), Counts())

    @functools.cached_property
    def _stream(self) -> _Stream:
        # Built on first use: importing Grain takes seconds, and not every caller draws batches.
        import grain  # pyright: ignore[reportMissingTypeStubs]

        # `repeat` passes on indices beyond the first epoch; `shuffle` reads the epoch off the index
        # and draws another order for each.
        orders = [
            grain.MapDataset.range(len(member.corpus.train))
            .shuffle(seed=derive_seed(self._order["seed"], "order", number))
            .repeat()
            for number, member in enumerate(self._members)
        ]

        def assemble(places: Sequence[int]) -> Batch:
            batch = empty_batch(self._batch_size, self._seq_len)
            for row, place in enumerate(places):
                source, index = self._interleave[place]
                corpus = self._members[source].corpus
                corpus.fill(batch, row, int(corpus.train[orders[source][index]]))
            return batch

        # Grain cannot round a length of sys.maxsize up to whole batches, only down: hence
        # `drop_remainder`, though there is no remainder.
        batches = grain.MapDataset.range(sys.maxsize).batch(
            self._batch_size, drop_remainder=True, batch_fn=assemble
        )
        options = grain.ReadOptions(
            num_threads=_PREFETCH_BATCHES, prefetch_buffer_size=_PREFETCH_BATCHES
        )
        return iter(batches.to_iter_dataset(options))


def _check_fills_a_batch(members: Sequence[Member], batch_size: int) -> None:
    eval_rows = sum(member.corpus.counts.rows_eval for member in members)
    held = "fewer eval_rows, " if eval_rows else ""
    for member in members:
        if member.corpus.counts.rows_train == 0:
            raise ValueError(
                f"loader: every source must have a row to train on, got 0 rows of "
                f"{member.part.data} ({member.corpus.counts.rows} rows from "
                f"{member.corpus.counts.tokens_in} tokens, {member.corpus.counts.rows_eval} held "
                f"out); use {held}a shorter seq_len, or more data"
            )
    rows = sum(member.corpus.counts.rows_train for member in members)
    if rows < batch_size:
        raise ValueError(
            f"loader: the training rows must fill at least one batch, got {rows} rows for "
            f"batch_size={batch_size} ({eval_rows} rows held out); use batch_size={rows}, {held}"
            f"a shorter seq_len, or more data"
        )
