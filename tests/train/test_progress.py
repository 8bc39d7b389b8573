"""Progress: a live bar in a terminal, lines elsewhere; markup in names does no harm."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from farspan.train.metrics import Meter, StepRecord
from farspan.train.progress import Reporter


def record(step: int, peak: float | None = None) -> StepRecord:
    return Meter(2, peak).record(
        step=step,
        outcome={"loss": 2.5, "grad_norm": 1.0, "learning_rate": 1e-3, "valid_tokens": 1000},
        flops=4 * 10**12,
        step_seconds=2.0,
        data_wait_seconds=0.25,
    )


def show(*, terminal: bool, peak: float | None = None) -> str:
    console = Console(
        file=io.StringIO(), force_terminal=terminal, width=150, soft_wrap=not terminal
    )
    reporter = Reporter(log_every=10, console=console)
    with reporter.phase("loading data ([/tmp])"):
        pass
    with reporter.steps(0, 30):
        with reporter.phase("compiling"):
            pass
        for step in range(1, 31):
            reporter.step(record(step, peak))
        reporter.note("saved")
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_lines_come_at_the_first_the_last_and_every_tenth_step() -> None:
    lines = show(terminal=False).splitlines()
    assert lines[0].startswith("loading data ([/tmp]) ... 0.")
    steps = [line for line in lines if line.startswith("step")]
    assert [line.split()[1] for line in steps] == ["1/30", "10/30", "20/30", "30/30"]
    assert steps[1] == (
        "step 10/30  loss 2.5000  500 tokens/s  1 TFLOP/s per device  data wait 0.25 s  ETA 0:40"
    )
    assert "ETA -:--" in steps[0]


@pytest.mark.parametrize("terminal", [True, False])
def test_mfu_is_shown_where_the_peak_is_known(terminal: bool) -> None:
    assert "MFU" not in show(terminal=terminal)
    assert "MFU 50.0%" in show(terminal=terminal, peak=2e12)


def test_a_terminal_gets_a_bar_that_ends_full() -> None:
    shown = show(terminal=True)
    assert "30/30" in shown
    assert "loading data ([/tmp])" in shown
    assert "saved" in shown
