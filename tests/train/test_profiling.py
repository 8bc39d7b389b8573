"""Profiler: a real trace of the third to fifth step of a launch, or word that there is none."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from farspan.train.profiling import Profiler


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replaces tracing; the list receives what would have been done."""
    done: list[str] = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder: done.append(f"start {folder}"))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: done.append("stop"))
    return done


def launch(run_dir: Path, first: int, last: int, done: list[str], *, enabled: bool = True) -> None:
    with Profiler(run_dir, first, enabled=enabled, note=done.append) as profiler:
        for number in range(first, last + 1):
            with profiler.step(number):
                done.append(str(number))


def test_a_trace_of_a_jitted_function_appears(tmp_path: Path) -> None:
    notes: list[str] = []
    square = jax.jit(jnp.square)
    with Profiler(tmp_path, 11, enabled=True, note=notes.append) as profiler:
        for number in range(11, 17):
            with profiler.step(number):
                square(jnp.float32(number)).block_until_ready()
    (trace,) = (tmp_path / "profile").rglob("*.xplane.pb")
    assert trace.stat().st_size > 0
    assert b"train" in trace.read_bytes()
    assert notes == [f"trace of 3 steps in {tmp_path / 'profile'}"]


def test_the_third_to_fifth_step_of_a_launch_are_traced_once(
    tmp_path: Path, traced: list[str]
) -> None:
    folder = tmp_path / "profile"
    launch(tmp_path, 101, 110, traced)
    assert traced == [
        *("101", "102", f"start {folder}", "103", "104", "105", "stop"),
        *(f"trace of 3 steps in {folder}", "106", "107", "108", "109", "110"),
    ]


def test_a_launch_that_ends_early_keeps_the_steps_it_has(tmp_path: Path, traced: list[str]) -> None:
    folder = tmp_path / "profile"
    launch(tmp_path, 1, 4, traced)
    assert traced[2:] == [f"start {folder}", "3", "4", "stop", f"trace of 2 steps in {folder}"]


def test_an_error_in_a_traced_step_still_ends_the_trace(tmp_path: Path, traced: list[str]) -> None:
    with (
        pytest.raises(FloatingPointError),
        Profiler(tmp_path, 1, enabled=True, note=traced.append) as profiler,
        profiler.step(3),
    ):
        raise FloatingPointError
    assert traced[1] == "stop"


def test_a_launch_too_short_for_a_trace_says_so(tmp_path: Path, traced: list[str]) -> None:
    launch(tmp_path, 1, 2, traced)
    assert traced == [
        *("1", "2"),
        "no trace was written: the launch ended before step 3, the first of those traced",
    ]


def test_without_the_flag_nothing_is_traced_or_said(tmp_path: Path, traced: list[str]) -> None:
    launch(tmp_path, 1, 6, traced, enabled=False)
    assert traced == ["1", "2", "3", "4", "5", "6"]
    assert not (tmp_path / "profile").exists()
