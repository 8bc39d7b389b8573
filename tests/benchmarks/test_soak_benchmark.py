"""The soak counts what is lost, and each broken input must be refused or mended."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("importable")

_REFUSES = "import sys; sys.stderr.write('error: nowhere.jsonl is not here\\n'); sys.exit(2)"


class Launcher:
    """Starts a program instead of a run; `{run}` in it stands for the run folder."""

    def __init__(self, folder: Path, program: str) -> None:
        self.folder = folder
        self._program = program

    def start(self, run_dir: Path, flags: list[str]) -> subprocess.Popen[str]:
        del flags
        return subprocess.Popen(
            [sys.executable, "-c", self._program.replace("{run}", str(run_dir))],
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )


def write_losses(run_dir: Path, losses: dict[int, float]) -> None:
    run_dir.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"step": step, "loss": loss}) for step, loss in losses.items()]
    (run_dir / "metrics.jsonl").write_text("".join(line + "\n" for line in lines))


def test_steps_and_losses_that_differ_are_counted(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    write_losses(whole, {1: 3.0, 2: 2.0, 3: 1.0})
    write_losses(killed, {1: 3.0, 2: 2.0, 3: 1.0})
    import soak

    found = soak.Soak()
    soak._check_metrics(found, whole, killed, 3, "run")
    assert (found.lost, found.problems) == (0, [])
    write_losses(killed, {1: 3.0, 3: 1.5})
    soak._check_metrics(found, whole, killed, 3, "run")
    assert found.lost == 2  # step 2 is missing, and what stands in its place differs


def test_a_launch_must_go_on_from_the_newest_step() -> None:
    import soak

    found = soak.Soak()
    soak._check_resumed(found, "resuming from step 6 of run/checkpoints\n", 6, "kill 1")
    soak._check_resumed(found, "starting JAX ...\n", 6, "kill 2")  # killed before it could say
    assert (found.resumes, found.lost) == (1, 0)
    soak._check_resumed(found, "resuming from step 3 of run/checkpoints\n", 6, "kill 3")
    assert (found.resumes, found.lost) == (2, 3)


@pytest.mark.parametrize(
    ("program", "survived"),
    [
        (_REFUSES, True),
        ("pass", False),  # went on as if nothing were wrong
        ("raise KeyError('nowhere.jsonl')", False),  # a traceback
        (_REFUSES.replace("nowhere", "some"), False),  # does not name it
        ("import pathlib; pathlib.Path('{run}/x').mkdir(parents=True); " + _REFUSES, True),
    ],
)
def test_a_broken_input_must_be_refused_by_name(
    tmp_path: Path, program: str, survived: bool
) -> None:
    import soak_inputs

    corpus = soak_inputs.make_corpus(tmp_path / "corpus.jsonl", documents=2)
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    scene = soak_inputs.Scene(corpus, tmp_path, tmp_path / "run")
    case: Any = soak_inputs.CASES["a path that is not there"]
    assert case(Launcher(tmp_path, program), scene).survived is survived


def test_the_corpus_is_always_the_same(tmp_path: Path) -> None:
    import soak_inputs

    one, two = (soak_inputs.make_corpus(tmp_path / name).read_bytes() for name in ("a", "b"))
    assert one == two
    assert one.count(b"\n") == 300
