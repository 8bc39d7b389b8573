"""A trace of a few steps, for XProf or TensorBoard."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import jax

PROFILE_FOLDER = "profile"
_STEPS_BEFORE, _STEPS_TRACED = 2, 3


class Profiler:
    """Traces the third, fourth and fifth step of a launch. Use as a context manager.

    The first step compiles, and the second may still be slow, so neither is traced.
    """

    def __init__(
        self, run_dir: Path, first_step: int, *, enabled: bool, note: Callable[[str], None]
    ) -> None:
        """Plans a trace; nothing is written yet.

        Args:
          run_dir: Folder of the run; the trace goes into `profile` there.
          first_step: First step of this launch.
          enabled: Whether to trace at all.
          note: Prints one line: where the trace is, or that there is none.
        """
        self._folder = run_dir / PROFILE_FOLDER
        self._first = first_step + _STEPS_BEFORE
        self._wanted = enabled
        self._note = note
        self._traced = 0
        self._tracing = False

    @contextmanager
    def step(self, number: int) -> Generator[None, None, None]:
        """Goes round one step.

        Args:
          number: Number of the step. It must wait for its devices in the block, or what they still
            do is not in the trace.
        """
        if self._wanted and not self._tracing and number >= self._first:
            jax.profiler.start_trace(self._folder)
            self._tracing = True
        if not self._tracing:
            yield
            return
        with jax.profiler.StepTraceAnnotation("train", step_num=number):
            yield
        self._traced += 1
        if self._traced == _STEPS_TRACED:
            self._stop()

    def __enter__(self) -> Profiler:
        return self

    def __exit__(self, *_: object) -> None:
        if self._tracing:
            self._stop()
        elif self._wanted:
            self._note(
                f"no trace was written: the launch ended before step {self._first}, the first of "
                "those traced"
            )

    def _stop(self) -> None:
        self._tracing = self._wanted = False
        jax.profiler.stop_trace()
        self._note(f"trace of {self._traced} steps in {self._folder}")
