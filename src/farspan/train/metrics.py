"""One record per step: what it cost and what came out, appended to `RUN_DIR/metrics.jsonl`.

Counts are of the global batch, once: tokens do not multiply with the devices that share a row.
FLOPs are those of the model (visible query-key pairs only, forward and backward, nothing for
recomputation), so MFU cannot pass 100% by convention.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast


@dataclass(frozen=True)
class StepRecord:
    """What one optimizer step did.

    Attributes:
      step: Number of the step, from 1.
      loss: Mean negative log-likelihood in nats over the valid tokens of the global batch.
      tokens: Valid tokens of the global batch, those whose prediction enters the loss; each is
        counted once, whatever the mesh.
      tokens_per_second: `tokens` / `step_seconds`.
      tflops_per_device: Model FLOPs / `step_seconds` / devices, in 10^12.
      mfu: Model FLOP/s over the chips' peak, 0 to 1; None when the peak is not known.
      step_seconds: Wall time of the step, the wait for its batch included, checkpoints not. The
        first step of a launch includes compilation.
      data_wait_seconds: Part of `step_seconds` in which the step waited for its batch.
      grad_norm: Global norm of the gradient before clipping.
      learning_rate: Rate of this step.
    """

    step: int
    loss: float
    tokens: int
    tokens_per_second: float
    tflops_per_device: float
    mfu: float | None
    step_seconds: float
    data_wait_seconds: float
    grad_norm: float
    learning_rate: float


@dataclass(frozen=True)
class Meter:
    """Turns the outcome of a step into a record.

    Attributes:
      num_devices: Devices of the mesh.
      peak_flops_per_second: Peak of one device, or None when it is not known.
    """

    num_devices: int
    peak_flops_per_second: float | None

    def record(
        self,
        *,
        step: int,
        outcome: dict[str, float],
        flops: int,
        step_seconds: float,
        data_wait_seconds: float,
    ) -> StepRecord:
        """Makes the record of a step.

        Args:
          step: Number of the step, from 1.
          outcome: `loss`, `grad_norm`, `learning_rate` and `valid_tokens` of the global batch.
          flops: Model FLOPs of the global batch.
          step_seconds: Wall time of the step.
          data_wait_seconds: Part of it spent waiting for the batch.
        """
        tokens = int(outcome["valid_tokens"])
        flops_per_second = flops / step_seconds / self.num_devices
        peak = self.peak_flops_per_second
        return StepRecord(
            step=step,
            loss=outcome["loss"],
            tokens=tokens,
            tokens_per_second=tokens / step_seconds,
            tflops_per_device=flops_per_second / 1e12,
            mfu=flops_per_second / peak if peak else None,
            step_seconds=step_seconds,
            data_wait_seconds=data_wait_seconds,
            grad_norm=outcome["grad_norm"],
            learning_rate=outcome["learning_rate"],
        )


class MetricsFile:
    """The records of a run, one JSON object a line. Use as a context manager."""

    def __init__(self, path: Path, done: int) -> None:
        """Opens the file, and drops records that a resumed run will write again.

        Args:
          path: The file; its folder exists.
          done: Steps that the run has done. Records past it, and a line that a crash cut short, go.
        """
        self.path = path
        kept = [line for step, line in _lines(path) if step <= done]
        unfinished = path.with_name(path.name + ".tmp")
        with unfinished.open("w", encoding="utf-8") as file:
            file.writelines(kept)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
        self._file = path.open("a", encoding="utf-8")

    def write(self, record: StepRecord) -> None:
        """Appends one record; on return the operating system has it, should this process die."""
        self._file.write(json.dumps(dataclasses.asdict(record)) + "\n")
        self._file.flush()

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The complete records of a metrics file, oldest first; none when there is no file."""
    return [json.loads(line) for _, line in _lines(path)]


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                step = cast("dict[str, Any]", json.loads(line))["step"]
            except (ValueError, KeyError, TypeError):
                continue
            if line.endswith("\n") and isinstance(step, int):
                yield step, line
