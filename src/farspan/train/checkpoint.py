"""Checkpoints of a run: state, place in the data and configuration, written in the background.

One step is one folder, `RUN_DIR/checkpoints/STEP`. Orbax renames or marks it complete only when all
of it is on disk, so a run that is killed while it saves still has its previous step. The state is
stored by global array, so any mesh may restore it.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers

State = TypeVar("State")
_Signature = tuple[tuple[int, ...], str]
_ITEMS = ("state", "loader", "config")


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
          ValueError: The path is not a folder.
        """
        self.directory = run_dir / "checkpoints"
        if self.directory.exists() and not self.directory.is_dir():
            raise ValueError(
                f"run_dir: {self.directory} must be a folder, got a file; remove it or use another "
                "--run-dir"
            )
        for leftover in self.directory.glob("*.orbax-checkpoint-tmp*"):  # of a save that was killed
            shutil.rmtree(leftover)
        self._manager = ocp.CheckpointManager(
            self.directory.resolve(),
            item_names=_ITEMS,
            item_handlers={
                "state": ocp.StandardCheckpointHandler(),
                "loader": ocp.JsonCheckpointHandler(),
                "config": ocp.JsonCheckpointHandler(),
            },
            options=ocp.CheckpointManagerOptions(
                preservation_policy=checkpoint_managers.LatestN(keep)
            ),
        )

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
        )
        return cast("State", read["state"]), read["loader"]

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
        try:
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(state),
                    loader=ocp.args.JsonSave(loader_state),
                    config=ocp.args.JsonSave(config),
                ),
                force=True,
            )
        except Exception as error:
            raise self._unwritten(error) from error

    def wait(self) -> None:
        """Waits until the save in flight, if any, is complete on disk.

        Raises:
          CheckpointError: It could not be written.
        """
        try:
            self._manager.wait_until_finished()
            self._manager.check_for_errors()
        except Exception as error:
            raise self._unwritten(error) from error

    def close(self) -> None:
        """Waits for the save in flight, then ends the background threads."""
        try:
            self.wait()
        finally:
            self._manager.close()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self, step: int, **items: Any) -> Mapping[str, Any]:
        try:
            return cast("Any", self._manager.restore(step, args=ocp.args.Composite(**items)))
        except Exception as error:
            raise self._unreadable(step, error) from error

    def _check_signature(self, step: int, abstract_state: Any) -> None:
        try:
            metadata = cast("Any", self._manager.item_metadata(step))["state"]
            saved = dict(_saved_signature(metadata.tree))
        except Exception as error:
            raise self._unreadable(step, error) from error
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

    def _unreadable(self, step: int, error: Exception) -> ValueError:
        older = [other for other in self._manager.all_steps() if other < step]
        remedy = f"to go on from step {max(older)}" if older else "to start again"
        return ValueError(
            f"checkpoint: {self.step_dir(step)} must be a complete checkpoint, got "
            f"{type(error).__name__}: {_first_line(error)}; remove this folder {remedy}, or use "
            "another --run-dir"
        )

    def _unwritten(self, error: Exception) -> CheckpointError:
        return CheckpointError(
            f"checkpoint: could not be written to {self.directory}, got {type(error).__name__}: "
            f"{_first_line(error)}; make room or correct the permissions, then run again: it goes "
            "on from the newest complete step"
        )


def _signature(abstract_state: Any) -> dict[str, _Signature]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(abstract_state)
    return {
        ".".join(_key_name(key) for key in path): (tuple(leaf.shape), str(leaf.dtype))
        for path, leaf in leaves
    }


def _key_name(key: Any) -> str:
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    raise AssertionError(f"pytree key of unknown kind {key!r}")


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
