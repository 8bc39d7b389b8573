"""Meshes on TPU slices: ring neighbours are linked."""

import itertools
import math

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

import farspan
from farspan.dist import find_torus, order_devices, ring_hops

SLICES = [
    *(f"{chip}:{shape}" for chip in ("v4", "v5p", "tpu7x")
      for shape in ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8")),
    *(f"{chip}:{shape}" for chip in ("v5e", "v6e")
      for shape in ("2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")),
]  # fmt: skip


@pytest.mark.parametrize("name", SLICES)
def test_a_ring_over_a_whole_slice_is_of_neighbours(name, fake_slice, mesh_of):
    devices = fake_slice(name)
    mesh = mesh_of(devices, cp_ring=len(devices))
    assert set(mesh.devices.flat) == set(devices)
    chips = len({d.coords for d in devices})
    within = {0: len(devices) - chips} if len(devices) > chips else {}
    assert ring_hops(mesh) == within | {1: chips}


@pytest.mark.parametrize("name", SLICES)
def test_rings_in_any_split_by_powers_of_two_are_of_neighbours(name, fake_slice, mesh_of):
    devices = fake_slice(name)
    bits = len(devices).bit_length() - 1
    for ring, ulysses in itertools.product(range(1, bits + 1), range(3)):
        if ring + ulysses > bits:
            continue
        sizes = {"cp_ring": 2**ring, "cp_ulysses": 2**ulysses}
        mesh = mesh_of(devices, data=len(devices) // 2 ** (ring + ulysses), **sizes)
        assert set(mesh.devices.flat) == set(devices)
        assert max(ring_hops(mesh)) <= 1, sizes


def test_data_carves_a_slice_in_blocks_each_of_which_holds_a_ring(fake_slice, mesh_of):
    mesh = mesh_of(fake_slice("v5p:4x4x4"), data=2, cp_ring=32)
    for half in mesh.devices.reshape(2, 32):
        spans = [len({d.coords[axis] for d in half}) for axis in range(3)]
        assert sorted(spans) == [2, 4, 4]
    assert ring_hops(mesh) == {1: 64}


def test_heads_are_exchanged_between_near_devices(fake_slice, mesh_of):
    mesh = mesh_of(fake_slice("tpu7x:4x4x4"), cp_ring=64, cp_ulysses=2)
    assert ring_hops(mesh, ("cp_ulysses",)) == {0: 128}
    mesh = mesh_of(fake_slice("v5p:4x4x4"), cp_ring=16, cp_ulysses=4)
    assert ring_hops(mesh) == ring_hops(mesh, ("cp_ulysses",)) == {1: 64}
    mesh = mesh_of(fake_slice("v5p:2x2x2"), cp_ring=4, tensor=2)
    assert ring_hops(mesh) == ring_hops(mesh, ("tensor",)) == {1: 8}


def test_a_ring_around_a_ring_is_of_neighbours_too(fake_slice, mesh_of):
    mesh = mesh_of(fake_slice("v5p:4x4x4"), cp_ring_outer=4, cp_ring=16)
    assert ring_hops(mesh) == ring_hops(mesh, ("cp_ring_outer",)) == {1: 64}


def test_fewer_devices_than_there_are_take_a_box_with_a_ring(fake_slice, mesh_of):
    mesh = mesh_of(fake_slice("v5p:4x4x8"), cp_ring=8, cp_ulysses=2)
    assert ring_hops(mesh) == {1: 16}
    assert find_torus(list(mesh.devices.flat)).shape != (4, 4, 8)


def test_sizes_that_do_not_factor_follow_one_ring_over_the_slice(fake_slice, mesh_of):
    mesh = mesh_of(fake_slice("v5p:4x4x4"), cp_ring=44)
    hops = ring_hops(mesh)
    assert hops[1] == 43
    assert sum(hops.values()) == 44
    mesh = mesh_of(fake_slice("v6e:4x4"), data=3, cp_ring=5)
    assert mesh.devices.size == 15


def test_devices_of_an_incomplete_slice_keep_their_order(fake_slice, mesh_of):
    devices = fake_slice("v5p:4x4x4")[1:]
    mesh = mesh_of(devices, cp_ring=63)
    assert list(mesh.devices.flat) == devices


def test_slices_are_split_over_the_outermost_axes(fake_slice, mesh_of):
    devices = fake_slice("v5p:2x2x2") + fake_slice("v5p:2x2x2", slice_index=1)
    mesh = mesh_of(devices, data=2, cp_ring=8)
    for half in mesh.devices.reshape(2, 8):
        assert len({d.slice_index for d in half}) == 1
    assert ring_hops(mesh) == {1: 16}
    mesh = mesh_of(devices, cp_ring_outer=4, cp_ring=4)
    assert [d.slice_index for d in mesh.devices.reshape(4, 4)[:, 0]] == [0, 0, 1, 1]
    mesh = mesh_of(devices, cp_ring=16)  # the ring must cross: it does so as seldom as can be
    crossings = [a.slice_index != b.slice_index for a, b in itertools.pairwise(mesh.devices.flat)]
    assert sum(crossings) == 1
    mesh = mesh_of(devices, data=3, cp_ring=5)
    assert list(mesh.devices.flat) == devices[:15]


def test_make_mesh_orders_the_devices_that_there_are_and_keeps_those_it_is_given(
    fake_slice, monkeypatch
):
    devices = fake_slice("v5p:4x4x4")
    monkeypatch.setattr(jax, "devices", lambda: devices)
    assert ring_hops(farspan.make_mesh(cp_ring=64)) == {1: 64}
    given = farspan.make_mesh(cp_ring=64, devices=devices)
    assert list(given.devices.flat) == devices
    assert max(ring_hops(given)) > 1


def test_other_devices_keep_their_order_and_have_no_hops():
    mesh = farspan.make_mesh(cp_ring=8)
    assert list(mesh.devices.flat) == jax.devices()
    assert ring_hops(mesh) == {}
    assert find_torus(jax.devices()) is None


def test_hops_of_a_mesh_that_is_not_ours(fake_slice):
    devices = np.array(fake_slice("v6e:4x4"), dtype=object).reshape(4, 4)
    hops = ring_hops(Mesh(devices, ("data", "model")), ("data", "model"))
    assert sum(hops.values()) == 16


def test_order_is_complete_for_odd_sizes_too(fake_slice):
    devices = fake_slice("v5p:3x3x1")
    ordered = order_devices(devices, {"data": 3, "pipe": 1, "fsdp": 1, "cp_ring_outer": 1,
                                      "cp_ring": 3, "cp_ulysses": 1, "tensor": 1})  # fmt: skip
    assert set(ordered) == set(devices)
    assert math.prod((3, 3)) == len(ordered)


def test_the_devices_that_libtpu_shows_make_rings_of_neighbours(run_with_libtpu):
    program = """
from jax.experimental.topologies import get_topology_desc
import jax, farspan
from farspan.dist import ring_hops, find_torus
for name in ("v5p:4x4x4", "tpu7x:4x4x4", "v6e:4x4", "v5e:4x4"):
    devices = get_topology_desc(platform="tpu", topology_name=name).devices
    jax.devices = lambda devices=devices: devices
    mesh = farspan.make_mesh(cp_ring=len(devices))
    print(name, ring_hops(mesh), find_torus(devices).wrap)
"""
    assert run_with_libtpu(program).splitlines() == [
        "v5p:4x4x4 {1: 64} (True, True, True)",
        "tpu7x:4x4x4 {0: 64, 1: 64} (True, True, True)",
        "v6e:4x4 {1: 16} (False, False, False)",
        "v5e:4x4 {1: 16} (False, False, False)",
    ]
