"""Streaming: a source read a window of rows at a time, from any place in it."""

import dataclasses
import hashlib
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64

from farspan.data.batch import Batch, Scored, Tokens, fill_row
from farspan.data.cache.encoding import encode_in_order
from farspan.data.corpus import labelled_rows, pack_documents
from farspan.data.counts import Counts, packed
from farspan.data.document import Record
from farspan.data.mixture import LengthWeights
from farspan.data.packing import Packing, Rows
from farspan.data.reading.sources import Source
from farspan.data.seeds import derive_seed, permutation
from farspan.data.tokens.encode import Encoded, Encoder

# Place in the epoch's order of shards, record, and a random number in [0, 1).
_Origin = tuple[int, int, float]


@dataclass(frozen=True)
class Place:
    """Where a window begins.

    Attributes:
      epoch: Times that the source has been read through before it.
      window: Windows of this epoch before it.
      shard: Place in the epoch's order of shards.
      record: Records of this shard before it.
    """

    epoch: int = 0
    window: int = 0
    shard: int = 0
    record: int = 0


@dataclass(frozen=True, eq=False)
class Window:
    """Records in a row of the source, packed among themselves.

    Attributes:
      place: Where it begins.
      after: Where the next begins.
      tokens: Token ids of each document.
      scored: Which tokens of each may be labels; None: all.
      rows: The rows, among them those in which nothing is predicted.
      order: The others in the order in which they are trained on, int64.
      counts: What was read and packed.
      digest: Of all tokens of the window.
    """

    place: Place
    after: Place
    tokens: Sequence[Tokens]
    scored: Sequence[Scored | None]
    rows: Rows
    order: Int64[np.ndarray, "_"]
    counts: Counts
    digest: str

    def fill(self, batch: Batch, place: int, index: int) -> None:
        """Lays the row that comes at `index` in `order` out as row `place` of `batch`."""
        fill_row(batch, place, self.rows[int(self.order[index])], self.tokens, self.scored)


@dataclass(frozen=True)
class WindowSettings:
    """How windows are made.

    Attributes:
      seq_len: Tokens a row.
      packing: See `pack`.
      window_rows: A window ends with the record that brings it to so many rows' worth of tokens.
      seed: Fixes the order of shards and rows.
      length_weights: How often documents are seen.
    """

    seq_len: int
    packing: Packing
    window_rows: int
    seed: int
    length_weights: LengthWeights


class WindowReader:
    """Reads windows. Memory is bounded by a window and what the encoder reads ahead.

    Every record of the source is in exactly one window of an epoch. Epochs visit shards in another
    order each.

    Args:
      source: What to read.
      encoder: Makes the ids.
      settings: How windows are made.
    """

    def __init__(self, source: Source, encoder: Encoder, settings: WindowSettings):
        self._source = source
        self._encoder = encoder
        self._settings = settings
        self._closed = threading.Event()
        self._next: Place | None = None
        self._stream: Generator[tuple[_Origin, Record, Encoded]] | None = None

    def read(self, place: Place) -> Window:
        """Reads the window that begins at `place`; the one after it is read on from there.

        Raises:
          Exception: Whatever reading or encoding raises.
        """
        stream = self._stream
        if stream is None or place != self._next:
            self.close()
            stream = self._stream = encode_in_order(self._records(place), self._encoder)
        found = _Found(self._settings.length_weights)
        target = self._settings.window_rows * self._settings.seq_len
        after = Place(place.epoch + 1)
        try:
            for (shard, record, draw), _, encoded in stream:
                found.add(encoded, draw)
                if found.tokens_to_pack >= target:
                    after = Place(place.epoch, place.window + 1, shard, record + 1)
                    break
        except BaseException:
            self.close()
            raise
        if after.epoch != place.epoch:
            self.close()
        self._next = after
        return self._window(place, after, found)

    def interrupt(self) -> None:
        """Lets the window that is being read in another thread end early; none is read after it."""
        self._closed.set()

    def close(self) -> None:
        """Ends the threads that encode; a later window would start them again."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _records(self, place: Place) -> Iterator[tuple[_Origin, Record]]:
        seed = self._settings.seed
        shards = permutation(len(self._source.shards), derive_seed(seed, "shards", place.epoch))
        skip = place.record
        for number in range(place.shard, len(shards)):
            shard = self._source.shards[shards[number]]
            for record, content in enumerate(shard.records(skip), start=skip):
                if self._closed.is_set():
                    return
                # Of the record's own, the same in every epoch.
                draw = derive_seed(seed, "occurrences", shard.name, record) / 2**32
                yield (number, record, draw), content
            skip = 0

    def _window(self, place: Place, after: Place, found: "_Found") -> Window:
        settings = self._settings
        lengths = np.array([len(tokens) for tokens in found.tokens], np.int64)
        rows, report = pack_documents(
            lengths, found.documents(), settings.seq_len, settings.packing
        )
        labelled = np.flatnonzero(labelled_rows(rows, lengths, found.is_scored()))
        seed = derive_seed(settings.seed, "window", place.epoch, place.window)
        sizes = rows.tokens()
        train = int(sizes[labelled].sum())
        counts = dataclasses.replace(
            packed(report) + found.counts,
            rows_train=len(labelled),
            rows_unlabelled=len(rows) - len(labelled),
            tokens_train=train,
            tokens_unlabelled=int(sizes.sum()) - train,
        )
        return Window(
            place=place,
            after=after,
            tokens=found.tokens,
            scored=found.scored,
            rows=rows,
            order=labelled[permutation(len(labelled), seed)],
            counts=counts,
            digest=_digest(lengths, found.tokens),
        )


class _Found:
    """The documents of a window, and how often each is seen."""

    def __init__(self, weights: LengthWeights):
        self.tokens: list[Tokens] = []
        self.scored: list[Scored | None] = []
        self.tokens_to_pack = 0
        self.counts = Counts()
        self._times: list[int] = []
        self._weights = weights

    def add(self, encoded: Encoded, draw: float) -> None:
        length = len(encoded.tokens)
        times = 1
        if self._weights.thresholds:
            times = int(self._weights.occurrences(np.array([length]), np.array([draw]))[0])
        times = times if length else 0
        self.tokens.append(encoded.tokens)
        self.scored.append(encoded.scored)
        self._times.append(times)
        self.tokens_to_pack += times * length
        left_out, again = length > 0 and times == 0, max(0, times - 1)
        self.counts += Counts(
            documents=1,
            documents_empty=int(length == 0),
            documents_left_out=int(left_out),
            documents_repeated=again,
            tokens_in=length,
            tokens_left_out=length * left_out,
            tokens_repeated=length * again,
        )

    def documents(self) -> Int64[np.ndarray, "_"]:
        """Every document as often as it is seen, first each once, then those seen again."""
        times = np.array(self._times, np.int64)
        rounds = [np.flatnonzero(times > n) for n in range(int(times.max(initial=0)))]
        return np.concatenate([np.zeros(0, np.int64), *rounds])

    def is_scored(self) -> Callable[[int, int, int], bool] | None:
        """See `labelled_rows`."""
        if all(scored is None for scored in self.scored):
            return None

        def any_scored(document: int, begin: int, end: int) -> bool:
            scored = self.scored[document]
            return scored is None or bool(scored[begin:end].any())

        return any_scored


def _digest(lengths: Int64[np.ndarray, "_"], tokens: Sequence[Tokens]) -> str:
    digest = hashlib.blake2b(lengths.astype("<i8").tobytes(), digest_size=16)
    for each in tokens:
        digest.update(each.astype("<i4").tobytes())
    return digest.hexdigest()
