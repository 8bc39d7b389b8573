"""A run that cannot fit is refused before anything is allocated."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace

import jax
import pytest

from farspan.plan import memory
from farspan.recipes import get_recipe
from farspan.train import fit, loop
from farspan.train.config import TrainConfig
from farspan.train.step import build_setup


@pytest.fixture
def config(change: Callable[..., TrainConfig]) -> TrainConfig:
    return change(get_recipe("quickstart").build(), context_parallel_size=4, seq_len=64)


def test_state_that_just_fits_and_state_that_does_not(
    monkeypatch: pytest.MonkeyPatch, config: TrainConfig
) -> None:
    setup = build_setup(config)
    needed = 4 * memory.account(fit.make_workload(config)).state_bytes
    monkeypatch.setattr(fit, "host_bytes_available", lambda: needed)
    fit.check_state_fits(setup)
    monkeypatch.setattr(fit, "host_bytes_available", lambda: needed - 1)
    with pytest.raises(
        ValueError, match=r"must fit in memory.*1,443,584 parameters.*use a smaller"
    ):
        fit.check_state_fits(setup)
    monkeypatch.setattr(fit, "host_bytes_available", lambda: None)
    fit.check_state_fits(setup)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_planned_state_is_that_of_the_arrays(
    change: Callable[..., TrainConfig], config: TrainConfig, optimizer: str
) -> None:
    """One moment of hidden matrices with Muon, and a float32 mean of bfloat16 parameters."""
    config = change(config, optimizer=optimizer, ema_decay=0.999, param_dtype="bfloat16")
    state = build_setup(config).abstract_state()
    found = sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves(state)
    )
    assert memory.account(fit.make_workload(config)).state_bytes == found


def test_a_run_is_refused_before_it_loads_data(
    monkeypatch: pytest.MonkeyPatch, change: Callable[..., TrainConfig], config: TrainConfig
) -> None:
    monkeypatch.setattr(fit, "host_bytes_available", lambda: 1000)
    with pytest.raises(ValueError, match="parameters and optimizer state must fit in memory"):
        loop.run(change(config, data="no/such/file.txt"))


def test_this_machine_has_memory() -> None:
    assert (fit.host_bytes_available() or 0) > 2**20
    assert fit.device_bytes(jax.devices()[0]) is None  # of a virtual device none is known


def test_memory_of_an_accelerator() -> None:
    kind = SimpleNamespace(device_kind="TPU v5p", memory_stats=lambda: None)
    assert fit.device_bytes(kind) == int(95.73 * 2**30)
    known = SimpleNamespace(device_kind="NVIDIA H200", memory_stats=lambda: {"bytes_limit": 7})
    assert fit.device_bytes(known) == 7


def test_a_step_is_described_without_devices(change: Callable[..., TrainConfig]) -> None:
    config = change(
        get_recipe("llama3_8b_long").build(), context_parallel_size=512, seq_len=1_000_000
    )
    work = fit.make_workload(config)
    assert work.num_devices == 4096
    assert work.seq_len == 1_000_448  # a multiple of 1,024, the chunks of zigzag
    assert (work.part_rows, work.part_tokens) == (1, 1954)
