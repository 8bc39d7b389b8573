"""One launch at a time uses a run folder, and a killed one is not in the way."""

from __future__ import annotations

import errno
import fcntl
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from farspan.train import claim as claims
from farspan.train.claim import LOCK_FILE, claim

HOLD = """
import sys, time, pathlib
from farspan.train.claim import claim
with claim(pathlib.Path(sys.argv[1]), print):
    print("held", flush=True)
    time.sleep(600)
"""


def refuse_notes(text: str) -> None:
    raise AssertionError(text)


def test_the_next_launch_is_refused_by_name_and_may_come_after_the_end(tmp_path: Path) -> None:
    with claim(tmp_path / "run", refuse_notes):
        with (
            pytest.raises(ValueError, match=r"one launch at a time.*process \d+ on .*stop it, or"),
            claim(tmp_path / "run", refuse_notes),
        ):
            pass
        with claim(tmp_path / "other", refuse_notes):
            pass
    with claim(tmp_path / "run", refuse_notes):
        pass


def test_a_killed_process_lets_go(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as holder:
        try:
            assert holder.stdout
            assert holder.stdout.readline() == "held\n"
            with (
                pytest.raises(ValueError, match=f"process {holder.pid} on "),
                claim(tmp_path, refuse_notes),
            ):
                pass
        finally:
            holder.kill()
        holder.wait()
        with claim(tmp_path, refuse_notes):
            pass


def test_a_process_of_another_host_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = {"pid": 7, "hostname": "another.host", "since": "2026-01-01T00:00:00+00:00"}
    (tmp_path / LOCK_FILE).write_text(json.dumps(elsewhere))
    notes: list[str] = []
    with (tmp_path / LOCK_FILE).open() as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        monkeypatch.setattr(claims, "_LEASE_SECONDS", -1)
        with (
            pytest.raises(ValueError, match=r"in progress: process 7 on another\.host"),
            claim(tmp_path, notes.append),
        ):
            pass
        assert not notes
        monkeypatch.setattr(claims, "_LEASE_SECONDS", 60)

        def let_go(text: str) -> None:
            notes.append(text)
            fcntl.flock(holder, fcntl.LOCK_UN)

        with claim(tmp_path, let_go):
            assert len(notes) == 1
            assert "in use by process 7 on another.host" in notes[0]


def test_a_file_system_without_locks_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    notes: list[str] = []
    with claim(tmp_path, notes.append):
        assert len(notes) == 1
        assert "cannot be locked" in notes[0]


def test_a_run_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / LOCK_FILE).symlink_to("/dev/full")
    for path in (tmp_path / "file", tmp_path / "full", Path("/proc/farspan")):
        with (
            pytest.raises(ValueError, match=r"must be a folder that can be written.*--run-dir"),
            claim(path, refuse_notes),
        ):
            pass
