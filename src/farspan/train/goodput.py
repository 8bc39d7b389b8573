"""Goodput: the share of a run's wall time that went into steps that count."""

from __future__ import annotations

import time
from datetime import datetime
from pathlib import Path

from farspan.train.run_files import LAUNCHES_FILE, METRICS_FILE, read_objects


class Goodput:
    """Seconds of the steps that count, over the seconds since the first launch of the run.

    A step counts if it moved the parameters, was kept, and did not compile. So these do not count:
    steps that a crash lost and a later launch did again, steps skipped because their numbers were
    not finite, and the step of a launch or stage that compiled. All else is wall time without
    steps: the start of each launch, data that is made ready, checkpoints, evaluations, and the time
    between launches in which nothing ran. A step's wait for its batch is part of the step.
    """

    def __init__(self, run_dir: Path, done: int) -> None:
        """Reads what earlier launches did; `launches.jsonl` has this launch already.

        Args:
          run_dir: Folder of the run.
          done: Steps that the run has done; records past it were lost.
        """
        kept = {
            record["step"]: record["step_seconds"]
            for record, _ in read_objects(run_dir / METRICS_FILE)
            if record["step"] <= done and record.get("finite", True) and not record.get("compiled")
        }
        launches = [
            datetime.fromisoformat(launch["time"]).timestamp()
            for launch, _ in read_objects(run_dir / LAUNCHES_FILE)
        ]
        self._seconds: float = sum(kept.values())
        self._begin = min(launches, default=time.time())

    def add(self, step_seconds: float, *, finite: bool, compiled: bool) -> None:
        """Counts a step of this launch.

        Args:
          step_seconds: Its wall time.
          finite: Whether its loss and gradient were finite.
          compiled: Whether that time includes compilation.
        """
        if finite and not compiled:
            self._seconds += step_seconds

    def share(self, now: float) -> float | None:
        """The goodput at a time.

        Args:
          now: Seconds since 1970.

        Returns:
          From 0 to 1; None where the clocks of the launches contradict one another.
        """
        elapsed = now - self._begin
        return self._seconds / elapsed if elapsed > 0 and self._seconds <= elapsed else None
