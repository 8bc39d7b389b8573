"""One launch at a time in a run folder: two would overwrite each other's checkpoints."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Callable, Generator
from datetime import datetime
from io import FileIO
from pathlib import Path

from farspan.dist.processes import current_group

LOCK_FILE = "lock"
_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL})
_TAKEN = frozenset({errno.EAGAIN, errno.EACCES})
_LEASE_SECONDS = 120  # a file server takes as long to notice that a host which held a lock is gone


@contextlib.contextmanager
def claim(run_dir: Path, note: Callable[[str], None]) -> Generator[None, None, None]:
    """Keeps other launches out of a run folder while the block runs; the first process does it.

    The system lets go of the lock when the process ends, however it ends. Where a process of
    another host holds it, which may be gone, this waits for two minutes.

    Args:
      run_dir: Folder of the run; made where there is none.
      note: Prints one line.

    Raises:
      ValueError: Another launch uses the folder, or it cannot be written.
    """
    if not current_group().primary:
        yield
        return
    with _open(run_dir) as file:
        _lock(file, run_dir, note)
        _sign(file, run_dir)
        yield


def cannot_be_written(directory: Path, error: OSError) -> ValueError:
    """The error of a run whose folder is none, or does not take files."""
    return ValueError(
        f"run_dir: {directory} must be a folder that can be written, got {error}; correct the "
        "permissions or use another --run-dir"
    )


def _open(run_dir: Path) -> FileIO:
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        return (run_dir / LOCK_FILE).open("a+b", buffering=0)
    except OSError as error:
        raise cannot_be_written(run_dir, error) from error


def _sign(file: FileIO, run_dir: Path) -> None:
    """Says in the file who holds the lock."""
    now = datetime.now().astimezone().isoformat(timespec="seconds")
    holder = {"pid": os.getpid(), "hostname": socket.gethostname(), "since": now}
    try:
        file.truncate(0)
        file.write(json.dumps(holder).encode())
    except OSError as error:
        raise cannot_be_written(run_dir, error) from error


def _lock(file: FileIO, run_dir: Path, note: Callable[[str], None]) -> None:
    deadline = time.monotonic() + _LEASE_SECONDS
    waiting = False
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _NO_LOCKS:
                note(f"{run_dir} cannot be locked ({error}): let no other launch use it meanwhile")
                return
            if error.errno not in _TAKEN:
                raise cannot_be_written(run_dir, error) from error
        else:
            return
        host, holder = _holder(file)
        if host in ("", socket.gethostname()) or time.monotonic() > deadline:
            raise ValueError(
                f"run_dir: one launch at a time may use {run_dir}, got one in progress: {holder}; "
                "wait for its end or stop it, or use another --run-dir"
            )
        if not waiting:
            note(f"waiting up to {_LEASE_SECONDS} s for {run_dir}, in use by {holder}")
            waiting = True
        time.sleep(1.0)


def _holder(file: FileIO) -> tuple[str, str]:
    """Host and description of the process that holds the lock, as far as it has said."""
    file.seek(0)
    try:
        said = json.loads(file.read())
        host = str(said["hostname"])
        return host, f"process {said['pid']} on {host} since {said['since']}"
    except (ValueError, KeyError, TypeError):
        return "", "a process that has just begun"
