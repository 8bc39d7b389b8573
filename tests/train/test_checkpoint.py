"""Checkpoints: exact, on any mesh, and never silently wrong or missing."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint._src.serialization import serialization

from farspan.train.checkpoint import CheckpointError, Checkpoints

CONFIG = {"model": {"num_layers": 2}, "seed": 0}


def make_state(value: float, mesh_shape: tuple[int, int] = (2, 4)) -> dict[str, Any]:
    devices = np.array(jax.devices()[: np.prod(mesh_shape)]).reshape(mesh_shape)
    mesh = Mesh(devices, ("data", "context"))
    split = NamedSharding(mesh, PartitionSpec(("data", "context")))
    whole = NamedSharding(mesh, PartitionSpec())
    return {
        "step": jax.device_put(jnp.int32(value), whole),
        "params": [
            {"w": jax.device_put(jnp.full((64, 8), value, jnp.float32), split)},
            {"w": jax.device_put(jnp.full((3,), value, jnp.bfloat16), whole)},
        ],
    }


def abstract(state: Any, **changes: Any) -> Any:
    shapes = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state
    )
    return {**shapes, **changes}


@pytest.fixture
def checkpoints(tmp_path: Path) -> Iterator[Checkpoints]:
    with Checkpoints(tmp_path, keep=3) as opened:
        yield opened


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A run folder with the checkpoints of steps 1 and 2."""
    with Checkpoints(tmp_path, keep=3) as opened:
        for step in (1, 2):
            opened.save(step, make_state(step), {"row": step}, CONFIG)
    return tmp_path


def test_an_empty_folder_has_no_checkpoint(checkpoints: Checkpoints) -> None:
    assert checkpoints.newest() is None


@pytest.mark.smoke
def test_the_newest_are_kept_and_read_back_whole(tmp_path: Path) -> None:
    with Checkpoints(tmp_path, keep=2) as opened:
        for step in range(1, 5):
            opened.save(step, make_state(step), {"row": step}, CONFIG)
    with Checkpoints(tmp_path, keep=2) as opened:
        assert opened.newest() == 4
        assert sorted(path.name for path in opened.directory.iterdir()) == ["3", "4"]
        assert opened.saved_config(4) == CONFIG
        state, loader_state = opened.restore(4, abstract(make_state(0)))
    assert loader_state == {"row": 4}
    jax.tree.map(np.testing.assert_array_equal, state, make_state(4))


@pytest.mark.parametrize("mesh_shape", [(1, 8), (8, 1), (1, 1)])
def test_another_mesh_restores_the_same_bits(saved: Path, mesh_shape: tuple[int, int]) -> None:
    wanted = make_state(2, mesh_shape)
    with Checkpoints(saved, keep=3) as opened:
        state, _ = opened.restore(2, abstract(wanted))
    jax.tree.map(np.testing.assert_array_equal, state, wanted)
    assert jax.tree.map(lambda leaf: leaf.sharding, state) == jax.tree.map(
        lambda leaf: leaf.sharding, wanted
    )


def test_donating_the_state_right_after_a_save_does_not_change_what_is_written(
    tmp_path: Path,
) -> None:
    bump = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf + 1, tree), donate_argnums=0)
    state = make_state(0)
    with Checkpoints(tmp_path, keep=20) as opened:
        for step in range(1, 21):
            state = bump(state)
            opened.save(step, state, {}, CONFIG)
    with Checkpoints(tmp_path, keep=20) as opened:
        for step in range(1, 21):
            restored, _ = opened.restore(step, abstract(make_state(0)))
            jax.tree.map(np.testing.assert_array_equal, restored, make_state(step))


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"step": jax.ShapeDtypeStruct((), jnp.float32)}, r"step: checkpoint int32\[\], run float"),
        ({"step": jax.ShapeDtypeStruct((2,), jnp.int32)}, r"int32\[\], run int32\[2\]"),
        ({"extra": jax.ShapeDtypeStruct((), jnp.int32)}, "extra: checkpoint has none"),
        ({"params": []}, r"params.0.w: checkpoint float32\[64, 8\], run has none"),
    ],
)
def test_another_dtype_shape_or_name_is_an_error_and_never_a_cast(
    saved: Path, changes: Any, difference: str
) -> None:
    with (
        Checkpoints(saved, keep=3) as opened,
        pytest.raises(ValueError, match=f"checkpoint: .*{difference}.*another --run-dir"),
    ):
        opened.restore(2, abstract(make_state(0), **changes))


