"""Provenance: a run folder says which configuration, versions and machines made it."""

from __future__ import annotations

import json
import socket
import subprocess
from pathlib import Path
from typing import Any

import jax
import pytest

from farspan.recipes import get_recipe
from farspan.train.config import to_dict
from farspan.train.provenance import write_config, write_launch

CONFIG = get_recipe("quickstart").build()


def write(run_dir: Path, start_step: int = 0, started: float = 1.7e9) -> None:
    write_launch(run_dir, start_step=start_step, started=started, found="Slurm")


def launches(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "launches.jsonl").read_text().splitlines()]


def git(*arguments: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    return subprocess.run(
        ["git", *identity, *arguments], check=True, capture_output=True, text=True
    ).stdout.strip()


def test_a_launch_records_what_made_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    write_config(tmp_path, CONFIG)
    write(tmp_path, start_step=7, started=1.7e9 + 0.25)
    (launch,) = launches(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text()) == json.loads(
        json.dumps(to_dict(CONFIG))
    )
    assert launch["start_step"] == 7
    assert launch["time"].startswith("2023-11-1")
    assert ".250" in launch["time"]
    assert launch["hostname"] == socket.gethostname()
    assert launch["environment"] == "Slurm"
    assert (launch["num_processes"], launch["num_devices"]) == (1, jax.device_count())
    assert launch["versions"]["jax"] == jax.__version__
    assert "tensorboardX" in launch["versions"]
    assert launch["git_commit"] is None


def test_the_commit_of_the_working_folder_is_recorded_and_whether_files_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir, code = tmp_path / "run", tmp_path / "code"
    run_dir.mkdir()
    code.mkdir()
    monkeypatch.chdir(code)
    git("init", "-q")
    (code / "a.txt").write_text("1")
    git("add", ".")
    git("commit", "-q", "-m", "one")
    git("tag", "v1")
    write(run_dir)
    (code / "a.txt").write_text("2")
    write(run_dir)
    commit = git("rev-parse", "HEAD")
    assert [each["git_commit"] for each in launches(run_dir)] == [commit, f"{commit}-dirty"]


def test_without_git_there_is_no_commit_and_a_torn_line_does_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    write(tmp_path)
    with (tmp_path / "launches.jsonl").open("a") as file:
        file.write('{"time": "2023')
    write(tmp_path, start_step=3)
    assert [each["start_step"] for each in launches(tmp_path)] == [0, 3]
    assert {each["git_commit"] for each in launches(tmp_path)} == {None}
