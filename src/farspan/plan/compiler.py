"""Runs the TPU compiler in a process of its own: it is noisy, may abort, and knows no Ctrl-C."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

from farspan.plan.worker import Request

Progress = Callable[[str, float], None]
"""Is told the phase (`starting`, `lowering`, `compiling`, `done`) and the seconds spent in it."""

# The compiler is to look for neither chips nor the machines of a slice. Any accelerator type will
# do: the topology that is asked for decides.
_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5p-8",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
_SETTINGS = ("JAX_", "XLA_", "TPU_", "LIBTPU_")
_MISTAKES = {kind.__name__: kind for kind in (ValueError, NotImplementedError)}
_TICK_SECONDS = 1.0
_NOISE_LINES = 30


class MissingCompilerError(ModuleNotFoundError):
    """The TPU compiler is not installed."""

    def __init__(self) -> None:
        super().__init__(
            "compiling for TPU needs libtpu, got none; pip install 'farspan[tpu]'", name="libtpu"
        )


class CompileError(RuntimeError):
    """A program that does not compile, for another reason than memory; says the compiler's own."""


def compiler_available() -> bool:
    """Whether the TPU compiler is installed. It needs no TPU."""
    return importlib.util.find_spec("libtpu") is not None


def run_worker(
    request: Request, flags: Sequence[str], on_progress: Progress | None, timeout_seconds: float
) -> dict[str, Any]:
    """Compiles in a process that ends with this one, with Ctrl-C, or with the time.

    Args:
      request: What is to be compiled.
      flags: Arguments for libtpu.
      on_progress: Is called at each phase, and every second.
      timeout_seconds: The longest that it may take.

    Returns:
      The worker's last answer: figures, or what the compiler said (`failed`).

    Raises:
      ValueError, NotImplementedError: As the program raises them.
      CompileError: The program cannot be built, the worker died, or the time is up.
    """
    report = on_progress or (lambda _phase, _seconds: None)
    phase, begin, deadline = "starting", time.monotonic(), time.monotonic() + timeout_seconds
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as noise:
        with _worker(request, flags, noise) as answers:
            while True:
                now = time.monotonic()
                report(phase, now - begin)
                if now >= deadline:
                    raise CompileError(
                        f"compiling {request['program']} for {request['topology']} must take at "
                        f"most timeout_seconds={timeout_seconds:g}, was still {phase}; allow more"
                    )
                try:
                    answer = answers.get(timeout=min(_TICK_SECONDS, deadline - now))
                except queue.Empty:
                    continue
                if answer is None or "phase" not in answer:
                    break
                phase, begin = answer["phase"], time.monotonic()
        if answer is None:
            raise _failure(request, "the compiler's process died", noise)
        if "error" in answer:
            mistake = _MISTAKES.get(answer["type"])
            if mistake is not None:
                raise mistake(answer["error"])
            raise _failure(request, f"{answer['type']}: {answer['error']}", noise)
    return answer


@contextlib.contextmanager
def _worker(request: Request, flags: Sequence[str], noise: IO[str]) -> Any:
    """Starts the worker; yields the queue of its answers, which None ends; kills it."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(_SETTINGS)}
    environment |= _ENVIRONMENT
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    environment["LIBTPU_INIT_ARGS"] = " ".join(flags)
    worker = subprocess.Popen(
        [sys.executable, "-m", "farspan.plan.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=noise,
        text=True,
        encoding="utf-8",
        env=environment,
        start_new_session=True,  # a Ctrl-C in the terminal is for this process alone
    )
    answers: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
    assert worker.stdin
    assert worker.stdout
    output = worker.stdout

    def listen() -> None:
        for line in output:
            with contextlib.suppress(json.JSONDecodeError):  # the last line of one that was killed
                answers.put(json.loads(line))
        answers.put(None)

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    try:
        with contextlib.suppress(BrokenPipeError):
            worker.stdin.write(json.dumps(request) + "\n")
            worker.stdin.flush()
        yield answers
    finally:
        worker.kill()
        worker.wait()
        listener.join()
        output.close()
        with contextlib.suppress(BrokenPipeError):
            worker.stdin.close()


def _failure(request: Request, reason: str, noise: IO[str]) -> CompileError:
    noise.seek(0)
    last = "\n".join(noise.read().splitlines()[-_NOISE_LINES:])
    return CompileError(
        f"{request['program']} did not compile for {request['topology']}: {reason}\n{last}"
    )


def python_sources(program: str) -> list[Path]:
    """Files that decide what a program is: farspan's own, and the one that holds the program."""
    package = Path(__file__).parents[1]
    files = sorted(package.rglob("*.py"))
    module = program.partition(":")[0]
    if module.split(".")[0] != package.name:
        spec = importlib.util.find_spec(module)
        if spec is not None and spec.origin:
            files.append(Path(spec.origin))
    return files
