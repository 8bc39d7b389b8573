"""One record per step: what it cost and what came out; and one per evaluation.

Counts are of the global batch, once: tokens do not multiply with the devices that share a row.
FLOPs and MFU follow `MFU_CONVENTION`, so that MFU cannot pass 100% by convention.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from farspan.train.goodput import Goodput
from farspan.train.run_files import read_objects

MFU_CONVENTION = (
    "forward and backward over exactly the visible query-key pairs; recomputation is not counted"
)
"""What the FLOPs of `tflops_per_device` and `mfu` are, in words to be shown beside them."""


@dataclass(frozen=True)
class StepRecord:
    """What one optimizer step did.

    Attributes:
      step: Number of the step, from 1.
      time: When it ended, in seconds since 1970.
      loss: Mean negative log-likelihood in nats over the valid tokens of the global batch.
      z_loss: What the z-loss adds to the objective, its weight included; `loss` is without it.
      finite: Whether loss and gradient were finite; if not, the parameters stayed as they were.
      tokens: Valid tokens of the global batch, those whose prediction enters the loss; each is
        counted once, whatever the mesh.
      seq_len: Tokens in one row.
      tokens_per_second: `tokens` / `step_seconds`.
      tflops_per_device: Model FLOPs / `step_seconds` / devices, in 10^12. The FLOPs are those of
        forward and backward over exactly the visible query-key pairs (mask, window and documents
        taken into account); recomputation is not counted.
      mfu: The same FLOP/s over the chips' peak, 0 to 1; None when the peak is not known.
      step_seconds: Wall time of the step, the wait for its batch included, checkpoints not.
      compiled: Whether `step_seconds` includes compilation: the first step of a launch, and of each
        stage.
      data_wait_seconds: Part of `step_seconds` in which the step waited for its batch.
      grad_norm: Global norm of the gradient before clipping.
      learning_rate: Rate of this step.
      memory_bytes: Peak of the bytes in use so far in this launch, on the fullest device of the
        process that keeps the metrics. On CPU, the peak resident bytes of that process. None where
        the devices do not tell.
      goodput: Share of the run's wall time that went into steps that count (`train.goodput`); None
        where it cannot be told.
    """

    step: int
    time: float
    loss: float
    z_loss: float
    finite: bool
    tokens: int
    seq_len: int
    tokens_per_second: float
    tflops_per_device: float
    mfu: float | None
    step_seconds: float
    compiled: bool
    data_wait_seconds: float
    grad_norm: float
    learning_rate: float
    memory_bytes: int | None
    goodput: float | None


@dataclass(frozen=True)
class EvalRecord:
    """What one evaluation found.

    Attributes:
      step: Optimizer steps done.
      eval_loss: Mean negative log-likelihood in nats over the valid tokens of the held-out rows.
      eval_tokens: Those tokens.
      eval_loss_ema: The same loss with the running mean of the parameters; None without one.
      eval_seconds: Wall time of the evaluation.
    """

    step: int
    eval_loss: float
    eval_tokens: int
    eval_loss_ema: float | None
    eval_seconds: float


@dataclass
class Meter:
    """Turns the outcomes of steps into records.

    It belongs to one compiled step: its first record is that of the step that compiled.

    Attributes:
      num_devices: Devices of the mesh.
      peak_flops_per_second: Peak of one device, or None when it is not known.
      seq_len: Tokens in one row.
      goodput: Is told of every step; None: the records have no goodput.
      local_devices: The devices of this process, whose memory is read; none: the records have no
        memory.
      clock: Seconds since 1970.
    """

    num_devices: int
    peak_flops_per_second: float | None
    seq_len: int
    goodput: Goodput | None = None
    local_devices: Sequence[Any] = ()
    clock: Callable[[], float] = time.time
    _compiles: bool = dataclasses.field(default=True, init=False)

    def record(
        self,
        *,
        step: int,
        outcome: dict[str, float],
        flops: int,
        step_seconds: float,
        data_wait_seconds: float,
    ) -> StepRecord:
        """Makes the record of a step that ended just now.

        Args:
          step: Number of the step, from 1.
          outcome: `loss`, `z_loss`, `finite` (0 or 1), `grad_norm`, `learning_rate` and
            `valid_tokens` of the global batch.
          flops: Model FLOPs of the global batch.
          step_seconds: Wall time of the step.
          data_wait_seconds: Part of it spent waiting for the batch.
        """
        tokens = int(outcome["valid_tokens"])
        flops_per_second = flops / step_seconds / self.num_devices
        peak, now = self.peak_flops_per_second, self.clock()
        finite, compiled = bool(outcome["finite"]), self._compiles
        self._compiles = False
        if self.goodput:
            self.goodput.add(step_seconds, finite=finite, compiled=compiled)
        return StepRecord(
            step=step,
            time=now,
            loss=outcome["loss"],
            z_loss=outcome["z_loss"],
            finite=finite,
            tokens=tokens,
            seq_len=self.seq_len,
            tokens_per_second=tokens / step_seconds,
            tflops_per_device=flops_per_second / 1e12,
            mfu=flops_per_second / peak if peak else None,
            step_seconds=step_seconds,
            compiled=compiled,
            data_wait_seconds=data_wait_seconds,
            grad_norm=outcome["grad_norm"],
            learning_rate=outcome["learning_rate"],
            memory_bytes=peak_memory_bytes(self.local_devices),
            goodput=self.goodput.share(now) if self.goodput else None,
        )


def peak_memory_bytes(devices: Sequence[Any]) -> int | None:
    """Most bytes that were in use at once on the fullest of these devices.

    Args:
      devices: Devices of this process, all of one platform.

    Returns:
      The peak since the process began; on CPU, where devices are memory of the process, its peak
      resident bytes. None where the devices do not tell, and for no devices.
    """
    known = [statistics for device in devices if (statistics := device.memory_stats())]
    if peaks := [each["peak_bytes_in_use"] for each in known if "peak_bytes_in_use" in each]:
        return max(peaks)
    if not devices or devices[0].platform != "cpu" or sys.platform == "win32":
        return None
    import resource  # not on Windows

    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return resident if sys.platform == "darwin" else 1024 * resident


class MetricsFile:
    """The records of a run, one JSON object a line. Use as a context manager."""

    def __init__(self, path: Path, done: int) -> None:
        """Opens the file, and drops records that a resumed run will write again.

        Args:
          path: The file; its folder exists.
          done: Steps that the run has done. Records past it, and a line that a crash cut short, go.
        """
        self.path = path
        kept = [line for record, line in _lines(path) if record["step"] <= done]
        unfinished = path.with_name(path.name + ".tmp")
        with unfinished.open("w", encoding="utf-8") as file:
            file.writelines(kept)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
        self._file = path.open("a", encoding="utf-8")

    def write(self, record: StepRecord | EvalRecord) -> None:
        """Appends one record; on return the operating system has it, should this process die.

        JSON has no word for a number that is not finite: `null` stands for it.
        """
        values = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in dataclasses.asdict(record).items()
        }
        self._file.write(json.dumps(values, allow_nan=False) + "\n")
        self._file.flush()

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The complete records of a metrics file, oldest first; none when there is no file."""
    return [record for record, _ in _lines(path)]


def _lines(path: Path) -> Iterator[tuple[dict[str, Any], str]]:
    return (found for found in read_objects(path) if isinstance(found[0].get("step"), int))
