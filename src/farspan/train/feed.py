"""Batches, made ready ahead of the step that needs them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from farspan.data.batch import Batch

_DEPTH = 2


@runtime_checkable
class Source(Protocol):
    """What the feed needs of a loader: batches, and a state from which to go on after each."""

    def __iter__(self) -> Iterator[Batch]: ...

    def state(self) -> Any:
        """Place in the stream, after the batches drawn so far."""
        ...


@runtime_checkable
class Placer(Protocol):
    """What the feed needs of the training set-up."""

    def place(self, batch: Batch) -> Any:
        """Permutes a batch by the layout and puts it on the devices."""
        ...

    def flops_per_step(self, batch: Batch) -> int:
        """Model FLOPs of the batch, forward and backward."""
        ...


@dataclass(frozen=True)
class Fed:
    """One batch, ready for the step.

    Attributes:
      batch: On the host, in the order of the text.
      device_batch: Permuted by the layout and placed on the devices.
      flops: Model FLOPs of the batch, forward and backward.
      loader_state: State from which the loader gives the batch after this one.
    """

    batch: Batch
    device_batch: Any
    flops: int
    loader_state: Any


class Feed:
    """Reads, permutes and places batches in a thread while the devices compute.

    Use as a context manager; `next` raises what the thread raised.
    """

    def __init__(self, source: Source, placer: Placer) -> None:
        """Starts reading.

        Args:
          source: A loader; only this feed advances it from now on.
          placer: Puts a batch on the devices and counts its FLOPs.
        """
        self._source = source
        self._placer = placer
        self._ready: queue.Queue[Fed | BaseException] = queue.Queue(maxsize=_DEPTH)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._work, name="farspan-feed", daemon=True)
        self._thread.start()

    def next(self) -> Fed:
        """The next batch; waits for it when it is not ready.

        Raises:
          RuntimeError: The data has ended.
          Exception: Whatever the loader or the placement raised.
        """
        item = self._ready.get()
        if isinstance(item, BaseException):
            raise item
        return item

    def _work(self) -> None:
        try:
            for batch in self._source:
                state = self._source.state()
                placed = self._placer.place(batch)
                if not self._offer(Fed(batch, placed, self._placer.flops_per_step(batch), state)):
                    return
            self._offer(RuntimeError("data: the loader ended before the run did"))
        except BaseException as error:
            self._offer(error)

    def _offer(self, item: Fed | BaseException) -> bool:
        while not self._closed.is_set():
            try:
                self._ready.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def __enter__(self) -> Feed:
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join(timeout=10)
