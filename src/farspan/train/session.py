"""The steps of a run: read, step, log, evaluate, save."""

from __future__ import annotations

import signal
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from farspan.data import Loader
from farspan.dist.processes import ProcessGroup, any_process
from farspan.train.checkpoint import Checkpoints
from farspan.train.config import TrainConfig, to_dict
from farspan.train.feed import Fed, Feed
from farspan.train.guard import NonFiniteGuard
from farspan.train.interrupt import StopRequest
from farspan.train.metrics import EvalRecord, Meter, StepRecord
from farspan.train.profiling import Profiler
from farspan.train.progress import Reporter
from farspan.train.stages import Part
from farspan.train.step import TrainSetup
from farspan.train.writers import Writers

_FINAL_LOSS_STEPS = 10


@dataclass
class Session:
    """What the steps of one launch share.

    Attributes:
      config: The whole run.
      group: The processes that run it.
      checkpoints: Where it saves.
      reporter: Shows progress.
      writers: Keep the metrics; None in processes that keep none.
      guard: Acts on numbers that are not finite.
      profiler: Traces some steps.
      stop: Whether this process was asked to stop.
      done: Optimizer steps done.
      saved: Step of the newest checkpoint, 0 before there is one.
      losses: Losses of the last steps of this launch.
      evaluation: The last evaluation of this launch.
    """

    config: TrainConfig
    group: ProcessGroup
    checkpoints: Checkpoints
    reporter: Reporter
    writers: Writers | None
    guard: NonFiniteGuard
    profiler: Profiler
    stop: StopRequest
    done: int
    saved: int
    losses: deque[float] = field(default_factory=lambda: deque[float](maxlen=_FINAL_LOSS_STEPS))
    evaluation: EvalRecord | None = None
    _asked: bool = False

    def train(
        self, part: Part, setup: TrainSetup, meter: Meter, loader: Loader, state: Any
    ) -> None:
        """Steps to the end of a part, or to the first signal that any process received.

        Args:
          part: The part; `done` lies in it.
          setup: Its compiled functions.
          meter: Makes its records.
          loader: Its data, at the place of `done`.
          state: The state of training, which is used up.
        """
        first, loader_state = True, None
        evaluates = loader.eval_rows > 0
        with Feed(loader, setup) as feed:
            while self.done < part.stop and not self.asked_to_stop():
                with self.profiler.step(self.done + 1):
                    if first:
                        with self.reporter.phase("compiling and taking the first step"):
                            state, record, fed = self._step(setup, meter, state, feed)
                        first = False
                    else:
                        state, record, fed = self._step(setup, meter, state, feed)
                if self.guard.check(record, fed.batch, self.checkpoints.newest()):
                    self.losses.append(record.loss)
                self.done, loader_state = record.step, fed.loader_state
                if self.writers:
                    self.writers.write(record)
                self.reporter.step(record)
                if evaluates and self._is_due(self.config.eval_every):
                    self._evaluate(setup, loader, state)
                if self._is_due(self.config.checkpoint_every):
                    self._save(state, loader_state)
        if self.asked_to_stop():
            reason = str(self.stop) if self.stop else "another process was asked to stop"
            self.reporter.note(f"{reason}: stopping after step {self.done} of {self.config.steps}")
        elif evaluates and (self.evaluation is None or self.evaluation.step != self.done):
            self._evaluate(setup, loader, state)
        if self.saved != self.done:
            self._save(state, loader_state)

    def asked_to_stop(self) -> bool:
        """Whether any process was asked to stop; all hear the same, after the same step."""
        self._asked = self._asked or any_process(bool(self.stop))
        return self._asked

    @property
    def stopped_by(self) -> int | None:
        """Number of the signal that ended the launch, wherever it arrived."""
        if not self._asked:
            return None
        return self.stop.signal if self.stop.signal else signal.SIGTERM

    def _is_due(self, every: int) -> bool:
        return every > 0 and self.done % every == 0

    def _step(
        self, setup: TrainSetup, meter: Meter, state: Any, feed: Feed
    ) -> tuple[Any, StepRecord, Fed]:
        begin = time.perf_counter()
        fed = feed.next()
        waited = time.perf_counter() - begin
        state, outcome = setup.step(state, fed.device_batch)
        record = meter.record(
            step=self.done + 1,
            outcome={
                name: float(value) for name, value in outcome.items()
            },  # waits for the devices
            flops=fed.flops,
            step_seconds=time.perf_counter() - begin,
            data_wait_seconds=waited,
        )
        return state, record, fed

    def _evaluate(self, setup: TrainSetup, loader: Loader, state: Any) -> None:
        begin = time.perf_counter()
        sums: dict[str, float] = {}
        with self.reporter.phase("evaluating") as update:
            for number, batch in enumerate(loader.eval_batches(), start=1):
                for name, value in setup.evaluate(state, setup.place(batch)).items():
                    sums[name] = sums.get(name, 0.0) + float(value)
                update(f"batch {number}")
        tokens = int(sums["valid_tokens"])
        ema = sums.get("ema_loss_sum")
        self.evaluation = EvalRecord(
            step=self.done,
            eval_loss=sums["loss_sum"] / tokens,
            eval_tokens=tokens,
            eval_loss_ema=None if ema is None else ema / tokens,
            eval_seconds=time.perf_counter() - begin,
        )
        if self.writers:
            self.writers.write_evaluation(self.evaluation)
        self.reporter.evaluation(self.evaluation)

    def _save(self, state: Any, loader_state: Any) -> None:
        self.checkpoints.save(self.done, state, loader_state, to_dict(self.config))
        self.saved = self.done
