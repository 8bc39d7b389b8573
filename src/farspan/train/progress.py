"""What a run shows while it works: a live bar in a terminal, plain lines elsewhere."""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any

from rich.console import Console, RenderableType
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from farspan.train.metrics import MFU_CONVENTION, EvalRecord, StepRecord

_SECONDS_BETWEEN_DETAILS = 10
_GIB = 2**30
_BLOCKS = "▁▂▃▄▅▆▇█"


class Reporter:
    """Prints the phases and steps of one run to standard output."""

    def __init__(
        self,
        log_every: int,
        console: Console | None = None,
        *,
        quiet: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Makes a reporter.

        Args:
          log_every: Steps between lines when the output is not a terminal.
          console: Where to print; standard output by default.
          quiet: Print nothing, as in all processes of a run but one.
          clock: Seconds since some moment.
        """
        silent = Console(quiet=True, force_terminal=False)
        self._console = silent if quiet else console or Console(highlight=False)
        self._log_every = log_every
        self._clock = clock
        self._bar: _Bar | None = None
        self._recent: deque[float] = deque(maxlen=20)
        self._total = 0
        self._line_is_open = False
        self._explained = False

    def note(self, text: str) -> None:
        """Prints one line at once."""
        self._end_line()
        self._console.print(escape(text), soft_wrap=True)
        self._console.file.flush()

    @contextmanager
    def phase(self, text: str) -> Generator[Callable[[str], None], None, None]:
        """Announces a silent piece of work before it starts, and says how long it took.

        Args:
          text: What is done.

        Yields:
          Shows how far the work has come, in words: at once in a terminal; elsewhere in a line of
          its own, at most every ten seconds.
        """
        start = self._clock()
        if self._console.is_terminal:
            with self._live(text) as update:
                yield update
        else:
            with self._lines(text, start) as update:
                yield update
        took = f"{self._clock() - start:.1f} s"
        if self._line_is_open:
            self._line_is_open = False
            self._console.print(took)
            self._console.file.flush()
        else:
            self.note(f"{text}: {took}")

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
        """Shows a step: moves the bar, or prints a line when it is due; a skipped step is noted."""
        if record.compiled:  # such a step, and those of another stage, say nothing about the rest
            self._recent.clear()
        else:
            self._recent.append(record.step_seconds)
        if record.mfu is not None and not self._explained:
            self._explained = True
            self.note(f"TFLOP/s and MFU count {MFU_CONVENTION}")
        if not record.finite:
            self.note(
                f"step {record.step} skipped: loss {record.loss:.4g}, gradient norm "
                f"{record.grad_norm:.4g}; the parameters stay as they were"
            )
        left = self._total - record.step
        eta = _clock(left * sum(self._recent) / len(self._recent)) if self._recent else "-:--"
        if self._bar is not None:
            self._bar.show(_describe(record), completed=record.step, eta=eta)
        elif record.compiled or left == 0 or record.step % self._log_every == 0:
            self.note(f"step {record.step}/{self._total}  {_describe(record)}  ETA {eta}")

    def evaluation(self, record: EvalRecord) -> None:
        """Prints what an evaluation found."""
        ema = "" if record.eval_loss_ema is None else f" (EMA {record.eval_loss_ema:.4f})"
        self.note(
            f"eval step {record.step}: loss {record.eval_loss:.4f}{ema} over "
            f"{record.eval_tokens:,} tokens in {record.eval_seconds:.1f} s"
        )

    @contextmanager
    def _live(self, text: str) -> Generator[Callable[[str], None], None, None]:
        bar = self._bar
        if bar is not None:
            bar.show(f"{text} ...")
            yield lambda detail: bar.show(f"{text} ... {detail}")
            return
        with self._console.status(f"{escape(text)} ...") as status:
            yield lambda detail: status.update(f"{escape(text)} ... {escape(detail)}")

    @contextmanager
    def _lines(self, text: str, start: float) -> Generator[Callable[[str], None], None, None]:
        said = start

        def update(detail: str) -> None:
            nonlocal said
            now = self._clock()
            if now - said >= _SECONDS_BETWEEN_DETAILS:
                said = now
                self.note(f"{text}: {detail}")

        self._end_line()
        self._console.print(f"{escape(text)} ...", end=" ", soft_wrap=True)
        self._console.file.flush()
        self._line_is_open = True
        try:
            yield update
        except BaseException:
            self._end_line()
            raise

    def _end_line(self) -> None:
        """Ends the line of a phase that has not said yet how long it took."""
        if self._line_is_open:
            self._line_is_open = False
            self._console.print()


def loss_curve(losses: Iterable[float | None], width: int = 32) -> str:
    """The losses of a run as one word of blocks, such as `█▆▄▃▂▁ 5.51 -> 2.40`.

    Args:
      losses: Loss of each step, in order; those that are None or not finite are left out.
      width: Most blocks. Each stands for the mean over equally many steps, but for rounding; the
        numbers are those of the first and the last block.

    Returns:
      The curve; empty for fewer than two losses.
    """
    found = [loss for loss in losses if loss is not None and math.isfinite(loss)]
    if len(found) < 2:
        return ""
    count = min(width, len(found))
    edges = [index * len(found) // count for index in range(count + 1)]
    means = [sum(found[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, spread = min(means), max(means) - min(means)
    heights = [round((mean - low) / spread * (len(_BLOCKS) - 1)) if spread else 0 for mean in means]
    return f"{''.join(_BLOCKS[height] for height in heights)} {means[0]:.4g} -> {means[-1]:.4g}"


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
    parts = [
        f"loss {record.loss:.4f}",
        f"{record.tokens_per_second:,.0f} tokens/s",
        f"{record.tflops_per_device:.4g} TFLOP/s per device",
    ]
    if record.mfu is not None:
        parts.append(f"MFU {record.mfu:.1%}")
    parts.append(f"data wait {record.data_wait_seconds:.2f} s")
    if record.memory_bytes is not None:
        parts.append(f"mem {record.memory_bytes / _GIB:.1f} GiB")
    if record.goodput is not None:
        parts.append(f"goodput {record.goodput:.0%}")
    return "  ".join(parts)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