def test_a_failed_background_write_is_raised_and_the_step_before_stays_newest(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: Any) -> None:
        await asyncio.sleep(1.0)  # until the threads that write the arrays are done
        raise OSError("no space left on device")

    monkeypatch.setattr(ocp.JsonCheckpointHandler, "_save_fn", fail)
    with (
        pytest.raises(CheckpointError, match="no space left"),
        Checkpoints(saved, keep=3) as opened,
    ):
        opened.save(3, make_state(3), {"row": 3}, CONFIG)
    monkeypatch.undo()
    with Checkpoints(saved, keep=3) as again:
        assert again.newest() == 2
        assert not list(again.directory.glob("*tmp*"))
        assert again.restore(2, abstract(make_state(0)))[1] == {"row": 2}


@pytest.mark.parametrize("missing", ["state", "loader", "state/manifest.ocdbt"])
def test_a_truncated_checkpoint_is_named_with_the_step_to_go_back_to(
    saved: Path, missing: str
) -> None:
    target = saved / "checkpoints" / "2" / missing
    shutil.rmtree(target) if target.is_dir() else target.unlink()
    with (
        Checkpoints(saved, keep=3) as opened,
        pytest.raises(ValueError, match=r"2 must be a complete checkpoint.*go on from step 1"),
    ):
        opened.restore(2, abstract(make_state(0)))


@pytest.mark.filterwarnings("ignore")
def test_a_foreign_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "7" / "model.bin").mkdir(parents=True)
    with (
        Checkpoints(tmp_path, keep=3) as opened,
        pytest.raises(ValueError, match=r"7 must be a complete checkpoint.*to start again"),
    ):
        opened.saved_config(opened.newest() or 0)


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(ValueError, match="must be a folder"):
        Checkpoints(tmp_path, keep=3)


def test_what_a_killed_save_left_is_removed_and_not_restored(saved: Path) -> None:
    shutil.copytree(saved / "checkpoints" / "2", saved / "checkpoints" / "3.orbax-checkpoint-tmp")
    with Checkpoints(saved, keep=3) as opened:
        assert opened.newest() == 2
        assert not (opened.directory / "3.orbax-checkpoint-tmp").exists()


def files_of(step_dir: Path) -> list[Path]:
    return sorted(path for path in step_dir.rglob("*") if path.is_file())


# Without these a checkpoint cannot be read. How many more there are is a matter of timing: the
# folder of each process keeps what was merged.
NEEDED = {
    *("config/metadata", "fingerprints/metadata", "loader/metadata"),
    *("state/_METADATA", "state/manifest.ocdbt"),
}


def damage_each_file(run_dir: Path) -> dict[str, list[str]]:
    """What reading says when each file of step 2 is lost, and cut; nothing where all is read.

    In a process of its own, since Orbax leaves unfinished reads behind.
    """
    step_dir, whole = run_dir / "checkpoints" / "2", run_dir / "whole"
    shutil.copytree(step_dir, whole)
    told: dict[str, list[str]] = {}
    for damaged in files_of(step_dir):
        said = told.setdefault(damaged.relative_to(step_dir).as_posix(), [])
        for keep in (None, damaged.stat().st_size // 2):
            shutil.rmtree(step_dir)
            shutil.copytree(whole, step_dir)
            if keep is None:
                damaged.unlink()
            else:
                damaged.write_bytes(damaged.read_bytes()[:keep])
            with Checkpoints(run_dir, keep=3) as opened:
                try:
                    state, loader_state = opened.restore(2, abstract(make_state(0)))
                    config = opened.saved_config(2)
                except ValueError as error:
                    said.append(str(error))
                    continue
            jax.tree.map(np.testing.assert_array_equal, state, make_state(2))
            assert (loader_state, config) == ({"row": 2}, CONFIG)
            said.append("")
    return told


def test_no_file_of_a_checkpoint_can_be_lost_or_cut_short_without_a_word(saved: Path) -> None:
    reader = subprocess.run(
        [sys.executable, __file__, str(saved)], capture_output=True, text=True, check=False
    )
    assert reader.returncode == 0, reader.stderr
    for noise in ("Event loop is closed", "never retrieved"):
        assert noise not in reader.stderr
    told = json.loads(reader.stdout.splitlines()[-1])
    refused = [message for said in told.values() for message in said if message]
    always_refused = {name for name, said in told.items() if all(said)}
    assert always_refused > NEEDED
    assert any(name.startswith("state/d/") for name in always_refused), "the arrays themselves"
    assert all("checkpoints/2 must be a complete checkpoint" in message for message in refused)


def test_a_bit_that_flips_in_an_array_is_noticed(tmp_path: Path) -> None:
    state = make_state(1)
    values = np.random.default_rng(0).standard_normal((64, 512), np.float32)
    state["params"][0]["w"] = jax.device_put(values, state["params"][0]["w"].sharding)
    with Checkpoints(tmp_path, keep=3) as opened:
        opened.save(1, state, {}, CONFIG)
    largest = max(files_of(tmp_path / "checkpoints" / "1"), key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)
    with (
        Checkpoints(tmp_path, keep=3) as opened,
        pytest.raises(ValueError, match=r"got other values than were saved in params\.0\.w"),
    ):
        opened.restore(1, abstract(state))


def test_the_state_of_a_step_is_written_though_a_slow_writer_meets_donated_buffers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = serialization.async_serialize_from_host

    async def write_slowly(*args: Any, **kwargs: Any) -> None:
        await asyncio.sleep(0.3)
        await write(*args, **kwargs)

    monkeypatch.setattr(serialization, "async_serialize_from_host", write_slowly)
    bump = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf + 1, tree), donate_argnums=0)
    state = make_state(1)
    with Checkpoints(tmp_path, keep=3) as opened:
        opened.save(1, state, {}, CONFIG)
        for _ in range(20):
            state = bump(state)
        opened.save(21, state, {}, CONFIG)
        bump(state)
        opened.wait()
        for step in (1, 21):
            restored, _ = opened.restore(step, abstract(make_state(0)))
            jax.tree.map(np.testing.assert_array_equal, restored, make_state(step))


