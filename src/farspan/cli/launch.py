"""`farspan launch -n 4 -- train quickstart ...`: one command in several processes of this machine.

The processes find each other by the variables that `farspan.dist.cluster` reads. Of standard
output, that of process 0 is passed on; a process that fails has its own printed after all.
"""

from __future__ import annotations

import collections
import dataclasses
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from farspan.cli.flags import parse_flags
from farspan.dist.cluster import COORDINATOR, NUM_PROCESSES, PROCESS_ID

_PROG = "farspan launch"
_DESCRIPTION = (
    "Run a farspan command in several processes of this machine, which work as one: "
    "`farspan launch -n 4 -- train quickstart`. When one ends with an error the others are stopped."
)
_PROGRAM = (sys.executable, "-m", "farspan.cli.main")
_SIGNALS = 128
_FINAL = (0, 2, _SIGNALS + signal.SIGINT, _SIGNALS + signal.SIGTERM)  # 2: a mistake of the user
_PASSED_ON = {  # what comes here: what the processes get
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGINT: signal.SIGINT,
    signal.SIGHUP: signal.SIGTERM,
}
_TAIL_LINES = 200
_POLL_SECONDS = 0.05
# On CPU, each device says "[Gloo] Rank 0 is connected to 7 peer ranks. Expected number of connected
# peer ranks is : 7" to standard output, from a thread of its own; the words of several may mingle.
_GLOO_WORDS = (
    r"\[Gloo\] Rank | is connected to | peer ranks\. |Expected number of connected peer ranks is : "
)
_GLOO_GREETINGS = re.compile(rf"(?:^\d+)?(?:(?:{_GLOO_WORDS})\d*)+\n?")


@dataclasses.dataclass(frozen=True)
class LaunchOptions:
    """How the processes run.

    Attributes:
      num_processes: Processes; short: -n.
      max_restarts: How often all are started again after one has failed, unless by a mistake in its
        arguments or data, or because it was asked to stop; a training run then goes on from its
        newest checkpoint.
      grace_seconds: How long the others may take to end by themselves after one has failed, and
        then again after SIGTERM, before they are killed.
      all_output: Pass on the standard output of every process, each line behind its number.
    """

    num_processes: int = 1
    max_restarts: int = 0
    grace_seconds: float = 60.0
    all_output: bool = False


def main(arguments: list[str]) -> int:
    """Runs a command in several processes.

    Args:
      arguments: Flags of `LaunchOptions`, `--`, then the command and its arguments.

    Returns:
      0 when all ended well; else the status of the first that failed, 128 plus the number of the
      signal that ended it.

    Raises:
      ValueError: The arguments do not fit.
    """
    own, command = _split(arguments)
    options = parse_flags(LaunchOptions(), own, prog=_PROG, description=_DESCRIPTION)
    for name, minimum in (("num_processes", 1), ("max_restarts", 0), ("grace_seconds", 0)):
        value = getattr(options, name)
        if value < minimum:
            flag = "--" + name.replace("_", "-")
            raise ValueError(
                f"{_PROG}: {name} must be at least {minimum}, got {value}; use {flag} {minimum} or "
                "more"
            )
    if not command or command[0].startswith("-"):
        raise ValueError(
            f"{_PROG} needs a command behind --, got {shlex.join(command[:1]) or 'nothing'}; use "
            f"for example `{_PROG} -n 2 -- train quickstart`"
        )
    return _run(options, _with_run_dir(command))


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    end = arguments.index("--") if "--" in arguments else len(arguments)
    own = ["--num-processes" if word == "-n" else word for word in arguments[:end]]
    return own, arguments[end + 1 :]


def _with_run_dir(command: list[str]) -> list[str]:
    """Names a new run folder where the command has none, so that a restart finds it again."""
    from farspan.recipes import get_recipe
    from farspan.train.config import fresh_run_dir

    names = [word.partition("=")[0].replace("_", "-") for word in command]
    if command[0] != "train" or len(command) < 2 or {"--run-dir", "-h", "--help"} & set(names):
        return command
    if command[1].startswith("-") or get_recipe(command[1]).build().run_dir:
        return command
    return [*command, "--run-dir", fresh_run_dir(Path(command[1]).stem)]


def _run(options: LaunchOptions, command: list[str]) -> int:
    for attempt in range(options.max_restarts + 1):
        team = _Team(options, command)
        status = team.run()
        if team.asked_to_stop or status in _FINAL or attempt == options.max_restarts:
            return status
        _say(f"restarting all {options.num_processes} ({attempt + 1} of {options.max_restarts})")
    raise AssertionError("the last attempt returns")


