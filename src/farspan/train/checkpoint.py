"""Checkpoints of a run: state, place in the data and configuration, written in the background.

One step is one folder, `RUN_DIR/checkpoints/STEP`. Orbax renames or marks it complete only when all
of it is on disk, so a run that is killed while it saves still has its previous step. The state is
stored by global array, so any mesh and any number of processes may restore it; fingerprints of the
arrays lie beside it, so what is read back is what was saved, or an error.

Where several processes run, all of them open, save, restore and wait together. Of a failure in one
they learn as of any other: the run ends.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import shutil
import sys
import time
import uuid
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers

from farspan.dist.processes import any_process, current_group, share, wait_for_all
from farspan.train.claim import cannot_be_written
from farspan.train.fingerprint import fingerprints, named_leaves

State = TypeVar("State")
_Signature = tuple[tuple[int, ...], str]
_ITEMS = ("state", "loader", "config", "fingerprints")
_LOOP_IS_CLOSED = "Event loop is closed"
_APPEAR_SECONDS = 60  # until what one process wrote is seen by others, over a network
_WRITE_SECONDS = 6 * 3600  # for one save; the end of a process is noticed without this


class CheckpointError(OSError):
    """A checkpoint could not be written; the message says where and why."""


class Checkpoints:
    """The checkpoints of one run folder. Use as a context manager, or call `close`."""

    def __init__(self, run_dir: Path, keep: int) -> None:
        """Opens or creates `RUN_DIR/checkpoints`.

        Args:
          run_dir: Folder of the run.
          keep: Newest checkpoints that a later save leaves in place.

        Raises:
          ValueError: The path is no folder, cannot be written, or is not the same folder for all
            processes.
        """
        self.directory = run_dir / "checkpoints"
        self._failed = False
        if self.directory.exists() and not self.directory.is_dir():
            raise ValueError(
                f"run_dir: {self.directory} must be a folder, got a file; remove it or use another "
                "--run-dir"
            )
        if current_group().primary:
            for leftover in self.directory.glob("*.orbax-checkpoint-tmp*"):  # of a killed save
                _remove(leftover)
        _check_folder(self.directory)
        json = ocp.JsonCheckpointHandler
        self._manager = ocp.CheckpointManager(
            self.directory.resolve(),
            item_names=_ITEMS,
            item_handlers={
                "state": ocp.StandardCheckpointHandler(),
                **{name: json() for name in _ITEMS if name != "state"},
            },
            options=ocp.CheckpointManagerOptions(
                preservation_policy=checkpoint_managers.LatestN(keep),
                async_options=ocp.AsyncOptions(
                    timeout_secs=_WRITE_SECONDS, barrier_sync_fn=_meet_unless_failed
                ),
            ),
        )
        self._await_same_steps()

    def newest(self) -> int | None:
        """The newest step that was written completely, or None when there is none."""
        return self._manager.latest_step()

    def step_dir(self, step: int) -> Path:
        """Folder of the checkpoint of `step`."""
        return self.directory / str(step)

    def saved_config(self, step: int) -> dict[str, Any]:
        """The configuration that wrote the checkpoint of `step`, as nested dictionaries.

        Raises:
          ValueError: The folder is not a checkpoint of this program, or parts of it are missing.
        """
        return cast("dict[str, Any]", self._read(step, config=ocp.args.JsonRestore())["config"])

    def restore(self, step: int, abstract_state: State) -> tuple[State, Any]:
        """Reads the checkpoint of `step` onto the shardings of `abstract_state`.

        Args:
          step: A step that `newest` named.
          abstract_state: Pytree of `jax.ShapeDtypeStruct` with shardings, on any mesh.

        Returns:
          The state, and what the loader needs to go on with the next batch.

        Raises:
          ValueError: Names, shapes or dtypes differ from those of `abstract_state` (nothing is
            cast, cut or padded), or the folder cannot be read.
        """
        self._check_signature(step, abstract_state)
        read = self._read(
            step,
            state=ocp.args.StandardRestore(cast("Any", abstract_state)),
            loader=ocp.args.JsonRestore(),
            fingerprints=ocp.args.JsonRestore(),
        )
        state = cast("State", read["state"])
        expected, found = read["fingerprints"], fingerprints(state)
        if expected != found:
            names = ", ".join(name for name in found if expected.get(name) != found[name])
            raise self._unreadable(step, f"other values than were saved in {names}")
        return state, read["loader"]

    def save(self, step: int, state: Any, loader_state: Any, config: Mapping[str, Any]) -> None:
        """Copies the state to the host, then writes it in the background.

        On return the state's buffers may be donated. At most one save is in flight: this call waits
        for the one before.

        Args:
          step: Optimizer steps done.
          state: Pytree of arrays.
          loader_state: JSON values from which the loader goes on.
          config: JSON values; the configuration of the run.

        Raises:
          CheckpointError: This save, or the one before, could not be written.
        """
        with self._writing():
            self._manager.wait_until_finished()  # raises what the save before met, if anything
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(state),
                    loader=ocp.args.JsonSave(loader_state),
                    config=ocp.args.JsonSave(config),
                    fingerprints=ocp.args.JsonSave(fingerprints(state)),
                ),
                force=True,
            )

    def wait(self) -> None:
        """Waits until the save in flight, if any, is complete on disk, by all processes.

        Raises:
          CheckpointError: It could not be written.
        """
        with self._writing():
            self._manager.wait_until_finished()
            self._manager.check_for_errors()

    def close(self) -> None:
        """Waits for the save in flight, then ends the background threads."""
        if self._failed and current_group().count > 1:
            return  # the threads wait for other processes, which will not come
        try:
            self.wait()
        finally:
            if not self._failed or current_group().count == 1:
                self._manager.close()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextlib.contextmanager
    def _writing(self) -> Generator[None, None, None]:
        try:
            yield
        except Exception as error:
            self._failed = True
            raise CheckpointError(
                f"checkpoint: could not be written to {self.directory}, got "
                f"{type(error).__name__}: {_first_line(error)}; make room or correct the "
                "permissions, then run again: it goes on from the newest complete step"
            ) from error

    @contextlib.contextmanager
    def _reading(self, step: int) -> Generator[None, None, None]:
        try:
            with _quiet_after_failure():
                yield
        except Exception as error:
            raise self._unreadable(step, error) from error

    def _await_same_steps(self) -> None:
        """Returns when every process sees the newest step that process 0 sees."""
        newest = share(str(self.newest()))
        if not _in_time(lambda: str(self.newest()) == newest, self._manager.reload):
            raise ValueError(
                f"run_dir: every process must see the same checkpoints in {self.directory}, got "
                f"step {self.newest()} here and {newest} in process 0; use a --run-dir on a file "
                "system that all of them share"
            )
        wait_for_all("checkpoints")

    def _read(self, step: int, **items: Any) -> Mapping[str, Any]:
        with self._reading(step):
            return cast("Any", self._manager.restore(step, args=ocp.args.Composite(**items)))

    def _check_signature(self, step: int, abstract_state: Any) -> None:
        with self._reading(step):
            metadata = cast("Any", self._manager.item_metadata(step))["state"]
            saved = dict(_saved_signature(metadata.tree))
        wanted = _signature(abstract_state)
        differences = [
            f"{name}: checkpoint {_show(saved.get(name))}, run {_show(wanted.get(name))}"
            for name in sorted(saved.keys() | wanted.keys())
            if saved.get(name) != wanted.get(name)
        ]
        if differences:
            shown = "; ".join(differences[:5])
            more = f"; and {len(differences) - 5} more" if len(differences) > 5 else ""
            raise ValueError(
                f"checkpoint: {self.step_dir(step)} must hold the run's arrays with the same "
                f"names, shapes and dtypes, got {shown}{more}; use the model and optimizer flags "
                "that wrote it, or another --run-dir"
            )

    def _unreadable(self, step: int, found: Exception | str) -> ValueError:
        if isinstance(found, Exception):
            found = f"{type(found).__name__}: {_first_line(found)}"
        older = [other for other in self._manager.all_steps() if other < step]
        remedy = f"to go on from step {max(older)}" if older else "to start again"
        return ValueError(
            f"checkpoint: {self.step_dir(step)} must be a complete checkpoint, got {found}; remove "
            f"this folder {remedy}, or use another --run-dir"
        )


def _check_folder(directory: Path) -> None:
    """Every process can write there, and sees what process 0 writes."""
    group = current_group()
    token = share(f".written-by-{uuid.uuid4().hex}")
    mine = directory / f"{token}-{group.index}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        mine.touch()
    except OSError as error:
        raise cannot_be_written(directory, error) from error
    wait_for_all("run folder")
    first = directory / f"{token}-0"
    unseen = any_process(not _in_time(first.exists, lambda: None))
    mine.unlink()
    if unseen:
        raise ValueError(
            f"run_dir: {directory} must be one folder for all {group.count} processes, got one "
            "where files of process 0 do not appear; use a --run-dir on a file system that all of "
            "them share"
        )


def _remove(leftover: Path) -> None:
    """Removes a folder into which the threads or processes of a failed save may still write."""

    def gone() -> bool:
        try:
            shutil.rmtree(leftover)
        except FileNotFoundError:
            return not leftover.exists()
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.EBUSY):
                raise cannot_be_written(leftover, error) from error
            return False
        return True

    if not _in_time(gone, lambda: None):
        raise ValueError(
            f"run_dir: {leftover} is what a failed save left and must be removed, got files that "
            "keep appearing there; stop what writes there, or use another --run-dir"
        )


def _meet_unless_failed(*, key: str, timeout_ms: int) -> None:
    """The barrier of Orbax's background threads.

    Orbax comes here after a failure, too, where the other processes do not.
    """
    del timeout_ms
    if current_group().count > 1 and (error := sys.exception()):
        raise error
    wait_for_all(key)


@contextlib.contextmanager
def _quiet_after_failure() -> Generator[None, None, None]:
    """Keeps reads that fail beside the first from printing tracebacks of their own.

    Tensorstore's threads call into an event loop that is closed by then, and asyncio logs the tasks
    that nobody asks any more. Neither says anything beside the error itself.
    """
    inherited = sys.excepthook, sys.unraisablehook
    log = logging.getLogger("asyncio")
    was_disabled, log.disabled = log.disabled, True

    def uncaught(kind: type[BaseException], value: BaseException, trace: Any) -> None:
        if str(value) != _LOOP_IS_CLOSED:
            inherited[0](kind, value, trace)

    def unraisable(found: Any) -> None:
        if str(found.exc_value) != _LOOP_IS_CLOSED:
            inherited[1](found)

    sys.excepthook, sys.unraisablehook = uncaught, unraisable
    yield
    # Not after a failure: the calls come when they come.
    sys.excepthook, sys.unraisablehook = inherited
    log.disabled = was_disabled


def _in_time(holds: Callable[[], bool], look_again: Callable[[], None]) -> bool:
    deadline = time.monotonic() + _APPEAR_SECONDS
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(1.0)
        look_again()
    return True


def _signature(abstract_state: Any) -> dict[str, _Signature]:
    return {
        name: (tuple(leaf.shape), str(leaf.dtype))
        for name, leaf in named_leaves(abstract_state).items()
    }


def _saved_signature(tree: Any, prefix: str = "") -> Iterator[tuple[str, _Signature]]:
    """Names, shapes and dtypes in Orbax's metadata, where every container is a dict or a list."""
    if tree is None:
        return
    if isinstance(tree, Mapping):
        children = list(cast("Mapping[str, Any]", tree).items())
    elif isinstance(tree, (list, tuple)):
        children = list(enumerate(cast("list[Any]", tree)))
    else:
        yield prefix, (tuple(tree.shape), str(jax.numpy.dtype(tree.dtype)))
        return
    for name, child in children:
        yield from _saved_signature(child, f"{prefix}.{name}" if prefix else str(name))


def _show(signature: _Signature | None) -> str:
    return f"{signature[1]}{list(signature[0])}" if signature else "has none"


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0][:200]
