"""The training loop: build, resume, step, log, save, stop cleanly."""

from __future__ import annotations

import math
import time
from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from farspan.data import Loader, get_tokenizer, make_loader, unigram_loss
from farspan.kernels import get_kernel
from farspan.plan.hardware import find_chip
from farspan.train.checkpoint import Checkpoints
from farspan.train.config import TrainConfig, fresh_run_dir, to_dict, validate
from farspan.train.feed import Feed
from farspan.train.fit import check_state_fits
from farspan.train.interrupt import StopRequest, stop_on_signals
from farspan.train.metrics import Meter, MetricsFile, StepRecord
from farspan.train.progress import Reporter
from farspan.train.provenance import write_launch
from farspan.train.resume import check_resumable
from farspan.train.step import TrainSetup, build_setup

METRICS_FILE = "metrics.jsonl"
_FINAL_LOSS_STEPS = 10


@dataclass(frozen=True)
class RunResult:
    """How a run ended.

    Attributes:
      run_dir: Its folder.
      steps: Optimizer steps done, those before a resume included.
      final_loss: Mean loss in nats a token over the last steps of this call, at most 10; None when
        it did none.
      final_loss_steps: How many steps that mean covers.
      unigram_loss: Loss of the best predictor that sees no context, over the same data.
      metrics: File of the records.
      checkpoint: Folder of the newest checkpoint, or None when there is none.
      stopped_by: Number of the signal that ended the run early, or None.
    """

    run_dir: Path
    steps: int
    final_loss: float | None
    final_loss_steps: int
    unigram_loss: float
    metrics: Path
    checkpoint: Path | None
    stopped_by: int | None


def run(config: TrainConfig) -> RunResult:
    """Trains until `config.steps`, going on from the newest checkpoint in `config.run_dir`.

    Writes `metrics.jsonl`, `config.json`, `launches.jsonl` and `checkpoints/` there. SIGTERM or
    SIGINT saves after the step in progress and returns.

    Args:
      config: The run.

    Returns:
      How it ended.

    Raises:
      ValueError: The configuration, the data or the checkpoint do not fit; nothing was trained.
      NotImplementedError: The combination is valid but not built.
      FloatingPointError: The loss or the gradient is no longer finite.
      CheckpointError: A checkpoint could not be written.
    """
    validate(config)
    get_kernel(config.kernel)
    _check_vocabulary(config)
    run_dir = Path(config.run_dir or fresh_run_dir("train"))
    reporter = Reporter(config.log_every)
    with ExitStack() as stack:
        stop = stack.enter_context(stop_on_signals())
        setup = build_setup(config)
        check_state_fits(setup)
        checkpoints = stack.enter_context(Checkpoints(run_dir, config.keep_checkpoints))
        done = _announce_resume(config, checkpoints, reporter)
        with reporter.phase(f"loading data ({config.data.data})"):
            loader = _make_loader(config)
        reporter.note(loader.describe())
        with reporter.phase("placing the parameters"):
            state = _start_state(setup, loader, checkpoints, done)
        meter = _make_meter(setup)
        reporter.note(
            f"{setup.num_params:,} parameters, {setup.tokens_per_step:,} tokens a step, "
            f"{meter.num_devices} devices ({setup.split}); run folder {run_dir}"
        )
        write_launch(run_dir, config, start_step=done)
        metrics = stack.enter_context(MetricsFile(run_dir / METRICS_FILE, done))
        session = _Session(config, setup, checkpoints, reporter, meter, metrics, stop)
        with Feed(loader, setup) as feed:
            done, losses = session.train(state, feed, done)
        with reporter.phase("writing the last checkpoint"):
            checkpoints.wait()
        newest = checkpoints.newest()
        return RunResult(
            run_dir=run_dir,
            steps=done,
            final_loss=sum(losses) / len(losses) if losses else None,
            final_loss_steps=len(losses),
            unigram_loss=unigram_loss(loader.documents_tokens),
            metrics=metrics.path,
            checkpoint=None if newest is None else checkpoints.step_dir(newest),
            stopped_by=stop.signal,
        )


