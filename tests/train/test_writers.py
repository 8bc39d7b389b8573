"""Writers: files that are true, TensorBoard without lost steps, Weights & Biases on request."""

from __future__ import annotations

import dataclasses
import json
import struct
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tensorboardX.proto.event_pb2 import Event, SessionLog

from farspan.recipes import get_recipe
from farspan.train.metrics import EvalRecord, MetricsFile, StepRecord
from farspan.train.writers import check_writers, open_writers

CONFIG = get_recipe("quickstart").build()
WITH_WANDB = dataclasses.replace(CONFIG, wandb_project="long")


def record(step: int, loss: float = 2.0) -> StepRecord:
    return StepRecord(
        step=step,
        time=1e9 + step,
        loss=loss,
        z_loss=0.0,
        finite=True,
        tokens=100,
        seq_len=64,
        tokens_per_second=50.0,
        tflops_per_device=0.5,
        mfu=None,
        step_seconds=2.0,
        compiled=False,
        data_wait_seconds=0.5,
        grad_norm=1.25,
        learning_rate=1e-3,
        memory_bytes=2**31,
        goodput=0.5,
    )


def evaluation(step: int, loss: float = 3.0) -> EvalRecord:
    return EvalRecord(step, loss, 1000, loss - 1, 4.0)


def launch(run_dir: Path, done: int, last: int, config: Any = CONFIG, loss: float = 2.0) -> Any:
    """Writes the steps of one launch, with an evaluation after each; returns the warnings."""
    warnings: list[str] = []
    with open_writers(run_dir, done, config, warnings.append) as writers:
        for step in range(done + 1, last + 1):
            writers.write(record(step, loss))
            writers.write_evaluation(evaluation(step, loss + 1))
    return warnings


