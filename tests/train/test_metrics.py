"""Metrics: what is counted, and a file that survives crashes and resumes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import pytest

from farspan.plan.hardware import CHIPS, find_chip
from farspan.train.metrics import (
    EvalRecord,
    Meter,
    MetricsFile,
    StepRecord,
    peak_memory_bytes,
    read_metrics,
)

OUTCOME = {
    "loss": 2.5,
    "z_loss": 0.5,
    "finite": 1.0,
    "grad_norm": 1.25,
    "learning_rate": 1e-3,
    "valid_tokens": 100.0,
}


def record(step: int, meter: Meter | None = None, **outcome: float) -> StepRecord:
    return (meter or Meter(8, None, 64, clock=lambda: 1e9)).record(
        step=step,
        outcome={**OUTCOME, **outcome},
        flops=8 * 10**12,
        step_seconds=2.0,
        data_wait_seconds=0.5,
    )


@pytest.mark.parametrize("num_devices", [1, 4, 8])
def test_tokens_are_those_of_the_global_batch_for_every_mesh(num_devices: int) -> None:
    measured = record(1, Meter(num_devices, None, 64))
    assert measured.tokens == 100
    assert measured.tokens_per_second == 50.0
    assert measured.tflops_per_device == 4.0 / num_devices


def test_mfu_is_a_share_of_the_peak_and_unknown_without_one() -> None:
    assert record(1).mfu is None
    assert record(1, Meter(8, 1e12, 64)).mfu == 0.5


def test_records_have_the_promised_fields(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path, done=0) as metrics:
        metrics.write(record(1))
        assert json.loads(path.read_text()) == {  # before the file is closed
            "step": 1,
            "time": 1e9,
            "loss": 2.5,
            "z_loss": 0.5,
            "finite": True,
            "tokens": 100,
            "seq_len": 64,
            "tokens_per_second": 50.0,
            "tflops_per_device": 0.5,
            "mfu": None,
            "step_seconds": 2.0,
            "compiled": True,
            "data_wait_seconds": 0.5,
            "grad_norm": 1.25,
            "learning_rate": 1e-3,
            "memory_bytes": None,
            "goodput": None,
        }


def test_numbers_that_are_not_finite_are_null_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path, done=0) as metrics:
        metrics.write(record(1, loss=float("nan"), grad_norm=float("inf"), finite=0.0))
        metrics.write(EvalRecord(1, float("-inf"), 10, None, 1.5))

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    step, evaluation = (
        json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()
    )
    assert (step["loss"], step["grad_norm"], step["finite"]) == (None, None, False)
    assert step["z_loss"] == 0.5
    assert (evaluation["eval_loss"], evaluation["eval_tokens"]) == (None, 10)


class FakeDevice:
    """A device that tells what it holds."""

    platform = "tpu"

    def __init__(self, statistics: dict[str, int] | None) -> None:
        self.statistics = statistics

    def memory_stats(self) -> Any:
        return self.statistics


def test_memory_is_the_peak_of_the_fullest_device_that_tells() -> None:
    full, fuller = FakeDevice({"peak_bytes_in_use": 5}), FakeDevice({"peak_bytes_in_use": 7})
    assert peak_memory_bytes([full, fuller, FakeDevice(None)]) == 7
    assert record(1, Meter(2, None, 64, local_devices=[fuller, full])).memory_bytes == 7
    assert peak_memory_bytes([FakeDevice(None)]) is None
    assert peak_memory_bytes([FakeDevice({"bytes_in_use": 5})]) is None


def test_on_cpu_memory_is_what_the_process_held_at_most() -> None:
    held = peak_memory_bytes(jax.local_devices())
    assert held is not None
    assert 2**26 < held < 2**36  # bytes, not KiB


def test_a_resumed_run_continues_the_file_at_its_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path, done=0) as metrics:
        for step in range(1, 6):
            metrics.write(record(step))
    with path.open("a") as file:
        file.write('{"step": 6, "loss"')  # a crash in the middle of a line
    with MetricsFile(path, done=3) as metrics:
        metrics.write(record(4))
    assert [r["step"] for r in read_metrics(path)] == [1, 2, 3, 4]
    assert path.read_text().count("\n") == 4


def test_reading_skips_a_torn_last_line_and_a_missing_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert read_metrics(path) == []
    path.write_text('{"step": 1, "loss": 2}\n{"step": 2, "lo')
    assert read_metrics(path) == [{"step": 1, "loss": 2}]


@pytest.mark.parametrize(
    ("device_kind", "name"),
    [("TPU v5 lite", "v5e"), ("TPU v5", "v5p"), ("TPU7x", "tpu7x"), ("NVIDIA H200", "h200")],
)
def test_chips_are_found_by_the_exact_device_kind(device_kind: str, name: str) -> None:
    chip = find_chip(device_kind)
    assert chip is not None
    assert chip.name == name


def test_no_peak_is_guessed_for_other_devices() -> None:
    assert find_chip("cpu") is None
    assert find_chip("NVIDIA H100 PCIe") is None
    kinds = [kind for chip in CHIPS for kind in chip.device_kinds]
    assert len(kinds) == len(set(kinds))
