"""One process that holds one implementation (or one rank of it) and runs it when told to.

Reads a command a line and answers with a JSON object a line:

    step          compute once:  {"cpu_seconds", "wall_seconds", "peak_bytes"}
    save PATH     write the last outputs to an .npz file:  {}

The first answer, {}, comes when the implementation is ready; {"failure"} is the last.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from peers import Peer, Prepared, Setting
from peers.problem import QUANTITIES, Problem


def main(specification: str) -> None:
    """Serves commands until the input ends.

    Args:
      specification: JSON: `module`, and the fields of `Problem` and `Setting`.
    """
    answers = _take_stdout()

    def answer(**values: Any) -> None:
        answers.write(json.dumps(values) + "\n")
        answers.flush()

    try:
        _serve(json.loads(specification), answer)
    except Exception as error:
        answer(failure=f"{type(error).__name__}: {error}".splitlines()[0])
        raise


def _serve(given: dict[str, Any], answer: Callable[..., None]) -> None:
    peer: Peer = importlib.import_module(f"peers.{given['module']}")
    prepared = peer.prepare(Problem(**given["problem"]), Setting(**given["setting"]))
    memory = _Memory()
    outputs: Any = None
    answer()
    for line in sys.stdin:
        command, _, argument = line.strip().partition(" ")
        if command == "step":
            outputs = None  # so that two sets of outputs are never held at once
            memory.reset()
            wall, cpu = time.perf_counter(), time.process_time()
            outputs = prepared.step()
            cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
            answer(cpu_seconds=cpu, wall_seconds=wall, peak_bytes=memory.peak_bytes())
        else:
            assert command == "save", command
            _save(Path(argument), prepared, outputs)
            answer()


def _save(path: Path, prepared: Prepared, outputs: Any) -> None:
    arrays = dict(zip(QUANTITIES, prepared.to_host(outputs), strict=True))
    index = prepared.index
    index = np.arange(arrays["out"].shape[1]) if index is None else index
    np.savez(path, index=index, **arrays)


def _take_stdout() -> Any:
    """Keeps standard output for answers: what libraries print goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


class _Memory:
    """Peak resident memory above what is resident now: inputs, libraries, compiled programs.

    Linux can set its high-water mark back. Elsewhere only growth of the process's highest mark so
    far shows, which misses what fits under the peak of the compilation.
    """

    def __init__(self) -> None:
        gc.collect()
        if sys.platform == "linux":
            trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
            if trim is not None:
                trim(0)  # freed memory that the process keeps is no part of the baseline
        self._resettable = self._set_back()
        self._baseline = self._highest_bytes()

    def reset(self) -> None:
        """Begins a new measurement."""
        if self._resettable:
            self._set_back()

    def peak_bytes(self) -> int:
        """Bytes above the baseline since the last reset."""
        return max(0, self._highest_bytes() - self._baseline)

    @staticmethod
    def _set_back() -> bool:
        """Sets the high-water mark to the present; False where the system cannot."""
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            return False
        return True

    def _highest_bytes(self) -> int:
        if self._resettable:
            lines = Path("/proc/self/status").read_text().splitlines()
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


if __name__ == "__main__":
    main(sys.argv[1])
