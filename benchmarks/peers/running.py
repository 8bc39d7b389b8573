"""Starts an implementation in processes of its own, and runs it there step by step."""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from peers import Implementation, Setting
from peers.interpreters import Interpreter
from peers.problem import QUANTITIES, Problem

_BENCHMARKS = Path(__file__).resolve().parents[1]


class WorkerError(Exception):
    """An implementation could not be run; the message says why."""


class Sample(NamedTuple):
    """What one step cost, all processes together (the wall clock: the longest)."""

    cpu_seconds: float
    wall_seconds: float
    peak_bytes: int


class Running:
    """An implementation that is ready to compute."""

    def __init__(
        self,
        implementation: Implementation,
        problem: Problem,
        devices: int,
        interpreter: Interpreter,
        folder: Path,
    ) -> None:
        """Starts the processes and waits until they are ready and have computed once.

        Args:
          implementation: What to run.
          problem: On what.
          devices: On how many devices.
          interpreter: Holds what the implementation needs.
          folder: Empty, for the files of this run.

        Raises:
          WorkerError: If a process ends early.
        """
        self.samples: list[Sample] = []
        self._folder = folder
        processes = devices if implementation.process_per_device else 1
        self._workers: list[_Worker] = []
        try:
            for rank in range(processes):
                setting = Setting(
                    devices, rank, processes, str(folder / "meeting"), implementation.options
                )
                log = folder / f"log-{rank}"
                self._workers.append(
                    _Worker(interpreter.path, implementation.module, problem, setting, log)
                )
            self._answers()
            self._ask("step")  # warm-up: not counted
        except BaseException:
            self.close()
            raise

    def step(self) -> Sample:
        """Computes once more and notes what it cost."""
        answers = self._ask("step")
        sample = Sample(
            sum(answer["cpu_seconds"] for answer in answers),
            max(answer["wall_seconds"] for answer in answers),
            sum(answer["peak_bytes"] for answer in answers),
        )
        self.samples.append(sample)
        return sample

    def median(self) -> Sample:
        """Median times, and the highest peak."""
        cpu, wall, peaks = zip(*self.samples, strict=True)
        return Sample(statistics.median(cpu), statistics.median(wall), max(peaks))

    def outputs(self) -> dict[str, Any]:
        """What the last step gave: whole arrays `[B, S, heads, D]` by quantity."""
        paths = [self._folder / f"outputs-{rank}.npz" for rank in range(len(self._workers))]
        self._ask(*(f"save {path}" for path in paths))
        parts = [dict(np.load(path)) for path in paths]
        places = np.concatenate([part["index"] for part in parts])
        order = np.argsort(places)
        assert (places[order] == np.arange(len(places))).all(), "the ranks must cover the row"
        return {
            name: np.concatenate([part[name] for part in parts], axis=1)[:, order]
            for name in QUANTITIES
        }

    def close(self) -> None:
        """Ends the processes."""
        for worker in self._workers:
            worker.close()

    def _ask(self, *commands: str) -> list[dict[str, Any]]:
        """Gives every process its command (or all the same one), then waits for the answers."""
        if len(commands) == 1:
            commands *= len(self._workers)
        for worker, command in zip(self._workers, commands, strict=True):
            worker.send(command)
        return self._answers()

    def _answers(self) -> list[dict[str, Any]]:
        return [worker.answer() for worker in self._workers]


class _Worker:
    """One process, `peers/worker.py`."""

    def __init__(
        self, python: str, module: str, problem: Problem, setting: Setting, log: Path
    ) -> None:
        specification = {
            "module": module,
            "problem": dataclasses.asdict(problem),
            "setting": dataclasses.asdict(setting),
        }
        search_path = [str(_BENCHMARKS), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._log = log
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [python, "-m", "peers.worker", json.dumps(specification)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=os.environ
                | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(search_path)},
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout

    def send(self, command: str) -> None:
        try:
            self._input.write(command + "\n")
            self._input.flush()
        except BrokenPipeError:
            raise self._ended() from None

    def answer(self) -> dict[str, Any]:
        line = self._output.readline()
        if not line:
            raise self._ended()
        found = json.loads(line)
        if "failure" in found:
            raise WorkerError(found["failure"])
        return found

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _ended(self) -> WorkerError:
        status = self._process.wait()
        said = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        last = f", after: {said[-1].strip()}" if said else ""
        return WorkerError(f"its process ended with status {status}{last}")
