"""Runs the programs of `benchmarks/` as a user does."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a test import the programs as modules."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.fixture
def run_benchmark() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a program, by its file name, with arguments."""

    def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        environment.pop("FARSPAN_PEER_PYTHONS", None)  # peers are none of the tests' business
        return subprocess.run(
            [sys.executable, str(BENCHMARKS / program), *arguments],
            capture_output=True,
            text=True,
            env=environment,
            timeout=300,
            check=False,
        )

    return run
