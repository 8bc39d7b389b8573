"""Runs implementations of one problem by turns, and judges what they give."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from peers import Implementation
from peers.interpreters import Interpreter
from peers.problem import F64, Problem, reference, relative_error
from peers.running import Running, Sample, WorkerError

_MAX_SCORES_BYTES = 1024**3


@dataclasses.dataclass
class Entry:
    """An implementation on so many devices, and what has become of it.

    Attributes:
      implementation: Which.
      problem: On what.
      devices: On how many devices.
      interpreter: Where; None if none holds what it needs.
      refusal: Why it is not measured; None if it is.
      rounds: Iterations that were measured.
      cost: What an iteration costs; None while not measured.
      errors: Relative error of each output and gradient.
    """

    implementation: Implementation
    problem: Problem
    devices: int
    interpreter: Interpreter | None = None
    refusal: str | None = None
    rounds: int = 0
    cost: Sample | None = None
    errors: dict[str, float] = dataclasses.field(default_factory=dict)


def enter(
    implementation: Implementation,
    problem: Problem,
    devices: int,
    interpreters: Sequence[Interpreter],
) -> Entry:
    """Finds where an implementation can run, or why it cannot."""
    needs = implementation.needs
    able = [each for each in interpreters if not each.lacks(needs)]
    if not able:
        missing = ", ".join(interpreters[0].lacks(needs))
        return Entry(implementation, problem, devices, refusal=f"not installed: {missing}")
    entry = Entry(implementation, problem, devices, able[0])
    scores_bytes = 4 * problem.batch * problem.num_heads * problem.seq_len**2
    if implementation.holds_scores and scores_bytes > _MAX_SCORES_BYTES:
        entry.refusal = f"would hold {scores_bytes / 1024**3:.0f} GiB of scores several times over"
    return entry


def run_side_by_side(entries: Sequence[Entry], rounds: int, max_seconds: float) -> None:
    """Measures, in place, the entries (of one problem) that are not refused.

    Args:
      entries: Of one problem.
      rounds: Iterations of each, one per round.
      max_seconds: An entry that has taken so long sits out the rounds after its first.
    """
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="farspan-bench-")))
        turns = [
            _Turns(each, folder / str(n)) for n, each in enumerate(entries) if not each.refusal
        ]
        if not turns:
            return
        problem = entries[0].problem
        _say(problem, "float64 reference")
        expected = reference(problem)
        for each in turns:
            stack.callback(each.close)
            each.start()
        for number in range(1, rounds + 1):
            for each in turns:
                if number == 1 or each.seconds < max_seconds:
                    each.step(f"round {number} of {rounds}")
        for each in turns:
            each.judge(expected)


class _Turns:
    """The life of one entry: what fails is noted as its refusal, and it takes no further part."""

    def __init__(self, entry: Entry, folder: Path) -> None:
        self.entry, self.seconds = entry, 0.0
        self._folder = folder
        self._running: Running | None = None

    def start(self) -> None:
        entry = self.entry
        self._folder.mkdir()
        with self._attempt("start, compile, warm up"):
            assert entry.interpreter is not None
            self._running = Running(
                entry.implementation, entry.problem, entry.devices, entry.interpreter, self._folder
            )

    def step(self, what: str) -> None:
        if self._running is not None:
            with self._attempt(what):
                self._running.step()

    def judge(self, expected: dict[str, F64]) -> None:
        if self._running is not None:
            with self._attempt("compare"):
                found = self._running.outputs()
                self.entry.errors = {
                    name: relative_error(found[name], expected[name]) for name in expected
                }
                self.entry.rounds = len(self._running.samples)
                self.entry.cost = self._running.median()

    def close(self) -> None:
        if self._running is not None:
            self._running.close()
            self._running = None

    @contextlib.contextmanager
    def _attempt(self, what: str) -> Iterator[None]:
        entry = self.entry
        _say(entry.problem, f"{entry.implementation.name} on {entry.devices}: {what}")
        begin = time.perf_counter()
        try:
            yield
        except WorkerError as failure:
            self.close()
            entry.refusal = f"failed: {failure}"
        finally:
            self.seconds += time.perf_counter() - begin


def _say(problem: Problem, what: str) -> None:
    print(f"S={problem.seq_len:,}: {what}", file=sys.stderr, flush=True)
