"""The loader that reads and tokenises while training: bounded memory, no wait for the whole."""

import dataclasses
import hashlib
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int64

from farspan.data.batch import Batch, empty_batch
from farspan.data.corpus import HeldOut
from farspan.data.counts import Counts
from farspan.data.loader import Loader
from farspan.data.mixture import Interleave, Part
from farspan.data.reading.sources import Source
from farspan.data.windows import Place, Window, WindowReader


@dataclass(frozen=True, eq=False)
class StreamMember:
    """One source of a loader.

    Attributes:
      part: What the mixture says of it.
      source: Where its records come from.
      reader: Reads its windows.
    """

    part: Part
    source: Source
    reader: WindowReader


class StreamLoader(Loader):
    """Yields rows of windows, shuffled inside each window; the next is read in the background.

    Each epoch of a source reads every record of it exactly once. Rows of several sources alternate
    by their weights.

    Args:
      members: The sources.
      held_out: Rows for evaluation.
      order: See `Loader`.
      vocab_size: See `Loader`.
      description: What is said of the tokenizer and the windows.
    """

    def __init__(
        self,
        members: Sequence[StreamMember],
        *,
        held_out: HeldOut,
        order: dict[str, Any],
        vocab_size: int,
        description: str,
    ):
        super().__init__(order=order, held_out=held_out, vocab_size=vocab_size, unigram_loss=None)
        self._members = members
        self._interleave = Interleave([member.part.weight for member in members])
        self._batch_size, self._seq_len = held_out.batch_size, held_out.seq_len
        self._description = description
        self._streams = [RowStream(member.part.data, member.reader) for member in members]
        self._rows = 0

    def __next__(self) -> Batch:
        batch = empty_batch(self._batch_size, self._seq_len)
        for row in range(self._batch_size):
            source, _ = self._interleave[self._rows]
            self._streams[source].fill_next(batch, row)
            self._rows += 1
        return batch

    def document_lengths(self) -> Int64[np.ndarray, "documents"]:
        """See `Loader`."""
        raise NotImplementedError(
            "loader: a stream does not know its documents before it has read them; do without "
            "streaming"
        )

    def describe(self) -> str:
        """See `Loader`."""
        found = [self._description]
        members = zip(self._members, self._streams, self._interleave.shares, strict=True)
        for member, stream, share in members:
            of_rows = f", {share:.2%} of the rows" if len(self._members) > 1 else ""
            found.append(
                f"{member.part.data}: {len(member.source.shards):,} shards, read while "
                f"training{of_rows}"
            )
            if stream.counts.documents:
                found += stream.counts.lines(self._seq_len)
        found.append(f"{self.eval_rows:,} rows held out")
        return "\n".join(found)

    def close(self) -> None:
        """See `Loader`."""
        for stream in self._streams:
            stream.close()

    def _position(self) -> Any:
        return {"rows": self._rows, "sources": [stream.position() for stream in self._streams]}

    def _go_to(self, position: Any) -> None:
        self._rows = position["rows"]
        for stream, place in zip(self._streams, position["sources"], strict=True):
            stream.go_to(place)

    def _counts(self) -> Counts:
        return sum((stream.counts for stream in self._streams), Counts())


class RowStream:
    """The rows of one source, window after window; a thread reads one window ahead.

    Args:
      name: What the source is called, for messages.
      reader: Reads its windows; only this stream uses it from now on.
    """

    def __init__(self, name: str, reader: WindowReader):
        self._name = name
        self._reader = reader
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="farspan-stream")
        self._start(Place(), used=0, digest="", before=Counts())

    def fill_next(self, batch: Batch, row: int) -> None:
        """Lays the next row out as row `row` of `batch`.

        Raises:
          ValueError: The data are not those of the state that was restored, or hold no row to train
            on.
          Exception: Whatever reading them raised.
        """
        self._to_unused_row().fill(batch, row, self._used)
        self._used += 1

    @property
    def counts(self) -> Counts:
        """Counts of the windows begun; any thread may ask."""
        return self._begun

    def position(self) -> dict[str, Any]:
        """Returns the place of the next row, as JSON values."""
        current = self._current
        return {
            **dataclasses.asdict(self._place),
            "used": self._used,
            "digest": self._expected if current is None else current.digest,
            "before": dataclasses.asdict(self._before),
        }

    def go_to(self, position: dict[str, Any]) -> None:
        """Goes to a place that `position` returned."""
        names = [field.name for field in dataclasses.fields(Place)]
        self._start(
            Place(**{name: position[name] for name in names}),
            used=position["used"],
            digest=position["digest"],
            before=Counts(**position["before"]),
        )

    def close(self) -> None:
        """Ends the threads."""
        self._reader.interrupt()
        self._thread.shutdown(cancel_futures=True)
        self._reader.close()

    def _start(self, place: Place, *, used: int, digest: str, before: Counts) -> None:
        self._place, self._used, self._expected = place, used, digest
        self._before = self._begun = before  # counts without and with the current window
        self._current: Window | None = None
        self._ahead: Future[Window] | None = None

    def _to_unused_row(self) -> Window:
        first_epoch = self._place.epoch
        while self._current is None or self._used == len(self._current.order):
            if self._current is not None:
                following = self._current.after
                if following.epoch > first_epoch + 1:
                    raise ValueError(
                        f"loader: every source must have a row to train on, got none in a whole "
                        f"epoch of {self._name} ({self.counts.tokens_in} tokens read); use a "
                        f"longer seq_len, or more data"
                    )
                self._before = self._begun
                self._place, self._used, self._current = following, 0, None
            self._current = self._receive()
            self._begun = self._before + self._current.counts
        return self._current

    def _receive(self) -> Window:
        if self._ahead is None:
            self._ahead = self._thread.submit(self._reader.read, self._place)
        window = self._ahead.result()
        if self._expected and window.digest != self._expected:
            raise ValueError(
                f"loader: a run resumes only on the data it was saved with, got other text in "
                f"{self._name} at {self._place}; restore the data, or start a new run"
            )
        self._expected = ""
        self._ahead = self._thread.submit(self._reader.read, window.after)
        return window


def source_identity(source: Source) -> str:
    """Returns a digest of what a source reads, wherever it lies: its files' names and versions."""
    digest = hashlib.blake2b(digest_size=16)
    for shard in source.shards:
        digest.update(f"{shard.name}\0{shard.fingerprint}\0".encode(errors="surrogateescape"))
    return digest.hexdigest()