class _Team:
    """The processes of one attempt."""

    def __init__(self, options: LaunchOptions, command: list[str]) -> None:
        self._options = options
        self._command = command
        self._members: list[_Member] = []
        self._all_started = False
        self._early: list[signal.Signals] = []  # what was asked for before all had started
        self.asked_to_stop = False

    def run(self) -> int:
        """Starts the processes and waits until all have ended; signals are passed on to them.

        Returns:
          The status of the first that failed, or 0.
        """
        with self._passing_signals_on():
            try:
                self._start()
                return self._wait()
            except BaseException:
                self._send(signal.SIGKILL)
                raise

    def _start(self) -> None:
        count = self._options.num_processes
        address = f"127.0.0.1:{_free_port()}"
        for index in range(count):
            passes_on = self._options.all_output or index == 0
            self._members.append(_Member(index, count, address, self._command, passes_on=passes_on))
        self._all_started = True
        for number in self._early:
            self._send(number)

    @contextmanager
    def _passing_signals_on(self) -> Generator[None, None, None]:
        """Signals that ask the launcher to stop go to every process, each once."""

        def handle(number: int, frame: FrameType | None) -> None:
            del frame
            self.asked_to_stop = True
            passed_on = _PASSED_ON[signal.Signals(number)]
            if self._all_started:
                self._send(passed_on)
            else:
                self._early.append(passed_on)

        previous = {number: signal.signal(number, handle) for number in _PASSED_ON}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _wait(self) -> int:
        """Waits until all have ended, and ends them where one has failed."""
        first, since = 0, 0.0
        harder = [signal.SIGKILL, signal.SIGTERM]
        running = True
        while running:
            running = any(member.status is None for member in self._members)
            failed = next((member for member in self._members if member.status), None)
            if failed and not first:
                first, since = failed.status or 0, time.monotonic()
                if not self.asked_to_stop:
                    _say(f"process {failed.index} of {len(self._members)} {failed.ending}")
            if first and harder and time.monotonic() - since > self._options.grace_seconds:
                self._send(harder.pop())
                since = time.monotonic()
            time.sleep(_POLL_SECONDS)
        for member in self._members:
            member.finish()
        return first

    def _send(self, number: signal.Signals) -> None:
        for member in self._members:
            member.send(number)


class _Member:
    """One process, and what it prints."""

    def __init__(
        self, index: int, count: int, address: str, command: Sequence[str], *, passes_on: bool
    ) -> None:
        self.index = index
        self._prefix = f"[{index}] " if count > 1 else ""
        self._passes_on = passes_on
        self._held: collections.deque[str] = collections.deque(maxlen=_TAIL_LINES)
        own = {COORDINATOR: address, NUM_PROCESSES: str(count), PROCESS_ID: str(index)}
        self._process = subprocess.Popen(
            [*_PROGRAM, *command],
            env={**os.environ, **own, "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,  # the terminal's Ctrl-C arrives once, through the launcher
        )
        self._readers = [
            threading.Thread(target=self._read_output, daemon=True),
            threading.Thread(target=self._read_errors, daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    @property
    def status(self) -> int | None:
        """None while it runs; 128 and the signal's number if one ended it."""
        code = self._process.poll()
        return code if code is None or code >= 0 else _SIGNALS - code

    @property
    def ending(self) -> str:
        """How it ended, in words."""
        code = self._process.poll() or 0
        if code < 0:
            return f"was ended by {signal.Signals(-code).name}"
        return f"ended with status {code}"

    def send(self, number: signal.Signals) -> None:
        """Sends a signal, if it still runs."""
        if self._process.poll() is None:
            self._process.send_signal(number)

    def finish(self) -> None:
        """Passes on the last of what it printed; all that was held back, if it failed."""
        for reader in self._readers:
            reader.join()
        if self._process.returncode:
            sys.stdout.writelines(self._prefix + line for line in self._held)
            sys.stdout.flush()

    def _read_output(self) -> None:
        prefix = self._prefix if self.index else ""
        pipe = self._process.stdout
        assert pipe is not None
        with pipe:
            for line in pipe:
                text = _GLOO_GREETINGS.sub("", line)
                if text and self._passes_on:
                    sys.stdout.write(prefix + text)
                    sys.stdout.flush()
                elif text:
                    self._held.append(text)

    def _read_errors(self) -> None:
        pipe = self._process.stderr
        assert pipe is not None
        with pipe:
            for line in pipe:
                sys.stderr.write(self._prefix + line)
                sys.stderr.flush()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def _say(text: str) -> None:
    sys.stderr.write(f"{_PROG}: {text}\n")
    sys.stderr.flush()
