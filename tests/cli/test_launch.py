"""The launcher starts processes as one, passes on what they say, and ends and restarts them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farspan.cli import launch
from farspan.cli.launch import main

ENVIRONMENT = (
    'import os, sys; index = int(os.environ["FARSPAN_PROCESS_ID"]); '
    'count = os.environ["FARSPAN_NUM_PROCESSES"]; '
)


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Instead of farspan the processes run the Python code that is their first argument."""
    monkeypatch.setattr(launch, "_PROGRAM", (sys.executable, "-S", "-c"))
    monkeypatch.chdir(tmp_path)


def run(code: str, *options: str) -> int:
    return main([*options, "--", ENVIRONMENT + code])


@pytest.mark.usefixtures("program")
def test_output_of_the_first_and_errors_of_all_are_passed_on(
    capfd: pytest.CaptureFixture[str],
) -> None:
    code = (
        'print("out", index, count, os.environ["FARSPAN_COORDINATOR"]); '
        'print("[Gloo] Rank 0 is connected to 7 peer ranks. Expected number of connected peer '
        'ranks is : 7"); '
        'print("err", index, file=sys.stderr)'
    )
    assert run(code, "-n", "2") == 0
    out, err = capfd.readouterr()
    assert out.startswith("out 0 2 127.0.0.1:")
    assert len(out.splitlines()) == 1
    assert sorted(err.splitlines()) == ["[0] err 0", "[1] err 1"]
    assert run(code, "-n", "2", "--all-output") == 0
    address = out.split()[-1].rpartition(":")[0]
    shown = sorted(
        line.partition(f" 2 {address}")[0] for line in capfd.readouterr().out.splitlines()
    )
    assert shown == ["[1] out 1", "out 0"]


@given(st.lists(st.integers(0, 3), max_size=40))
def test_words_of_several_devices_that_mingle_are_left_out(turns: list[int]) -> None:
    pieces = ("[Gloo] Rank ", "", " is connected to ", "7", " peer ranks. ")
    pieces += ("Expected number of connected peer ranks is : ", "7", "\n")
    left = {device: [piece or str(device) for piece in pieces] for device in range(4)}
    mingled = "".join(left[device].pop(0) for device in turns if left[device])
    text = "step 7\n" + mingled + "".join("".join(rest) for rest in left.values()) + "done 7\n"
    shown = "".join(launch._GLOO_GREETINGS.sub("", line) for line in text.splitlines(True))
    assert shown.startswith("step 7\n")
    assert shown.endswith("done 7\n")
    assert not shown.removeprefix("step").removesuffix("done 7\n").strip("0123456789\n ")


@pytest.mark.usefixtures("program")
def test_the_others_end_when_one_fails_and_its_status_and_output_are_given(
    capfd: pytest.CaptureFixture[str],
) -> None:
    code = (
        'import signal, time; print("held", index, flush=True); '
        "index == 1 and sys.exit(3); "
        "index == 2 and signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "time.sleep(60)"
    )
    assert run(code, "-n", "3", "--grace-seconds", "0.2") == 3
    out, err = capfd.readouterr()
    assert "held 0" in out.splitlines()
    assert "[1] held 1" in out.splitlines()
    assert "farspan launch: process 1 of 3 ended with status 3" in err


@pytest.mark.usefixtures("program")
def test_a_killed_process_gives_the_signal_and_all_start_again(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code = (
        'import pathlib; mark = pathlib.Path(f"started-{index}"); again = mark.exists(); '
        "mark.touch(); again or index == 0 or os.kill(os.getpid(), 9)"
    )
    assert run(code, "-n", "2", "--max-restarts", "1") == 0
    err = capfd.readouterr().err
    assert "process 1 of 2 was ended by SIGKILL" in err
    assert "restarting all 2 (1 of 1)" in err
    for mark in tmp_path.glob("started-*"):
        mark.unlink()
    assert run(code, "-n", "2") == 128 + 9


@pytest.mark.usefixtures("program")
def test_a_mistake_in_the_arguments_is_not_tried_again(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert run("sys.exit(2)", "-n", "2", "--max-restarts", "5") == 2
    assert "restarting" not in capfd.readouterr().err


@pytest.mark.usefixtures("program")
def test_a_signal_reaches_every_process_and_nothing_is_restarted(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code = (
        "import pathlib, signal, time; "
        "signal.signal(signal.SIGTERM, lambda *_: (print('asked', flush=True), sys.exit(143))); "
        'pathlib.Path(f"ready-{index}").touch(); time.sleep(60)'
    )

    def ask() -> None:
        while len(list(tmp_path.glob("ready-*"))) < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    asking = threading.Thread(target=ask)
    asking.start()
    assert run(code, "-n", "2", "--all-output", "--max-restarts", "3") == 143
    asking.join()
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == ["[1] asked", "asked"]
    assert "restarting" not in err
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.usefixtures("program")
def test_a_signal_while_the_processes_start_reaches_each_of_them_once(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "import signal, time; "
        "signal.signal(signal.SIGTERM, lambda *_: print('asked', flush=True)); "
        "print('ready', flush=True); time.sleep(1); sys.exit(143)"
    )

    class Member(launch._Member):
        def __init__(self, index: int, *arguments: Any, **options: Any) -> None:
            super().__init__(index, *arguments, **options)
            out, deadline = "", time.monotonic() + 60
            while "ready" not in out and time.monotonic() < deadline:
                out = capfd.readouterr().out
                time.sleep(0.01)
            if index == 0:
                os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(launch, "_Member", Member)
    assert run(code, "-n", "2", "--all-output", "--max-restarts", "3") == 143
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == ["[1] asked", "asked"]
    assert "restarting" not in err


@pytest.mark.usefixtures("program")
def test_where_one_cannot_be_started_those_before_it_are_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[launch._Member] = []

    class Member(launch._Member):
        def __init__(self, index: int, *arguments: Any, **options: Any) -> None:
            if index == 1:
                raise BlockingIOError("no more processes")
            super().__init__(index, *arguments, **options)
            started.append(self)

    monkeypatch.setattr(launch, "_Member", Member)
    with pytest.raises(BlockingIOError):
        run("import time; time.sleep(600)", "-n", "2")
    (first,) = started
    assert first._process.wait(60) == -signal.SIGKILL
    first.finish()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-n", "2"], "needs a command behind --, got nothing"),
        (["-n", "2", "--", "--steps"], "needs a command behind --, got --steps"),
        (["-n", "0", "--", "train"], "num_processes must be at least 1, got 0"),
        (["--max-restarts=-1", "--", "train"], "max_restarts must be at least 0, got -1"),
        (["--max-restart", "1", "--", "train"], "did you mean --max-restarts"),
        (["train", "quickstart"], "no argument train"),
    ],
)
def test_mistakes_are_refused_with_a_remedy(arguments: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        main(arguments)


def test_a_training_run_gets_one_folder_for_all_attempts() -> None:
    command = launch._with_run_dir(["train", "quickstart", "--steps", "3"])
    assert command[:-1] == ["train", "quickstart", "--steps", "3", "--run-dir"]
    assert command[-1].startswith("runs/quickstart-")
    for kept in (
        ["train", "quickstart", "--run_dir=x"],
        ["train", "quickstart", "--run-dir", "x"],
        ["train", "--help"],
        ["verify"],
    ):
        assert launch._with_run_dir(kept) == kept


def test_the_processes_are_farspan_itself() -> None:
    command = [*launch._PROGRAM, "--version"]
    assert subprocess.run(command, check=True, capture_output=True).stdout.startswith(b"farspan ")
