"""Saying once in a while how far long work is."""

import time

_EVERY_SECONDS = 1.0


def ignore(message: str) -> None:
    """Takes a message and does nothing with it."""
    del message


class Ticker:
    """Says when about a second has passed since the last time."""

    def __init__(self):
        self._last = time.monotonic()

    def is_due(self) -> bool:
        """Says whether a second has passed since this last said yes, or since the start."""
        now = time.monotonic()
        due = now - self._last >= _EVERY_SECONDS
        if due:
            self._last = now
        return due


def short(count: int, unit: str = "") -> str:
    """Returns a count in three figures: `short(1_234_567)` is "1.23M", of bytes "1.23 MB"."""
    gap = " " if unit else ""
    for scale, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= scale:
            return f"{count / scale:.3g}{gap}{prefix}{unit}"
    return f"{count:.3g}{gap}{unit}"
