"""What a run shows while it works: a live bar in a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from rich.console import Console, RenderableType
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from farspan.train.metrics import StepRecord


class Reporter:
    """Prints the phases and steps of one run to standard output."""

    def __init__(self, log_every: int, console: Console | None = None) -> None:
        """Makes a reporter.

        Args:
          log_every: Steps between lines when the output is not a terminal.
          console: Where to print; standard output by default.
        """
        self._console = console or Console(highlight=False)
        self._log_every = log_every
        self._bar: _Bar | None = None
        self._recent: deque[float] = deque(maxlen=20)
        self._total = 0
        self._started = False

    def note(self, text: str) -> None:
        """Prints one line at once."""
        self._console.print(escape(text), soft_wrap=True)
        self._console.file.flush()

    @contextmanager
    def phase(self, text: str) -> Generator[None, None, None]:
        """Announces a silent piece of work before it starts, and says how long it took."""
        start = time.monotonic()
        if not self._console.is_terminal:
            self._console.print(f"{escape(text)} ...", end=" ", soft_wrap=True)
            self._console.file.flush()
            try:
                yield
            except BaseException:
                self.note("")  # ends the line
                raise
            self.note(f"{time.monotonic() - start:.1f} s")
            return
        if self._bar is not None:
            self._bar.show(f"{text} ...")
            yield
        else:
            with self._console.status(f"{escape(text)} ..."):
                yield
        self.note(f"{text}: {time.monotonic() - start:.1f} s")

    @contextmanager
    def steps(self, done: int, total: int) -> Generator[None, None, None]:
        """Shows progress from `done` to `total` steps while the block runs."""
        self._total = total
        if not self._console.is_terminal:
            yield
            return
        with _Bar(self._console, done, total) as self._bar:
            yield
        self._bar = None

    def step(self, record: StepRecord) -> None:
        """Shows a step: moves the bar, or prints a line when it is due."""
        first, self._started = not self._started, True
        if not first:  # the first step compiles and says nothing about the rest
            self._recent.append(record.step_seconds)
        left = self._total - record.step
        eta = _clock(left * sum(self._recent) / len(self._recent)) if self._recent else "-:--"
        if self._bar is not None:
            self._bar.show(_describe(record), completed=record.step, eta=eta)
        elif first or left == 0 or record.step % self._log_every == 0:
            self.note(f"step {record.step}/{self._total}  {_describe(record)}  ETA {eta}")


class _Bar(Progress):
    """A progress bar with a line of text beneath it."""

    def __init__(self, console: Console, done: int, total: int) -> None:
        super().__init__(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("ETA {task.fields[eta]}"),
            console=console,
        )
        self._task = self.add_task("", total=total, completed=done, eta="-:--")

    def show(self, text: str, **fields: Any) -> None:
        """Replaces the line beneath the bar; `completed` and `eta` change the bar itself."""
        self.update(self._task, description=text, **fields)

    def get_renderables(self) -> Generator[RenderableType, None, None]:
        """The bar, then the line."""
        yield self.make_tasks_table(self.tasks)
        yield Text("".join(task.description for task in self.tasks))


def _describe(record: StepRecord) -> str:
    mfu = "" if record.mfu is None else f"  MFU {record.mfu:.1%}"
    return (
        f"loss {record.loss:.4f}  {record.tokens_per_second:,.0f} tokens/s  "
        f"{record.tflops_per_device:.4g} TFLOP/s per device{mfu}  "
        f"data wait {record.data_wait_seconds:.2f} s"
    )


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
