"""An endless, shuffled, resumable stream of batches."""

import dataclasses
from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

import numpy as np
from jaxtyping import Int64

from farspan.data.batch import Batch
from farspan.data.corpus import HeldOut
from farspan.data.counts import Counts
from farspan.data.seeds import MAX_SEED

_STATE_VERSION = 2


class Loader(Iterator[Batch]):
    """Yields training batches without end, and the same held-out rows whenever they are asked for.

    Rows are in the order of the text: the layout permutes them on the way to the devices. Every
    process that builds a loader with the same arguments gets the same global batches.

    Args:
      order: Everything that the order of the batches depends on, as JSON values.
      held_out: Rows for evaluation.
      vocab_size: Every token id is below this.
      unigram_loss: Loss of the best predictor that sees no context, in nats a token; None where it
        is not known.

    Attributes:
      vocab_size: As given.
      unigram_loss: As given.
    """

    def __init__(
        self,
        *,
        order: dict[str, Any],
        held_out: HeldOut,
        vocab_size: int,
        unigram_loss: float | None,
    ):
        self.vocab_size = vocab_size
        self.unigram_loss = unigram_loss
        self._order = order
        self._held_out = held_out

    @abstractmethod
    def __next__(self) -> Batch: ...

    def state(self) -> dict[str, Any]:
        """Returns the place in the stream: the batches yielded so far, not those prefetched.

        Returns:
          A value for `restore` that `json` can write; about a kilobyte for each source.
        """
        return {
            "version": _STATE_VERSION,
            "order": dict(self._order),
            "stream": self._position(),
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
            f"{name} (saved {saved.get(name)!r}, now {self._order.get(name)!r})"
            for name in {**self._order, **saved}
            if saved.get(name) != self._order.get(name)
        ]
        if changed:
            raise ValueError(
                f"loader: a run resumes only on the data it was saved with, got another "
                f"{', '.join(changed)}; set them back, or start a new run"
            )
        self._go_to(state["stream"])

    @property
    def eval_rows(self) -> int:
        """Rows held out."""
        return len(self._held_out)

    def eval_batches(self) -> Iterator[Batch]:
        """Yields the held-out rows, the same on every call; nothing where there are none.

        Every batch has `batch_size` rows; rows of padding fill up the last.
        """
        return self._held_out.batches()

    @abstractmethod
    def document_lengths(self) -> Int64[np.ndarray, "documents"]:
        """Returns the tokens of each document, of all sources one after another.

        Raises:
          NotImplementedError: They are not known before the data is read, as in streaming.
        """

    def counts(self) -> dict[str, int | float]:
        """Returns what became of every document, token and row; see `Counts`.

        Over all sources: of one epoch of each, or, in streaming, of the windows begun so far.
        """
        return dataclasses.asdict(self._counts())

    @abstractmethod
    def describe(self) -> str:
        """Returns a few lines for people: what was read, packed, repeated, left out, held out."""

    def close(self) -> None:
        """Ends the work in the background; the loader yields nothing more."""

    @abstractmethod
    def _position(self) -> Any:
        """The place in the stream as JSON values."""

    @abstractmethod
    def _go_to(self, position: Any) -> None:
        """Goes to what `_position` returned."""

    @abstractmethod
    def _counts(self) -> Counts:
        """The counts of all sources."""


def check_arguments(*, seq_len: int, batch_size: int, seed: int, eval_rows: int) -> None:
    """Checks the ranges of what every loader takes.

    Raises:
      ValueError: One is out of range.
    """
    if seq_len < 1:
        raise ValueError(f"loader: seq_len must be at least 1, got {seq_len}; use 2 or more")
    if batch_size < 1:
        raise ValueError(f"loader: batch_size must be at least 1, got {batch_size}; use 1 or more")
    if eval_rows < 0:
        raise ValueError(
            f"loader: eval_rows must be at least 0, got {eval_rows}; use 0 to hold out nothing"
        )
    if not 0 <= seed <= MAX_SEED:
        raise ValueError(f"loader: seed must be in [0, {MAX_SEED}], got {seed}; use one of these")
