"""Where the metrics of a run go: JSON lines and TensorBoard always, Weights & Biases on request.

`metrics.jsonl` and `eval.jsonl` are the record of truth: a failure to write them is an error. A
failure of the others is said once, and training goes on without them.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, cast

from farspan.train.config import TrainConfig, to_dict
from farspan.train.metrics import EvalRecord, MetricsFile, StepRecord
from farspan.train.run_files import EVALUATIONS_FILE, METRICS_FILE

TENSORBOARD_FOLDER = "tensorboard"
WANDB_ID_FILE = "wandb_run_id"

_TAGS = {
    "loss": "train/loss",
    "z_loss": "train/z_loss",
    "grad_norm": "train/grad_norm",
    "learning_rate": "train/learning_rate",
    "tokens": "train/tokens",
    "seq_len": "train/seq_len",
    "finite": "train/finite",
    "tokens_per_second": "throughput/tokens_per_second",
    "tflops_per_device": "throughput/tflops_per_device",
    "mfu": "throughput/mfu",
    "step_seconds": "throughput/step_seconds",
    "data_wait_seconds": "throughput/data_wait_seconds",
    "goodput": "throughput/goodput",
    "memory_bytes": "memory/peak_bytes",
    "eval_loss": "eval/loss",
    "eval_loss_ema": "eval/loss_ema",
    "eval_tokens": "eval/tokens",
    "eval_seconds": "eval/seconds",
}
"""Field of a record to the name of its curve."""


class Writers:
    """Receives the records of one launch; `open_writers` makes it."""

    def __init__(
        self,
        steps: MetricsFile,
        evaluations: MetricsFile,
        mirrors: Mapping[str, _Mirror],
        warn: Callable[[str], None],
    ) -> None:
        """Joins files and mirrors.

        Args:
          steps: Keeps the step records.
          evaluations: Keeps the evaluations.
          mirrors: What else shows the records, by name.
          warn: Is told which mirror failed.
        """
        self._steps = steps
        self._evaluations = evaluations
        self._mirrors = dict(mirrors)
        self._warn = warn

    def write(self, record: StepRecord) -> None:
        """Keeps the record of a step.

        Raises:
          OSError: `metrics.jsonl` could not be written.
        """
        self._steps.write(record)
        self._show(record, record.time)

    def write_evaluation(self, record: EvalRecord) -> None:
        """Keeps an evaluation.

        Raises:
          OSError: `eval.jsonl` could not be written.
        """
        self._evaluations.write(record)
        self._show(record, time.time())

    def close(self, *, failed: bool) -> None:
        """Ends the mirrors.

        Args:
          failed: Whether an error ends the run.
        """
        self._each(lambda mirror: mirror.close(failed=failed))

    def _show(self, record: StepRecord | EvalRecord, when: float) -> None:
        values = {
            tag: float(value)
            for name, tag in _TAGS.items()
            if (value := getattr(record, name, None)) is not None
        }
        self._each(lambda mirror: mirror.show(record.step, values, when))

    def _each(self, act: Callable[[_Mirror], None]) -> None:
        for name, mirror in list(self._mirrors.items()):
            try:
                act(mirror)
            except Exception as error:
                del self._mirrors[name]
                with suppress(Exception):
                    mirror.close(failed=True)
                self._warn(
                    f"{name} gets no more of this launch ({type(error).__name__}: {error}); "
                    f"training goes on, and {METRICS_FILE} and {EVALUATIONS_FILE} have everything"
                )


@contextmanager
def open_writers(
    run_dir: Path, done: int, config: TrainConfig, warn: Callable[[str], None]
) -> Generator[Writers, None, None]:
    """Opens what keeps the metrics, for one process of the run.

    Records of steps past `done`, which a crash lost and this launch does again, leave the files and
    TensorBoard. Weights & Biases goes on with the same run and shows such steps twice.

    Args:
      run_dir: Folder of the run; it exists.
      done: Steps that the run has done.
      config: The run.
      warn: Prints one line, where a mirror fails.

    Yields:
      The writers.

    Raises:
      ValueError: Weights & Biases was asked for, but is not installed or cannot start.
      OSError: The files cannot be opened.
    """
    check_writers(config)
    mirrors: dict[str, _Mirror] = {}
    with ExitStack() as stack:
        steps = stack.enter_context(MetricsFile(run_dir / METRICS_FILE, done))
        evaluations = stack.enter_context(MetricsFile(run_dir / EVALUATIONS_FILE, done))
        if config.wandb_project:
            mirrors["Weights & Biases"] = _WandB(run_dir, config)
        mirrors["TensorBoard"] = _TensorBoard(run_dir / TENSORBOARD_FOLDER, done)
        writers = Writers(steps, evaluations, mirrors, warn)
        try:
            yield writers
        except BaseException:
            writers.close(failed=True)
            raise
        writers.close(failed=False)


def check_writers(config: TrainConfig) -> None:
    """Refuses a configuration whose metrics could not be kept, before any other work.

    Raises:
      ValueError: Weights & Biases was asked for, but is not installed.
    """
    if config.wandb_project:
        _import_wandb(config.wandb_project)


class _Mirror(ABC):
    """Shows named curves over steps."""

    @abstractmethod
    def show(self, step: int, values: Mapping[str, float], when: float) -> None:
        """Adds one point to each of the curves; `when` is in seconds since 1970."""

    @abstractmethod
    def close(self, *, failed: bool) -> None:
        """Ends the launch."""


class _TensorBoard(_Mirror):
    """Writes events at once, in this thread: a failure is seen, and a crash loses nothing.

    `tensorboardX.SummaryWriter` hands them to a thread and a queue; once that thread has failed,
    the queue fills up and blocks training.
    """

    def __init__(self, folder: Path, done: int) -> None:
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto import event_pb2, summary_pb2

        events, summaries = cast("Any", event_pb2), cast("Any", summary_pb2)
        self._event, self._summary = events.Event, summaries.Summary
        folder.mkdir(parents=True, exist_ok=True)
        self._writer = cast("Any", EventsWriter)(str(folder / "events"), f".{done}")
        start = events.SessionLog(status=events.SessionLog.START)
        # TensorBoard drops the points of earlier files from this step on.
        self._write(step=done + 1, wall_time=time.time(), session_log=start)

    def show(self, step: int, values: Mapping[str, float], when: float) -> None:
        points = [self._summary.Value(tag=tag, simple_value=x) for tag, x in values.items()]
        self._write(step=step, wall_time=when, summary=self._summary(value=points))

    def close(self, *, failed: bool) -> None:
        del failed
        self._writer.close()

    def _write(self, **fields: Any) -> None:
        self._writer.write_event(self._event(**fields))
        self._writer.flush()


class _WandB(_Mirror):
    """Goes on with the run whose id the run folder holds, or starts one."""

    def __init__(self, run_dir: Path, config: TrainConfig) -> None:
        wandb = _import_wandb(config.wandb_project)
        id_file = run_dir / WANDB_ID_FILE
        known = id_file.read_text(encoding="utf-8").strip() if id_file.exists() else None
        try:
            self._run = wandb.init(
                project=config.wandb_project,
                name=run_dir.name,
                dir=str(run_dir),
                config=to_dict(config),
                allow_val_change=True,
                id=known,
                resume="allow",
            )
            # Points lie at the run's own steps: W&B's counter would refuse those done again.
            self._run.define_metric("step")
            self._run.define_metric("*", step_metric="step")
        except Exception as error:
            raise ValueError(
                f"wandb_project: Weights & Biases must start, got {type(error).__name__}: {error}; "
                "run `wandb login`, set WANDB_MODE=offline, or leave --wandb-project out"
            ) from error
        id_file.write_text(self._run.id + "\n", encoding="utf-8")

    def show(self, step: int, values: Mapping[str, float], when: float) -> None:
        self._run.log({"step": step, "time": when, **values})

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


def _import_wandb(project: str) -> Any:
    try:
        import wandb  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        raise ValueError(
            f'wandb_project needs the package wandb, got wandb_project="{project}" without it; '
            "use `pip install wandb`, or leave --wandb-project out"
        ) from error
    return cast("Any", wandb)
