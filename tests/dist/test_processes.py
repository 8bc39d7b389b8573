"""Processes join, agree, and fail together; one alone needs nothing of it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import jax
import pytest

from farspan.dist import processes
from farspan.dist.devices import ensure_devices
from farspan.dist.processes import (
    ProcessGroup,
    any_process,
    current_group,
    join_processes,
    leave,
    share,
    wait_for_all,
)

AGREE = """
import jax
from farspan.dist.devices import ensure_devices
from farspan.dist.processes import any_process, join_processes, share, wait_for_all

with join_processes() as group:
    ensure_devices(4)
    assert (jax.device_count(), jax.local_device_count()) == (4, 2)
    assert join_processes() == group
    assert [share(f"{group.index}-{turn}") for turn in range(2)] == ["0-0", "0-1"]
    said = [[False, False], [True, False], [False, True], [True, True]]
    assert [any_process(flags[group.index]) for flags in said] == [False, True, True, True]
    wait_for_all("a")
    wait_for_all("a")
"""
FAIL = """
    import time
    print(group.index, group.primary, group.found, flush=True)
    if group.index == 1:
        raise ValueError("bad data; use good data")
    time.sleep(60)
"""


def start(script: str, index: int, count: int, port: int, **more: str) -> subprocess.Popen[str]:
    own = {
        "FARSPAN_COORDINATOR": f"127.0.0.1:{port}",
        "FARSPAN_NUM_PROCESSES": str(count),
        "FARSPAN_PROCESS_ID": str(index),
    }
    return subprocess.Popen(
        [sys.executable, "-c", script],
        env={**os.environ, **own, **more},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def test_a_process_alone_starts_nothing_and_agrees_with_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in list(os.environ):
        if name.startswith(("FARSPAN_", "SLURM_", "OMPI_", "JAX_COORD", "JAX_NUM")):
            monkeypatch.delenv(name)
    with join_processes() as group:
        assert group == current_group() == ProcessGroup(0, 1, "alone")
        assert group.primary
        assert [any_process(flag) for flag in (True, False)] == [True, False]
        assert share("x") == "x"
        wait_for_all("nobody")
    leave(1)
    assert not jax.distributed.is_initialized()
    with pytest.raises(KeyError), join_processes():
        raise KeyError


def test_processes_agree_and_what_one_raises_ends_the_others(port: int) -> None:
    both = [start(AGREE + FAIL, index, 2, port) for index in range(2)]
    (out, err), (failed_out, failed_err) = [process.communicate(timeout=120) for process in both]
    assert "0 True farspan launch" in out, err
    assert "1 False farspan launch" in failed_out, failed_err
    assert [process.returncode for process in both] == [1, 1]
    assert "ValueError: bad data; use good data" in failed_err
    assert "error: process 1 of 2 failed: ValueError: bad data; run again to go on" in err


def test_others_that_never_start_are_an_error_within_the_time_given(port: int) -> None:
    script = "from farspan.dist.processes import join_processes; join_processes()"
    alone = start(script, 1, 2, port, FARSPAN_START_TIMEOUT="1")
    _, err = alone.communicate(timeout=60)
    assert alone.returncode == 1
    assert "all 2 must start within 1 seconds, got no answer from some of them (process 1" in err
    assert f"127.0.0.1:{port}" in err


@pytest.mark.parametrize(
    ("count", "devices", "message"),
    [
        (3, 8, "got 3 processes and 8 devices; start [24]"),
        (2, 4, "sizes for 4 of 8 .cpu.; use larger sizes"),
    ],
)
def test_processes_that_cannot_share_the_devices_are_refused(
    monkeypatch: pytest.MonkeyPatch, count: int, devices: int, message: str
) -> None:
    monkeypatch.setattr(processes._Joined, "group", ProcessGroup(0, count, "Slurm"))
    with pytest.raises(ValueError, match=message):
        ensure_devices(devices)


@pytest.mark.parametrize("seconds", ["0", "soon", "-3"])
def test_a_start_timeout_that_is_no_time_is_refused(
    monkeypatch: pytest.MonkeyPatch, seconds: str
) -> None:
    for name, value in {
        "FARSPAN_COORDINATOR": "127.0.0.1:1",
        "FARSPAN_NUM_PROCESSES": "2",
        "FARSPAN_PROCESS_ID": "1",
        "FARSPAN_START_TIMEOUT": seconds,
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"FARSPAN_START_TIMEOUT must be.*{seconds}"):
        join_processes()
