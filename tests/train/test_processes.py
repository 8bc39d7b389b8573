"""Runs in several processes: the numbers of one process, whatever is killed or asked to stop."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.experimental.multihost_utils
import numpy as np
import pytest

from farspan.cli.main import main
from farspan.data import make_loader
from farspan.dist.devices import ensure_devices
from farspan.dist.processes import join_processes
from farspan.recipes.quickstart import quickstart
from farspan.train.config import ParallelConfig
from farspan.train.metrics import read_metrics
from farspan.train.step import build_setup

STEPS = 40
SECONDS = 240
FARSPAN = (sys.executable, "-m", "farspan.cli.main")
TRAIN = (
    *("train", "quickstart", "--steps", str(STEPS), "--checkpoint-every", "4"),
    *("--seq-len", "64", "--batch-size", "2", "--context-parallel-strategy", "ring"),
    *("--num-layers", "1", "--model-dim", "16", "--ffn-dim", "32", "--vocab-size", "258"),
    *("--num-heads", "2", "--num-kv-heads", "1", "--head-dim", "8"),
)
"""A ring of eight devices, over all processes."""
TWO_RINGS = ("--context-parallel-size", "4", "--data-parallel-size", "2")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of different lengths."""
    path = tmp_path_factory.mktemp("text") / "text.jsonl"
    draw = np.random.default_rng(0)
    lengths = draw.integers(5, 150, 80)
    documents = ("".join(draw.choice(list("abcdef ")) for _ in range(n)) for n in lengths)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    return path


