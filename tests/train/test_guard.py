"""Steps that are not finite: stop or skip, and the batch is kept."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest

from farspan.data import Batch
from farspan.train.guard import MOST_IN_A_ROW, NonFiniteGuard
from farspan.train.metrics import Meter, StepRecord

BATCH = Batch(*(np.full((2, 4), value, np.int32) for value in range(4)))


def record(step: int, *, finite: bool) -> StepRecord:
    outcome = {"loss": 1.0 if finite else math.nan, "z_loss": 0.0, "finite": float(finite)}
    outcome |= {"grad_norm": 1.0, "learning_rate": 1e-3, "valid_tokens": 8.0}
    meter = Meter(num_devices=1, peak_flops_per_second=None, seq_len=4)
    return meter.record(
        step=step, outcome=outcome, flops=1, step_seconds=1.0, data_wait_seconds=0.0
    )


def test_a_step_that_is_not_finite_stops_the_run_and_its_batch_is_kept(tmp_path: Path) -> None:
    guard = NonFiniteGuard(tmp_path, "stop", keeps_batches=True)
    assert guard.check(record(1, finite=True), BATCH, None)
    with pytest.raises(
        FloatingPointError, match=r"loss=nan.* step 2 .*step-00000002\.npz.*step 1 is"
    ):
        guard.check(record(2, finite=False), BATCH, 1)
    with np.load(tmp_path / "non_finite" / "step-00000002.npz") as kept:
        for field in dataclasses.fields(Batch):
            np.testing.assert_array_equal(kept[field.name], getattr(BATCH, field.name))


def test_such_steps_are_skipped_on_request_until_too_many_follow_one_another(
    tmp_path: Path,
) -> None:
    guard = NonFiniteGuard(tmp_path, "skip", keeps_batches=False)
    for step in range(1, MOST_IN_A_ROW):
        assert not guard.check(record(step, finite=False), BATCH, None)
    assert guard.check(record(MOST_IN_A_ROW, finite=True), BATCH, None)
    for step in range(1, MOST_IN_A_ROW):
        assert not guard.check(record(step, finite=False), BATCH, None)
    with pytest.raises(FloatingPointError, match=f"got {MOST_IN_A_ROW} steps in a row"):
        guard.check(record(99, finite=False), BATCH, None)
    assert guard.skipped == 2 * (MOST_IN_A_ROW - 1) + 1
    assert not (tmp_path / "non_finite").exists()