@dataclass(frozen=True)
class _Session:
    """What the steps of one `run` share."""

    config: TrainConfig
    setup: TrainSetup
    checkpoints: Checkpoints
    reporter: Reporter
    meter: Meter
    metrics: MetricsFile
    stop: StopRequest

    def train(self, state: Any, feed: Feed, done: int) -> tuple[int, list[float]]:
        """Steps from `done` to the end or the first signal.

        Returns:
          Steps done, and the losses of the last ones.
        """
        config, saved, loader_state = self.config, done, None
        losses: deque[float] = deque(maxlen=_FINAL_LOSS_STEPS)
        with self.reporter.steps(done, config.steps):
            while done < config.steps and not self.stop:
                if losses:
                    state, record, loader_state = self._step(state, feed, done + 1)
                else:
                    with self.reporter.phase("compiling and taking the first step"):
                        state, record, loader_state = self._step(state, feed, done + 1)
                self._check_finite(record)
                done = record.step
                losses.append(record.loss)
                self.metrics.write(record)
                self.reporter.step(record)
                if config.checkpoint_every and done % config.checkpoint_every == 0:
                    self._save(done, state, loader_state)
                    saved = done
        if self.stop:
            self.reporter.note(f"{self.stop}: stopping after step {done} of {config.steps}")
        if saved != done:
            self._save(done, state, loader_state)
        return done, list(losses)

    def _step(self, state: Any, feed: Feed, number: int) -> tuple[Any, StepRecord, Any]:
        begin = time.perf_counter()
        fed = feed.next()
        waited = time.perf_counter() - begin
        state, outcome = self.setup.step(state, fed.device_batch)
        record = self.meter.record(
            step=number,
            outcome={
                name: float(value) for name, value in outcome.items()
            },  # waits for the devices
            flops=fed.flops,
            step_seconds=time.perf_counter() - begin,
            data_wait_seconds=waited,
        )
        return state, record, fed.loader_state

    def _save(self, done: int, state: Any, loader_state: Any) -> None:
        self.checkpoints.save(done, state, loader_state, to_dict(self.config))

    def _check_finite(self, record: StepRecord) -> None:
        if math.isfinite(record.loss) and math.isfinite(record.grad_norm):
            return
        newest = self.checkpoints.newest()
        remedy = (
            "no checkpoint was written yet; lower --learning-rate, lengthen --warmup-steps or look "
            "at the data of this step"
            if newest is None
            else f"the checkpoint of step {newest} is from before; lower --learning-rate and run "
            "again to go on from it"
        )
        raise FloatingPointError(
            f"loss and gradient norm must stay finite, got loss={record.loss}, "
            f"grad_norm={record.grad_norm} at step {record.step} "
            f"(learning_rate={record.learning_rate:.3g}); {remedy}"
        )


def _check_vocabulary(config: TrainConfig) -> None:
    tokenizer = get_tokenizer(config.data.tokenizer)
    if tokenizer.vocab_size > config.model.vocab_size:
        raise ValueError(
            f"vocab_size must cover the tokenizer, got vocab_size={config.model.vocab_size}, "
            f'tokenizer="{config.data.tokenizer}" with {tokenizer.vocab_size}; use --vocab-size '
            f"{tokenizer.vocab_size} or more"
        )


def _make_loader(config: TrainConfig) -> Loader:
    data = config.data
    return make_loader(
        data.data,
        tokenizer=data.tokenizer,
        seq_len=data.seq_len,
        packing=data.packing,
        batch_size=config.batch_size,
        seed=config.seed,
    )


def _announce_resume(config: TrainConfig, checkpoints: Checkpoints, reporter: Reporter) -> int:
    """Finds the step to go on from, 0 for a new run, and refuses one that does not fit."""
    newest = checkpoints.newest()
    if newest is None:
        return 0
    changes = check_resumable(checkpoints.saved_config(newest), config, checkpoints.directory)
    reporter.note(f"resuming from step {newest} of {checkpoints.directory}")
    for change in changes:
        reporter.note(f"changed since then: {change}")
    if newest >= config.steps:
        reporter.note(
            f"nothing to do: {newest} steps are done and --steps is {config.steps}; ask for more "
            "--steps, or use another --run-dir for a new run"
        )
    return newest


def _start_state(setup: TrainSetup, loader: Loader, checkpoints: Checkpoints, done: int) -> Any:
    if done == 0:
        return setup.init_state()
    state, loader_state = checkpoints.restore(done, setup.abstract_state())
    loader.restore(loader_state)
    return state


def _make_meter(setup: TrainSetup) -> Meter:
    devices = setup.mesh.devices
    chip = find_chip(devices.flat[0].device_kind)
    return Meter(
        num_devices=devices.size,
        peak_flops_per_second=chip.peak_flops_per_second if chip else None,
    )
