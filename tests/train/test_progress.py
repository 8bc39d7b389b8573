"""Progress: a live bar in a terminal, lines elsewhere; markup in names does no harm."""

from __future__ import annotations

import dataclasses
import io
import re
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from farspan.train.metrics import EvalRecord, Meter, StepRecord
from farspan.train.progress import Reporter, loss_curve


def record(step: int, peak: float | None = None, **changes: Any) -> StepRecord:
    outcome = {
        "loss": 2.5,
        "z_loss": 0.0,
        "finite": 1.0,
        "grad_norm": 1.0,
        "learning_rate": 1e-3,
        "valid_tokens": 1000.0,
    }
    made = Meter(2, peak, 64).record(
        step=step,
        outcome=outcome,
        flops=4 * 10**12,
        step_seconds=2.0,
        data_wait_seconds=0.25,
    )
    return dataclasses.replace(made, compiled=step == 1, **changes)


def printed(act: Callable[[Reporter], None], *, terminal: bool = False, **options: Any) -> str:
    """What a reporter prints while `act` uses it."""
    console = Console(
        file=io.StringIO(), force_terminal=terminal, width=150, soft_wrap=not terminal
    )
    act(Reporter(10, console, **options))
    assert isinstance(console.file, io.StringIO)
    return re.sub(r"\x1b\[[?\d;]*[A-Za-z]|\r", "", console.file.getvalue())


def show(*, terminal: bool, peak: float | None = None) -> str:
    return printed(lambda reporter: train(reporter, peak), terminal=terminal)


def train(reporter: Reporter, peak: float | None = None) -> None:
    with reporter.phase("loading data ([/tmp])"):
        pass
    with reporter.steps(0, 30):
        with reporter.phase("compiling"):
            pass
        for step in range(1, 31):
            reporter.step(record(step, peak))
        reporter.note("saved")


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


def test_memory_and_goodput_follow_and_the_convention_of_mfu_is_named_once() -> None:
    def act(reporter: Reporter) -> None:
        with reporter.steps(0, 20):
            for step in (10, 20):
                reporter.step(record(step, 2e12, memory_bytes=13 * 2**30, goodput=0.976))

    convention, *lines = printed(act).splitlines()
    assert convention == (
        "TFLOP/s and MFU count forward and backward over exactly the visible query-key pairs; "
        "recomputation is not counted"
    )
    assert [line.split("  ")[4:8] for line in lines] == [
        ["MFU 50.0%", "data wait 0.25 s", "mem 13.0 GiB", "goodput 98%"]
    ] * 2


@pytest.mark.parametrize("terminal", [True, False])
def test_a_skipped_step_is_said_at_once_and_an_evaluation_in_one_line(*, terminal: bool) -> None:
    def act(reporter: Reporter) -> None:
        with reporter.steps(0, 30):
            reporter.step(record(7, loss=float("nan"), grad_norm=float("inf"), finite=False))
            reporter.evaluation(EvalRecord(100, 2.3125, 1234, 2.2875, 3.25))
            reporter.evaluation(EvalRecord(200, 2.3125, 1234, None, 3.25))

    text = printed(act, terminal=terminal)
    for line in (
        "step 7 skipped: loss nan, gradient norm inf; the parameters stay as they were",
        "eval step 100: loss 2.3125 (EMA 2.2875) over 1,234 tokens in 3.2 s",
        "eval step 200: loss 2.3125 over 1,234 tokens in 3.2 s",
    ):
        assert line in text


def test_a_stage_that_compiles_is_shown_and_starts_the_estimate_of_time_anew() -> None:
    def act(reporter: Reporter) -> None:
        with reporter.steps(0, 30):
            reporter.step(record(1))
            reporter.step(record(2))
            reporter.step(dataclasses.replace(record(13), compiled=True))
            reporter.step(record(20, step_seconds=6.0))

    assert [(line.split()[1], line.split()[-1]) for line in printed(act).splitlines()] == [
        *(("1/30", "-:--"), ("13/30", "-:--"), ("20/30", "1:00")),
    ]


def test_details_of_a_phase_come_at_most_every_ten_seconds_in_a_log() -> None:
    now = 0.0

    def act(reporter: Reporter) -> None:
        nonlocal now
        with reporter.phase("reading [x]") as update:
            for now in (1.0, 9.0, 10.0, 19.5, 21.0, 25.0):
                update(f"[{now:.0f}] documents")
        with reporter.phase("placing") as update:
            update("at once")
            now += 2

    assert printed(act, clock=lambda: now).splitlines() == [
        "reading [x] ... ",
        "reading [x]: [10] documents",
        "reading [x]: [21] documents",
        "reading [x]: 25.0 s",
        "placing ... 2.0 s",
    ]


def test_details_of_a_phase_come_at_once_in_a_terminal_beneath_a_bar_too() -> None:
    def act(reporter: Reporter) -> None:
        with reporter.phase("reading [x]") as update:
            update("[7] documents")
        with reporter.steps(0, 2), reporter.phase("evaluating") as update:
            update("batch 5")

    text = printed(act, terminal=True)
    assert "reading [x] ... [7] documents" in text
    assert "evaluating ... batch 5" in text


@pytest.mark.parametrize("terminal", [True, False])
def test_a_note_or_an_error_inside_a_phase_gets_a_line_of_its_own(*, terminal: bool) -> None:
    def act(reporter: Reporter) -> None:
        with reporter.phase("reading"):
            reporter.note("a note")
        with pytest.raises(KeyError), reporter.phase("placing"):
            raise KeyError
        reporter.note("the end")

    lines = [line.strip() for line in printed(act, terminal=terminal).splitlines()]
    assert "a note" in lines
    assert lines[-1] == "the end"
    assert not any(line.startswith("placing:") for line in lines)


def test_a_quiet_reporter_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    assert printed(train, terminal=True, quiet=True) == ""
    train(Reporter(1, quiet=True), peak=2e12)
    assert capfd.readouterr() == ("", "")


def test_the_loss_curve_averages_blocks_and_leaves_out_what_is_no_number() -> None:
    falling = [8.0 - step / 10 for step in range(80)]
    assert loss_curve(falling, width=8) == "█▇▆▅▄▃▂▁ 7.55 -> 0.55"
    assert loss_curve([3.0, None, float("nan"), 2.0]) == "█▁ 3 -> 2"
    assert loss_curve([2.0, 2.0]) == "▁▁ 2 -> 2"
    assert loss_curve([2.0, None]) == ""