def steps_of(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def tensorboard_points(run_dir: Path) -> dict[str, dict[int, float]]:
    """The curves as TensorBoard shows them: a start event drops earlier points from its step on."""
    curves: dict[str, dict[int, float]] = {}
    for path in sorted((run_dir / "tensorboard").iterdir()):
        data, at = path.read_bytes(), 0
        while at < len(data):
            (length,) = struct.unpack_from("<Q", data, at)
            event = Event.FromString(data[at + 12 : at + 12 + length])
            at += 12 + length + 4
            if event.session_log.status == SessionLog.START:
                for points in curves.values():
                    for step in [step for step in points if step >= event.step]:
                        del points[step]
            for value in event.summary.value:
                curves.setdefault(value.tag, {})[event.step] = value.simple_value
    return curves


def test_a_crash_and_a_resume_leave_each_step_once_in_every_place(tmp_path: Path) -> None:
    assert launch(tmp_path, 0, 5) == []
    assert launch(tmp_path, 2, 4, loss=1.0) == []
    assert steps_of(tmp_path / "metrics.jsonl") == [1, 2, 3, 4]
    assert steps_of(tmp_path / "eval.jsonl") == [1, 2, 3, 4]
    curves = tensorboard_points(tmp_path)
    assert curves["train/loss"] == {1: 2.0, 2: 2.0, 3: 1.0, 4: 1.0}
    assert curves["eval/loss"] == {1: 3.0, 2: 3.0, 3: 2.0, 4: 2.0}
    assert curves["eval/loss_ema"] == {1: 2.0, 2: 2.0, 3: 1.0, 4: 1.0}
    assert curves["throughput/tokens_per_second"][4] == 50
    assert curves["memory/peak_bytes"][4] == 2**31
    assert "throughput/mfu" not in curves


def test_what_was_written_is_on_disk_before_the_run_ends(tmp_path: Path) -> None:
    with open_writers(tmp_path, 0, CONFIG, lambda _: None) as writers:
        writers.write(record(1))
        assert steps_of(tmp_path / "metrics.jsonl") == [1]
        assert tensorboard_points(tmp_path)["train/loss"] == {1: 2.0}


def test_a_failing_tensorboard_is_said_once_and_the_files_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError("disk is full")

    warnings: list[str] = []
    with open_writers(tmp_path, 0, CONFIG, warnings.append) as writers:
        writers.write(record(1))
        monkeypatch.setattr("tensorboardX.record_writer.RecordWriter.write", fail)
        writers.write(record(2))
        writers.write_evaluation(evaluation(2))
        writers.write(record(3))
    assert steps_of(tmp_path / "metrics.jsonl") == [1, 2, 3]
    assert steps_of(tmp_path / "eval.jsonl") == [2]
    (warning,) = warnings
    assert warning.startswith("TensorBoard gets no more of this launch (OSError: disk is full)")


def test_a_failing_metrics_file_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError("disk is full")

    monkeypatch.setattr(MetricsFile, "write", fail)
    with open_writers(tmp_path, 0, CONFIG, lambda _: None) as writers:
        with pytest.raises(OSError, match="disk is full"):
            writers.write(record(1))
        with pytest.raises(OSError, match="disk is full"):
            writers.write_evaluation(evaluation(1))


class FakeWandb:
    """As much of the package wandb as is used."""

    def __init__(self) -> None:
        self.started: list[dict[str, Any]] = []
        self.logged: list[dict[str, Any]] = []
        self.exit_codes: list[int] = []
        self.axes: list[tuple[str, str | None]] = []
        self.broken = ""

    def init(self, **arguments: Any) -> Any:
        if self.broken == "init":
            raise RuntimeError("no key")
        self.started.append(arguments)
        return SimpleNamespace(
            id=arguments["id"] or "r4nd0m",
            log=self.log,
            define_metric=lambda name, step_metric=None: self.axes.append((name, step_metric)),
            finish=self.finish,
        )

    def finish(self, exit_code: int) -> None:
        self.exit_codes.append(exit_code)

    def log(self, values: dict[str, Any]) -> None:
        if self.broken == "log":
            raise RuntimeError("gone")
        self.logged.append(values)


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def test_wandb_goes_on_with_the_same_run_at_the_runs_own_steps(
    tmp_path: Path, wandb: FakeWandb
) -> None:
    launch(tmp_path, 0, 3, WITH_WANDB)
    launch(tmp_path, 2, 4, WITH_WANDB)
    first, second = wandb.started
    assert (first["project"], first["id"], second["id"]) == ("long", None, "r4nd0m")
    assert first["config"]["data"]["seq_len"] == CONFIG.data.seq_len
    assert (tmp_path / "wandb_run_id").read_text() == "r4nd0m\n"
    assert wandb.axes[:2] == [("step", None), ("*", "step")]
    losses = [(v["step"], v["train/loss"]) for v in wandb.logged if "train/loss" in v]
    assert losses == [(step, 2.0) for step in (1, 2, 3, 3, 4)]
    assert [v["step"] for v in wandb.logged if v.get("eval/loss") == 3.0] == [1, 2, 3, 3, 4]
    assert wandb.exit_codes == [0, 0]


def test_a_run_that_fails_says_so_to_wandb(tmp_path: Path, wandb: FakeWandb) -> None:
    with (
        pytest.raises(FloatingPointError),
        open_writers(tmp_path, 0, WITH_WANDB, lambda _: None),
    ):
        raise FloatingPointError
    assert wandb.exit_codes == [1]


def test_a_failing_wandb_is_said_once_and_the_rest_goes_on(
    tmp_path: Path, wandb: FakeWandb
) -> None:
    wandb.broken = "log"
    (warning,) = launch(tmp_path, 0, 3, WITH_WANDB)
    assert warning.startswith("Weights & Biases gets no more of this launch (RuntimeError: gone)")
    assert steps_of(tmp_path / "metrics.jsonl") == [1, 2, 3]
    assert set(tensorboard_points(tmp_path)["train/loss"]) == {1, 2, 3}


def test_wandb_that_cannot_start_or_is_not_installed_is_refused_with_the_remedy(
    tmp_path: Path, wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb.broken = "init"
    with pytest.raises(ValueError, match="got RuntimeError: no key; run `wandb login`"):
        launch(tmp_path, 0, 1, WITH_WANDB)
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match="use `pip install wandb`, or leave --wandb-project out"):
        check_writers(WITH_WANDB)
    check_writers(CONFIG)
