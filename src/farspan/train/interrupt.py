"""SIGTERM and SIGINT end a run after the step in progress, so that it can save."""

from __future__ import annotations

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType


class StopRequest:
    """Whether, and by which signal, this process was asked to stop."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def __bool__(self) -> bool:
        return self.signal is not None

    def __str__(self) -> str:
        return self.signal.name if self.signal else "no signal"


@contextmanager
def stop_on_signals() -> Generator[StopRequest, None, None]:
    """Turns the first SIGTERM or SIGINT into a request; a second one acts at once, as usual.

    Outside the main thread, where Python allows no handlers, signals keep their meaning.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    previous = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def restore() -> None:
        for number, handler in previous.items():
            signal.signal(number, handler)

    def handle(number: int, frame: FrameType | None) -> None:
        del frame
        request.signal = signal.Signals(number)
        restore()

    for number in previous:
        signal.signal(number, handle)
    try:
        yield request
    finally:
        restore()
