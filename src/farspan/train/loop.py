"""A training run from start to end: build, resume, train part by part, stop cleanly."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from farspan.data import Loader
from farspan.dist.devices import ensure_devices
from farspan.dist.processes import ProcessGroup, join_processes, share, wait_for_all
from farspan.kernels import get_kernel
from farspan.plan.hardware import find_chip
from farspan.train.checkpoint import Checkpoints
from farspan.train.claim import claim
from farspan.train.config import TrainConfig, device_count, fresh_run_dir, run_folder, validate
from farspan.train.dataset import open_loader
from farspan.train.fit import check_state_fits
from farspan.train.goodput import Goodput
from farspan.train.guard import NonFiniteGuard
from farspan.train.interrupt import stop_on_signals
from farspan.train.metrics import EvalRecord, Meter
from farspan.train.profiling import Profiler
from farspan.train.progress import Reporter
from farspan.train.provenance import write_config, write_launch
from farspan.train.resume import check_resumable
from farspan.train.run_files import METRICS_FILE
from farspan.train.session import Session
from farspan.train.stages import Part, most_devices, split_into_parts
from farspan.train.step import TrainSetup, build_setup
from farspan.train.writers import check_writers, open_writers


@dataclass(frozen=True)
class RunResult:
    """How a run ended.

    Attributes:
      run_dir: Its folder.
      steps: Optimizer steps done, those before a resume included.
      final_loss: Mean loss in nats a token over the last steps of this call, at most 10; None when
        it did none.
      final_loss_steps: How many steps that mean covers.
      unigram_loss: Loss of the best predictor that sees no context, over the same data; None where
        nothing was trained, or the data streams.
      evaluation: The last evaluation on held-out data, if there was one.
      skipped: Steps of this call whose numbers were not finite and whose update was left out.
      metrics: File of the records.
      checkpoint: Folder of the newest checkpoint, or None when there is none.
      stopped_by: Number of the signal that ended the run early, in this process or another; None
        when it ended by itself.
    """

    run_dir: Path
    steps: int
    final_loss: float | None
    final_loss_steps: int
    unigram_loss: float | None
    evaluation: EvalRecord | None
    skipped: int
    metrics: Path
    checkpoint: Path | None
    stopped_by: int | None


def run(config: TrainConfig) -> RunResult:
    """Trains until `config.steps`, going on from the newest checkpoint in `config.run_dir`.

    Where several processes run it, all call this with the same configuration and see the same run
    folder; the first one prints and keeps the metrics. SIGTERM or SIGINT in any of them saves after
    the step in progress and returns in all.

    Writes `metrics.jsonl`, `eval.jsonl`, `tensorboard/`, `config.json`, `launches.jsonl`, `lock`
    and `checkpoints/` there.

    Args:
      config: The run.

    Returns:
      How it ended.

    Raises:
      ValueError: The configuration, the data or the checkpoint do not fit; nothing was trained.
      NotImplementedError: The combination is valid but not built.
      FloatingPointError: The loss or the gradient is no longer finite.
      CheckpointError: A checkpoint could not be written.
      PeerLost: Another process of the run has ended.
    """
    started = time.time()
    validate(config)
    check_writers(config)
    parts = split_into_parts(config)
    with join_processes() as group:
        return _run(config, parts, group, started)


def _run(
    config: TrainConfig, parts: tuple[Part, ...], group: ProcessGroup, started: float
) -> RunResult:
    most = most_devices(config)
    ensure_devices(most)
    get_kernel(config.kernel)  # `auto` asks for the devices, so it must not come before them
    fewer = [p for p in parts if device_count(p.config) < most]
    if group.count > 1 and fewer:
        raise ValueError(
            "stages: where several processes run, each stage must use all devices, got "
            f"{most} and, from step {fewer[0].start} on, {device_count(fewer[0].config)}; use "
            "the same product of parallel sizes in every stage, for example by fsdp_parallel_size"
        )
    run_dir = run_folder(config.run_dir or share(fresh_run_dir("train")))
    reporter = Reporter(config.log_every, quiet=not group.primary)
    with ExitStack() as stack:
        stop = stack.enter_context(stop_on_signals())
        # Every part is checked before the first one begins.
        setups = [build_setup(part.config) for part in parts]
        for setup in setups:
            check_state_fits(setup)
        stack.enter_context(claim(run_dir, reporter.note))
        checkpoints = stack.enter_context(Checkpoints(run_dir, config.keep_checkpoints))
        done = _announce_resume(config, checkpoints, reporter)
        if done >= config.steps:
            return _result(run_dir, checkpoints, None, done, None)
        writers = None
        if group.primary:
            write_launch(run_dir, start_step=done, started=started, found=group.found)
            writers = stack.enter_context(open_writers(run_dir, done, config, reporter.note))
        session = Session(
            config=config,
            group=group,
            checkpoints=checkpoints,
            reporter=reporter,
            writers=writers,
            guard=NonFiniteGuard(run_dir, config.optimizer.non_finite, keeps_batches=group.primary),
            profiler=stack.enter_context(
                Profiler(
                    run_dir,
                    done + 1,
                    enabled=config.profile and group.primary,
                    note=reporter.note,
                )
            ),
            stop=stop,
            done=done,
            saved=done,
        )
        goodput = Goodput(run_dir, done)
        unigram = None
        with reporter.steps(done, config.steps):
            for stage, (part, setup) in enumerate(zip(parts, setups, strict=True)):
                if part.stop > session.done and not session.asked_to_stop():
                    if len(parts) > 1:
                        reporter.note(
                            f"stage {stage} of {len(parts) - 1}: steps {part.start + 1} to "
                            f"{part.stop}, rows of {part.config.data.seq_len:,} tokens"
                        )
                    unigram = _train_part(session, part, setup, goodput)
        with reporter.phase("writing the last checkpoint"):
            checkpoints.wait()
        return _result(run_dir, checkpoints, session, session.done, unigram)


def _train_part(session: Session, part: Part, setup: TrainSetup, goodput: Goodput) -> float | None:
    """Trains one part from `session.done` on.

    Returns:
      Loss of the best predictor that sees no context, over the part's data.
    """
    config, reporter = part.config, session.reporter
    loader = _open_loader(config, session.group, reporter)
    try:
        reporter.note(loader.describe())
        with reporter.phase("placing the parameters"):
            state = _start_state(setup, part, loader, session.checkpoints, session.done)
        meter = _make_meter(setup, goodput)
        reporter.note(
            f"{setup.num_params:,} parameters, {setup.tokens_per_step:,} tokens a step, "
            f"{meter.num_devices} devices ({setup.split}){_processes(session.group)}; run folder "
            f"{session.checkpoints.directory.parent}"
        )
        if session.writers:
            write_config(session.checkpoints.directory.parent, session.config)
        session.train(part, setup, meter, loader, state)
        return loader.unigram_loss
    finally:
        loader.close()


def _open_loader(config: TrainConfig, group: ProcessGroup, reporter: Reporter) -> Loader:
    """Opens the data; the first process alone tokenises what others may then share."""
    with reporter.phase(f"loading data ({config.data.data})") as update:
        if not group.primary:
            wait_for_all("data is ready")
        loader = open_loader(config, update)
        if group.primary:
            wait_for_all("data is ready")
        return loader


def _announce_resume(config: TrainConfig, checkpoints: Checkpoints, reporter: Reporter) -> int:
    """Finds the step to go on from, 0 for a new run, and refuses one that does not fit."""
    newest = checkpoints.newest()
    if newest is None:
        return 0
    saved = checkpoints.saved_config(newest)
    changes = check_resumable(saved, config, newest, checkpoints.directory)
    reporter.note(f"resuming from step {newest} of {checkpoints.directory}")
    for change in changes:
        reporter.note(f"changed since then: {change}")
    if newest >= config.steps:
        reporter.note(
            f"nothing to do: {newest} steps are done and --steps is {config.steps}; ask for more "
            "--steps, or use another --run-dir for a new run"
        )
    return newest


def _start_state(
    setup: TrainSetup, part: Part, loader: Loader, checkpoints: Checkpoints, done: int
) -> Any:
    """The state after `done` steps: drawn, or read from the checkpoint that ends each part, too."""
    if done == 0:
        return setup.init_state()
    checkpoints.wait()
    state, loader_state = checkpoints.restore(done, setup.abstract_state())
    if done > part.start:
        loader.restore(loader_state)
    return state


def _make_meter(setup: TrainSetup, goodput: Goodput) -> Meter:
    devices = setup.mesh.devices
    chip = find_chip(devices.flat[0].device_kind)
    return Meter(
        num_devices=devices.size,
        peak_flops_per_second=chip.peak_flops_per_second if chip else None,
        seq_len=setup.config.data.seq_len,
        goodput=goodput,
        local_devices=setup.mesh.local_devices,
    )


def _processes(group: ProcessGroup) -> str:
    return f" of {group.count} processes ({group.found})" if group.count > 1 else ""


def _result(
    run_dir: Path,
    checkpoints: Checkpoints,
    session: Session | None,
    done: int,
    unigram: float | None,
) -> RunResult:
    newest = checkpoints.newest()
    losses = list(session.losses) if session else []
    return RunResult(
        run_dir=run_dir,
        steps=done,
        final_loss=sum(losses) / len(losses) if losses else None,
        final_loss_steps=len(losses),
        unigram_loss=unigram,
        evaluation=session.evaluation if session else None,
        skipped=session.guard.skipped if session else 0,
        metrics=run_dir / METRICS_FILE,
        checkpoint=None if newest is None else checkpoints.step_dir(newest),
        stopped_by=session.stopped_by if session else None,
    )