@pytest.fixture(scope="module")
def arguments(text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    return (*TRAIN, "--data", str(text), "--cache-dir", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="module")
def unbroken(arguments: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of one process that is left alone."""
    run_dir = tmp_path_factory.mktemp("unbroken")
    assert main([*arguments, "--run-dir", str(run_dir)]) == 0
    return run_dir


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """For processes that have little time to compile."""
    return {
        **os.environ,
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_COMPILATION_CACHE_MAX_SIZE": str(2**30),
    }


@pytest.fixture
def start(environment: dict[str, str]) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts processes, and leaves none behind."""
    started: list[subprocess.Popen[str]] = []

    def popen(command: tuple[str, ...], **more: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            command,
            env={**environment, **more},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield popen
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def as_cluster(count: int) -> list[dict[str, str]]:
    """What a cluster's scripts set for each process."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    return [
        {
            "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
            "JAX_NUM_PROCESSES": str(count),
            "JAX_PROCESS_ID": str(index),
        }
        for index in range(count)
    ]


def await_step(run_dir: Path, step: int) -> None:
    deadline = time.monotonic() + SECONDS
    metrics = run_dir / "metrics.jsonl"
    while not metrics.exists() or len(metrics.read_bytes().splitlines()) < step:
        assert time.monotonic() < deadline, f"step {step} did not come"
        time.sleep(0.02)


def await_launch(run_dir: Path, number: int) -> None:
    deadline = time.monotonic() + SECONDS
    while len((run_dir / "launches.jsonl").read_bytes().splitlines()) < number:
        assert time.monotonic() < deadline, f"launch {number} did not come"
        time.sleep(0.02)


def newest_checkpoint(run_dir: Path) -> int:
    return max(int(folder.name) for folder in (run_dir / "checkpoints").iterdir())


def children(parent: int) -> list[int]:
    """Processes that this one has started, in order."""
    listed = subprocess.run(
        ["ps", "-A", "-o", "pid=,ppid="], check=True, capture_output=True, text=True
    )
    pairs = [tuple(map(int, line.split())) for line in listed.stdout.splitlines()]
    return sorted(pid for pid, of in pairs if of == parent)


def losses(run_dir: Path) -> list[float]:
    records = read_metrics(run_dir / "metrics.jsonl")
    assert [record["step"] for record in records] == list(range(1, len(records) + 1))
    return [record["loss"] for record in records]


def check_same(run_dir: Path, unbroken: Path) -> None:
    """Every step once, and every loss that of the unbroken run, as far as sums in another order."""
    assert len(losses(run_dir)) == STEPS
    np.testing.assert_allclose(losses(run_dir), losses(unbroken), rtol=2e-5)


def placed_batches(text: str, cache_dir: str) -> str:
    """Digests of the first batches of four meshes, as gathered from all devices."""
    told: list[str] = []
    with join_processes():
        ensure_devices(8)
        for parallel in (
            ParallelConfig("ring", 8, context_parallel_load_balance="balanced"),
            ParallelConfig("ring", 4, data_parallel_size=2),
            ParallelConfig("usp", 4, fsdp_parallel_size=2, context_parallel_load_balance="striped"),
            ParallelConfig("ulysses", 2, data_parallel_size=4),
        ):
            config = dataclasses.replace(
                quickstart(), parallel=parallel, batch_size=4, gradient_accumulation_steps=1
            )
            with contextlib.closing(
                make_loader(
                    text, tokenizer="byte", seq_len=64, batch_size=4, seed=0, cache_dir=cache_dir
                )
            ) as loader:
                batch = next(iter(loader))
            setup = build_setup(
                dataclasses.replace(config, data=dataclasses.replace(config.data, seq_len=64))
            )
            for leaf in jax.tree.leaves(setup.place(batch)):
                whole = leaf
                if isinstance(leaf, jax.Array):
                    assert leaf.sharding.device_set == set(jax.devices())
                    whole = jax.experimental.multihost_utils.process_allgather(leaf, tiled=True)
                told.append(hashlib.sha256(np.ascontiguousarray(whole)).hexdigest())
    return " ".join(told)


def test_the_batch_over_all_processes_is_bit_for_bit_that_of_one(
    text: Path, tmp_path: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    expected = placed_batches(str(text), str(tmp_path))
    assert len(set(expected.split())) > 12
    command = (sys.executable, __file__, str(text), str(tmp_path))
    members = [start(command, **place) for place in as_cluster(4)]
    for member in members:
        out, err = member.communicate(timeout=SECONDS)
        assert out.split("placed: ")[-1].strip() == expected, err


def test_killed_started_again_and_asked_to_stop_a_run_ends_as_an_unbroken_one(
    arguments: tuple[str, ...],
    unbroken: Path,
    tmp_path: Path,
    start: Callable[..., subprocess.Popen[str]],
) -> None:
    run_dir = tmp_path / "run"
    launch = (*FARSPAN, "launch", "-n", "2", "--max-restarts", "2", "--")
    launcher = start((*launch, *arguments, "--run-dir", str(run_dir)))
    await_step(run_dir, 6)
    os.kill(children(launcher.pid)[1], signal.SIGKILL)
    await_launch(run_dir, 2)
    resumed = len(losses(run_dir))
    await_step(run_dir, resumed + 4)
    os.kill(children(launcher.pid)[1], signal.SIGTERM)
    out, err = launcher.communicate(timeout=SECONDS)
    assert launcher.returncode == 128 + signal.SIGTERM, err
    assert "[0] error: process 1 of 2 is gone; run again to go on from the newest checkpoint" in err
    assert "process 1 of 2 was ended by SIGKILL" in err
    assert err.count("restarting all 2") == 1
    assert "resuming from step" in out
    assert "Gloo" not in out
    stopped = len(losses(run_dir))
    assert resumed + 4 <= stopped < STEPS
    assert newest_checkpoint(run_dir) == stopped
    assert main([*arguments, "--run-dir", str(run_dir)]) == 0
    check_same(run_dir, unbroken)


@pytest.mark.slow
def test_two_rings_over_four_processes_give_the_numbers_of_one_ring(
    arguments: tuple[str, ...],
    unbroken: Path,
    tmp_path: Path,
    start: Callable[..., subprocess.Popen[str]],
) -> None:
    run_dir = tmp_path / "run"
    command = (*FARSPAN, *arguments, *TWO_RINGS, "--run-dir", str(run_dir))
    members = [start(command, **place) for place in as_cluster(4)]
    said = [member.communicate(timeout=SECONDS) for member in members]
    assert [member.returncode for member in members] == [0] * 4, said
    assert ["step" in out for out, _ in said] == [True, False, False, False]
    check_same(run_dir, unbroken)


if __name__ == "__main__":
    print("placed:", placed_batches(*sys.argv[1:]))  # noqa: T201
