"""Goodput: which seconds count, over all launches of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from farspan.train.goodput import Goodput
from farspan.train.metrics import Meter

BEGIN = 1_700_000_000.0
OUTCOME = {
    "loss": 2.5,
    "z_loss": 0.0,
    "finite": 1.0,
    "grad_norm": 1.25,
    "learning_rate": 1e-3,
    "valid_tokens": 100.0,
}


def step(number: int, seconds: float, *, finite: bool = True, compiled: bool = False) -> Any:
    return {"step": number, "step_seconds": seconds, "finite": finite, "compiled": compiled}


def write(path: Path, *objects: dict[str, Any]) -> None:
    path.write_text("".join(json.dumps(each) + "\n" for each in objects))


def write_run(run_dir: Path) -> None:
    """Five steps from step 0 on; a crash; then this launch, which goes on from step 3."""
    write(
        run_dir / "launches.jsonl",
        {"time": "2023-11-14T22:13:20.000+00:00", "start_step": 0},
        {"time": "2023-11-14T23:14:10.000+01:00", "start_step": 3},
    )
    write(
        run_dir / "metrics.jsonl",
        step(1, 9.0, compiled=True),
        step(2, 4.0),
        step(3, 5.0, finite=False),
        step(4, 6.0),
        step(5, 7.0),
    )


def test_only_kept_finite_steps_without_compilation_count_over_the_time_since_the_first_launch(
    tmp_path: Path,
) -> None:
    write_run(tmp_path)
    goodput = Goodput(tmp_path, done=3)
    assert goodput.share(BEGIN + 100) == 4 / 100
    goodput.add(8.0, finite=True, compiled=True)
    assert goodput.share(BEGIN + 100) == 4 / 100
    goodput.add(6.0, finite=True, compiled=False)
    goodput.add(6.0, finite=False, compiled=False)
    assert goodput.share(BEGIN + 100) == 10 / 100


def test_a_torn_line_and_a_step_written_twice_count_once(tmp_path: Path) -> None:
    write_run(tmp_path)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(step(2, 3.0)) + "\n" + '{"step": 3, "step_sec')
    assert Goodput(tmp_path, done=5).share(BEGIN + 100) == (3 + 6 + 7) / 100


def test_goodput_is_unknown_where_the_clocks_contradict_one_another(tmp_path: Path) -> None:
    write_run(tmp_path)
    goodput = Goodput(tmp_path, done=5)
    assert goodput.share(BEGIN + 17) == 1
    assert goodput.share(BEGIN + 16) is None
    assert goodput.share(BEGIN - 1) is None


def test_meters_of_all_stages_share_one_goodput_and_each_leaves_its_first_step_out(
    tmp_path: Path,
) -> None:
    write(tmp_path / "launches.jsonl", {"time": "2023-11-14T22:13:20+0000", "start_step": 0})
    goodput, now = Goodput(tmp_path, done=0), BEGIN
    shares: list[float | None] = []

    def clock() -> float:
        return now

    for seq_len in (64, 128):
        meter = Meter(1, None, seq_len, goodput, clock=clock)
        for number in range(3):
            now += 10
            record = meter.record(
                step=number + 1, outcome=OUTCOME, flops=1, step_seconds=5.0, data_wait_seconds=0.0
            )
            assert (record.seq_len, record.compiled, record.time) == (seq_len, number == 0, now)
            shares.append(record.goodput)
    assert shares == pytest.approx([0, 5 / 20, 10 / 30, 10 / 40, 15 / 50, 20 / 60])
