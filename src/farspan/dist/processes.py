"""One training run in several processes: they start together, stop together and fail together.

    with join_processes() as group:   # before JAX starts its devices
        ...                           # the same program in every process
    leave(status)

JAX's own service connects the processes and carries barriers and small values. A process that dies
is noticed through `farspan.dist.lifeline`; the others then say so and end.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import os
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from farspan.dist.cluster import ALONE, Membership, find_membership, share_of_gpus
from farspan.dist.lifeline import Hub, Line, OnStop
from farspan.platform import skip_absent_tpu

START_TIMEOUT = "FARSPAN_START_TIMEOUT"
AGAIN = "run again to go on from the newest checkpoint"
_DEFAULT_START_SECONDS = 300
_HEARTBEAT_SECONDS = 60  # of JAX's own, for processes that stand still
_GRACE_SECONDS = 5.0  # for a process to end by itself once it knows that it must
_VERDICT_SECONDS = 10.0  # after a collective failed, until it is known why
_LAST_SECONDS = 15.0  # process 0 goes last: without its service, JAX aborts the others
_SIGNALS = 128
_FOREVER_MS = 7 * 24 * 3600 * 1000  # barriers end by the lifeline, not by the clock


class PeerLost(RuntimeError):  # noqa: N818
    """Another process of the run has ended, so this one cannot go on."""


@dataclass(frozen=True)
class ProcessGroup:
    """The processes of a run, seen from one of them.

    As a context manager it makes them fail together: what its body raises stops all the others, and
    what it raises because another process has ended becomes `PeerLost`.

    Attributes:
      index: This process, from 0.
      count: Processes in all.
      found: What started them: "alone", "farspan launch", "Slurm", "Open MPI", "Cloud TPU",
        "Kubernetes" or "JAX_COORDINATOR_ADDRESS".
    """

    index: int = 0
    count: int = 1
    found: str = ALONE

    @property
    def primary(self) -> bool:
        """Whether this is the process that prints, and writes what only one must write."""
        return self.index == 0

    def __enter__(self) -> ProcessGroup:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        orderly = error is None or (isinstance(error, SystemExit) and not error.code)
        if _Joined.bond is not None and error is not None and not orderly:
            _Joined.bond.body_failed(error)


class _Joined:
    """What `join_processes` has found in this process."""

    group = ProcessGroup()
    bond: _Bond | None = None


def current_group() -> ProcessGroup:
    """The group that `join_processes` found; before that, a process alone."""
    return _Joined.group


def join_processes() -> ProcessGroup:
    """Joins this process with the others of its run, before JAX starts its devices.

    Later calls return the same group.

    The environment says who they are: `farspan launch`, Slurm, Open MPI, Cloud TPU, or
    JAX_COORDINATOR_ADDRESS with JAX_NUM_PROCESSES and JAX_PROCESS_ID (on Kubernetes
    JOB_COMPLETION_INDEX). A process alone starts nothing. Where the others do not come within
    FARSPAN_START_TIMEOUT seconds, it says so and ends with status 1.

    Returns:
      The group.

    Raises:
      ValueError: The environment contradicts itself.
    """
    if _Joined.bond is not None:
        return _Joined.group
    skip_absent_tpu()
    member = find_membership(os.environ, _tpu_is_here)
    if member.count > 1:
        _initialize(member, os.environ)
        state = _jax_state()
        _Joined.group = ProcessGroup(state.process_id, state.num_processes, member.found)
        _Joined.bond = _Bond(_Joined.group, state.coordinator_address)
        atexit.register(leave)
    return _Joined.group


def leave(status: int = 0) -> None:
    """Ends this process's part in the run; the last thing before the process exits.

    After an orderly end it waits for the others, so that none is taken for dead. After a failure it
    ends the process here, with `status`: the others are on their way out and no longer meet this
    one at JAX's shutdown.

    Args:
      status: Exit status. From 1 to 127 it means a failure, as does an error in the body of the
        group; 128 and more, the number of a signal that stopped all, does not.
    """
    if _Joined.bond is not None:
        _Joined.bond.leave(status)


def any_process(flag: bool) -> bool:
    """Whether any process says so: the same answer everywhere. Every process must call it.

    Args:
      flag: What this process says.

    Returns:
      True when one of them said True.
    """
    if _Joined.group.count == 1:
        return flag
    sharding, most = _vote()
    ballot = jax.make_array_from_callback(
        (jax.device_count(),), sharding, lambda _: np.full((1,), flag, np.int32)
    )
    return bool(most(ballot))


def wait_for_all(name: str) -> None:
    """Waits, however long, until every process has called this as often, with the same name.

    Args:
      name: What is waited for.
    """
    if _Joined.group.count > 1:
        _jax_state().client.wait_at_barrier(f"farspan/{name}/{_turn(name)}", _FOREVER_MS)


def share(value: str) -> str:
    """Gives every process the value of process 0. Every process must call it, as often.

    Args:
      value: The value; that of the other processes is ignored.

    Returns:
      The value of process 0.
    """
    if _Joined.group.count == 1:
        return value
    key = f"farspan/share/{_turn('share')}"
    client = _jax_state().client
    if _Joined.group.primary:
        client.key_value_set(key, value)
        return value
    return client.blocking_key_value_get(key, _FOREVER_MS)


class _Bond:
    """This process's lifeline, and what has been heard over it."""

    def __init__(self, group: ProcessGroup, coordinator: str) -> None:
        self._group = group
        self._reason = ""
        self._heard = threading.Event()
        self._failed = False
        self._left = False
        client = _jax_state().client
        if group.primary:
            self._end: Hub | Line = Hub(group.count, self._on_stop)
            client.key_value_set("farspan/lifeline", str(self._end.port))
        else:
            port = int(client.blocking_key_value_get("farspan/lifeline", _FOREVER_MS))
            self._end = _reach_process_0(group, coordinator, port, self._on_stop)
        self._excepthook, sys.excepthook = sys.excepthook, self._uncaught

    def body_failed(self, error: BaseException) -> None:
        """Tells the others; raises `PeerLost` when the error is only that another one has ended."""
        self._failed = True
        if _from_runtime(error):
            self._heard.wait(_VERDICT_SECONDS)
        if self._heard.is_set():
            raise PeerLost(f"{self._reason}; {AGAIN}") from error
        rule, _, _ = str(error).partition("; ")  # the remedy is for the process itself
        self._fail(f"{type(error).__name__}: {rule}")

    def leave(self, status: int) -> None:
        """Meets the others for an orderly end, or ends this process for a failure."""
        if self._left:
            return
        if not self._failed and 0 < status < _SIGNALS:
            self._fail(f"it ended with status {status}")
        if self._failed:
            self._left = True
            if isinstance(self._end, Hub):
                self._end.wait_until_alone(_LAST_SECONDS)
            _end_now(status or 1)
        wait_for_all("leave")
        self._left = True
        self._end.done()

    def _fail(self, why: str) -> None:
        self._failed = True
        self._end.stop(f"process {self._group.index} of {self._group.count} failed: {why}")

    def _on_stop(self, reason: str) -> None:
        if self._failed and not self._heard.is_set() and self._own(reason):
            return
        self._reason = reason
        self._heard.set()
        if isinstance(self._end, Line) and self._end.broken:
            self._give_up()  # JAX aborts as soon as it has noticed, too
        else:
            threading.Timer(_GRACE_SECONDS, self._give_up).start()

    def _own(self, reason: str) -> bool:
        return reason.startswith(f"process {self._group.index} of ")

    def _give_up(self) -> None:
        """Ends the process where it has not ended by itself, say because a collective waits."""
        if not self._left:
            sys.stderr.write(f"error: {self._reason}; {AGAIN}\n")
            if isinstance(self._end, Hub):
                self._end.wait_until_alone(_LAST_SECONDS)
            _end_now(1)

    def _uncaught(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        self._excepthook(kind, error, trace)
        if not self._failed and not self._left:
            self.body_failed(error)


def _reach_process_0(group: ProcessGroup, coordinator: str, port: int, on_stop: OnStop) -> Line:
    host = coordinator.rpartition(":")[0].strip("[]")
    try:
        return Line(group.index, group.count, (host, port), on_stop)
    except OSError as error:
        raise ConnectionError(
            f"processes: process {group.index} of {group.count} must reach process 0 at "
            f"{host}:{port}, got {error}; open the ports above 1024 between these hosts"
        ) from error


def _initialize(member: Membership, environ: Mapping[str, str]) -> None:
    seconds = _start_seconds(environ)
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM for itself
    where = f" at {member.coordinator}" if member.coordinator else ""
    message = (
        f"error: processes: all {member.count} must start within {seconds} seconds, got no answer "
        f"from some of them (process {member.index}, found by {member.found}, coordinator{where}); "
        f"see whether each one runs and reaches that address, or set {START_TIMEOUT}\n"
    )
    late = threading.Timer(seconds, _fail_to_start, (message,))
    late.daemon = True
    late.start()
    options: dict[str, Any] = {
        "initialization_timeout": seconds + 60,  # JAX's own end of waiting aborts the process
        "heartbeat_timeout_seconds": _HEARTBEAT_SECONDS,
    }
    if member.coordinator:
        options |= {
            "coordinator_address": member.coordinator,
            "num_processes": member.count,
            "process_id": member.index,
            "local_device_ids": share_of_gpus(environ, member, _count_gpus()),
            "cluster_detection_method": "deactivate",
        }
    try:
        jax.distributed.initialize(**options)
    except jax.errors.JaxRuntimeError as error:
        raise ConnectionError(
            f"processes: process {member.index} of {member.count} (found by {member.found}) must "
            f"reach the coordinator{where}, got {error}; see whether that address and port are free"
        ) from error
    finally:
        late.cancel()


def _start_seconds(environ: Mapping[str, str]) -> int:
    text = environ.get(START_TIMEOUT, str(_DEFAULT_START_SECONDS))
    if not text.isdigit() or int(text) < 1:
        raise ValueError(
            f"processes: {START_TIMEOUT} must be a number of seconds, at least 1, got {text!r}; "
            "correct it"
        )
    return int(text)


def _tpu_is_here() -> bool:
    return "tpu" in (jax.config.jax_platforms or "").split(",")  # JAX says so where it finds one


def _count_gpus() -> int:
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def _fail_to_start(message: str) -> None:
    sys.stderr.write(message)
    _end_now(1)


def _end_now(status: int) -> None:
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)


def _from_runtime(error: BaseException | None) -> bool:
    """Whether JAX's runtime raised this, as a collective does that has lost a process."""
    while error is not None and not isinstance(error, jax.errors.JaxRuntimeError):
        error = error.__cause__
    return error is not None


@functools.cache
def _vote() -> tuple[NamedSharding, Any]:
    mesh = Mesh(np.array(jax.devices(), dtype=object), ("devices",))
    everywhere = NamedSharding(mesh, PartitionSpec())
    one_each = NamedSharding(mesh, PartitionSpec("devices"))
    return one_each, jax.jit(jax.numpy.max, out_shardings=everywhere)


_turns: dict[str, int] = {}


def _turn(name: str) -> int:
    """How often this process has come to `name`; the same number in every process."""
    _turns[name] = _turns.get(name, 0) + 1
    return _turns[name]


def _jax_state() -> Any:
    return importlib.import_module("jax._src.distributed").global_state
