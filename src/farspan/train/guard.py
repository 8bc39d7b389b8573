"""What follows a loss or gradient that is not finite: stop, or skip; the batch is kept."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

from farspan.data import Batch
from farspan.train.metrics import StepRecord

FOLDER = "non_finite"
MOST_IN_A_ROW = 10
"""Batches skipped one after another before a run that skips stops after all."""


class NonFiniteGuard:
    """Acts on steps whose loss or gradient is not finite; their update was not applied."""

    def __init__(self, run_dir: Path, policy: str, *, keeps_batches: bool) -> None:
        """Makes a guard.

        Args:
          run_dir: Folder of the run.
          policy: "stop" or "skip".
          keeps_batches: Whether this process writes such batches.
        """
        self.skipped = 0
        self._folder = run_dir / FOLDER
        self._policy = policy
        self._keeps_batches = keeps_batches
        self._in_a_row = 0

    def check(self, record: StepRecord, batch: Batch, newest: int | None) -> bool:
        """Looks at a step.

        Args:
          record: The step.
          batch: What it read.
          newest: Step of the newest checkpoint, for the message.

        Returns:
          Whether the step counts; False where it was skipped.

        Raises:
          FloatingPointError: The run must stop.
        """
        if record.finite:
            self._in_a_row = 0
            return True
        self.skipped += 1
        self._in_a_row += 1
        path = self._folder / f"step-{record.step:08d}.npz"
        if self._keeps_batches:
            self._folder.mkdir(parents=True, exist_ok=True)
            arrays = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
            np.savez_compressed(path, **arrays)
        if self._policy == "skip" and self._in_a_row < MOST_IN_A_ROW:
            return False
        many = f"{self._in_a_row} steps in a row, " if self._in_a_row > 1 else ""
        before = (
            "no checkpoint was written yet; lower --learning-rate, lengthen --warmup-steps or look "
            "at the batch"
            if newest is None
            else f"the checkpoint of step {newest} is from before; lower --learning-rate, or use "
            "--non-finite skip, and run again to go on from it"
        )
        raise FloatingPointError(
            f"loss and gradient norm must stay finite, got {many}loss={record.loss}, "
            f"grad_norm={record.grad_norm} at step {record.step} "
            f"(learning_rate={record.learning_rate:.3g}); the parameters are as before the step, "
            f"its batch is in {path}; {before}"
        )