@contextlib.contextmanager
def files_no_longer_than(size_bytes: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def save_and_wait(checkpoints: Checkpoints, state: Any) -> None:
    checkpoints.save(3, state, {"row": 3}, CONFIG)
    checkpoints.wait()


def test_a_full_disk_fails_the_run_and_leaves_the_step_before(saved: Path) -> None:
    """The limit of a file's size stands for the disk: writing fails in the same place."""
    state = make_state(3)
    values = np.random.default_rng(0).standard_normal((64, 8192), np.float32)
    state["params"][0]["w"] = jax.device_put(values, state["params"][0]["w"].sharding)
    with (
        pytest.raises(CheckpointError, match=r"could not be written.*make room"),
        Checkpoints(saved, keep=3) as opened,
        files_no_longer_than(65536),
    ):
        save_and_wait(opened, state)
    with Checkpoints(saved, keep=3) as again:
        assert again.newest() == 2


def test_what_a_killed_save_left_is_removed_though_something_still_writes_there(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leftover = saved / "checkpoints" / "3.orbax-checkpoint-tmp"
    (leftover / "state").mkdir(parents=True)
    remove, tries = shutil.rmtree, 0

    def remove_while_another_writes(path: Path) -> None:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise OSError(errno.ENOTEMPTY, "Directory not empty", str(path))
        remove(path)

    monkeypatch.setattr(shutil, "rmtree", remove_while_another_writes)
    with Checkpoints(saved, keep=3) as opened:
        assert opened.newest() == 2
    assert tries == 2
    assert not leftover.exists()


def test_a_run_folder_that_cannot_be_written_is_refused_before_the_first_step() -> None:
    with pytest.raises(ValueError, match=r"that can be written.*another --run-dir"):
        Checkpoints(Path("/proc/farspan"), keep=3)
    with pytest.raises(ValueError, match="must be a folder that can be written"):
        Checkpoints(Path("/dev/null"), keep=3)


def test_a_checkpoint_of_another_program_is_refused(tmp_path: Path) -> None:
    with ocp.CheckpointManager(tmp_path / "checkpoints") as foreign:
        foreign.save(5, args=ocp.args.StandardSave({"weights": np.zeros(3, np.float32)}))
    with Checkpoints(tmp_path, keep=3) as opened:
        newest = opened.newest()
        assert newest == 5
        for read in (
            opened.saved_config,
            lambda step: opened.restore(step, abstract(make_state(0))),
        ):
            with pytest.raises(ValueError, match="5 must be a complete checkpoint"):
                read(newest)


def test_opening_leaves_nothing_behind_but_the_folder(tmp_path: Path) -> None:
    with Checkpoints(tmp_path, keep=3) as opened:
        assert list(opened.directory.iterdir()) == []


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    print(json.dumps(damage_each_file(Path(sys.argv[1]))))  # noqa: T201
