"""Devices that look like chips of a TPU slice, and a process in which libtpu shows real ones."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import os
import subprocess
import sys

import numpy as np
import pytest
from jax.sharding import Mesh

from farspan.dist import AXES, order_devices

KINDS = {
    "v4": "TPU v4",
    "v5p": "TPU v5",
    "v5e": "TPU v5 lite",
    "v6e": "TPU v6 lite",
    "tpu7x": "TPU7x",
}
LIBTPU = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5p-8",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


@dataclasses.dataclass(frozen=True)
class FakeDevice:
    id: int
    coords: tuple[int, int, int]
    core_on_chip: int
    device_kind: str
    slice_index: int = 0
    platform: str = "tpu"


def _fake_slice(name, slice_index=0):
    chip, _, sides = name.partition(":")
    shape = (*map(int, sides.split("x")), 1)[:3]
    chips = sorted(
        itertools.product(*map(range, shape)),
        key=lambda c: (c[2], c[1] // 2, c[0] // 2, c[1] % 2, c[0] % 2),
    )
    cores = 2 if chip == "tpu7x" else 1
    return [
        FakeDevice(cores * place + core, coords, core, KINDS[chip], slice_index)
        for place, coords in enumerate(chips)
        for core in range(cores)
    ]


def _mesh_of(devices, **sizes):
    every = {axis: sizes.get(axis, 1) for axis in AXES}
    ordered = np.array(order_devices(devices, every), dtype=object)
    return Mesh(ordered.reshape(tuple(every.values())), AXES)


def _run_with_libtpu(program):
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("needs libtpu, the TPU compiler: pip install 'farspan[tpu]'")
    environment = os.environ | LIBTPU | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    ran = subprocess.run(
        [sys.executable, "-c", program],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-3000:]
    return ran.stdout


@pytest.fixture
def fake_slice():
    """Makes the devices of a slice such as `v5p:4x4x4`, in the order of hosts, 2x2 chips each."""
    return _fake_slice


@pytest.fixture
def mesh_of():
    """Makes the mesh that `make_mesh` would if some devices were all that there are."""
    return _mesh_of


@pytest.fixture
def run_with_libtpu():
    """Runs a program in a process where libtpu compiles for TPU; returns what it prints."""
    return _run_with_libtpu
