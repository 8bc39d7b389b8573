"""Gathers and sums over a torus are those over the mesh, and use real collectives on TPU."""

import itertools
import json

import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import farspan
from farspan.dist import Route, find_route, gather_shards, mesh_link_bytes, scatter_sum

NAMES = ("data", "cp_ring")
# Of 2 x 2 x 2 chips: planes of 4, then lines of 2.
ORDER = (0, 7, 3, 4, 1, 6, 2, 5)
STAGES = (((0, 7, 1, 6), (3, 4, 2, 5)), ((0, 3), (7, 4), (1, 2), (6, 5)))


def on_eight(local, in_specs, out_specs):
    mesh = farspan.make_mesh(data=2, cp_ring=4)
    mapped = jax.shard_map(
        lambda x: local(x, mesh), mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )
    return jax.jit(mapped)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("route", [Route(ORDER), Route(ORDER, STAGES), Route(tuple(range(8)))])
def test_a_route_changes_nothing_in_what_is_gathered_and_summed(route, axis):
    x = np.arange(16 * 16, dtype=np.float32).reshape(16, 16)
    split = P(*([None] * axis), NAMES)
    gather = on_eight(lambda x, mesh: gather_shards(x, mesh, NAMES, axis, route), split, P())
    np.testing.assert_array_equal(gather(x), x)

    def summed(x, mesh):
        summand = x * (1 + lax.axis_index(NAMES))  # small integers: exact in any order
        return scatter_sum(summand, mesh, NAMES, axis, route)

    np.testing.assert_array_equal(on_eight(summed, P(), split)(x), 36 * x)


def test_without_a_torus_there_is_no_route(fake_slice, mesh_of):
    assert find_route(farspan.make_mesh(data=2, cp_ring=4), NAMES) is None
    assert find_route(mesh_of(fake_slice("v5p:2x4x4"), cp_ring=32), ("cp_ring",)) is None
    assert find_route(mesh_of(fake_slice("v5p:4x4x4"), tensor=2, cp_ring=32), ("cp_ring",)) is None
    two = fake_slice("v5p:4x4x4") + fake_slice("v5p:4x4x4", slice_index=1)
    assert find_route(mesh_of(two, data=2, cp_ring=64), NAMES) is None


@pytest.mark.parametrize(
    "name", ["v5p:4x4x4", "v5p:4x4x8", "tpu7x:4x4x4", "v6e:16x16", "v5p:2x2x2"]
)
def test_a_route_goes_in_row_major_order_of_the_torus(name, fake_slice, mesh_of):
    devices = fake_slice(name)
    mesh = mesh_of(devices, data=2, cp_ring=len(devices) // 2)
    route = find_route(mesh, NAMES)
    flat = mesh.devices.reshape(-1)
    places = [(*flat[device].coords, flat[device].core_on_chip) for device in route.order]
    orders = [(*axes, 3) for axes in itertools.permutations(range(3))]
    assert any(
        places == sorted(places, key=lambda place: [place[axis] for axis in axes])
        for axes in orders
    )
    assert bool(route.stages) == name.startswith("v5p:4")
    for stage in route.stages:
        assert sorted(device for group in stage for device in group) == list(range(len(flat)))
    if route.stages:
        assert sorted(route.scattered) == list(range(len(flat)))


@pytest.mark.parametrize(("name", "most"), [("v5p:4x4x4", 2), ("v5p:4x4x8", 2), ("v5p:8x8x8", 4)])
def test_few_shards_on_their_way_to_a_route_or_home_meet_on_a_link(name, most, fake_slice, mesh_of):
    devices = fake_slice(name)
    mesh = mesh_of(devices, cp_ring=len(devices))
    route = find_route(mesh, ("cp_ring",))
    for pairs in (enumerate(route.order), enumerate(route.scattered)):
        carried = mesh_link_bytes(mesh, ("cp_ring",), [(list(pairs), 1)])
        assert max(carried.values()) <= most


PROGRAM = """
import json
import jax, jax.numpy as jnp
from jax.experimental.topologies import get_topology_desc
from jax.sharding import NamedSharding, PartitionSpec as P
import farspan
from farspan.dist import gather_shards, scatter_sum
from farspan.plan.hlo import COLLECTIVES, instructions

found = {}
for name in ("v5p:4x4x4", "tpu7x:4x4x4"):
    devices = get_topology_desc(platform="tpu", topology_name=name, wrap=(True,) * 3).devices
    jax.devices = lambda devices=devices: devices
    mesh = farspan.make_mesh(cp_ring=len(devices))
    gather = lambda x: gather_shards(x, mesh, ("cp_ring",), 0)
    summed = lambda x: scatter_sum(x, mesh, ("cp_ring",), 0)
    for what, local, dtype, here, there in (
        ("gather", gather, jnp.bfloat16, P("cp_ring"), P()),
        ("sum", summed, jnp.float32, P(), P("cp_ring")),
    ):
        mapped = jax.shard_map(
            local, mesh=mesh, in_specs=here, out_specs=there, check_vma=False
        )
        x = jax.ShapeDtypeStruct((4096, 1024), dtype, sharding=NamedSharding(mesh, here))
        text = jax.jit(mapped).lower(x).compile().as_text()
        found[f"{name} {what}"] = [
            (i.op, i.result_bytes) for i in instructions(text)
            if i.op.removesuffix("-start") in COLLECTIVES
        ]
print(json.dumps(found))
"""


def test_the_tpu_compiler_makes_real_gathers_and_scattered_sums(run_with_libtpu):
    found = json.loads(run_with_libtpu(PROGRAM).splitlines()[-1])
    whole = {"gather": 4096 * 1024 * 2, "sum": 4096 * 1024 * 4}
    for name, devices in (("v5p:4x4x4", 64), ("tpu7x:4x4x4", 128)):
        gathers = [size for op, size in found[f"{name} gather"] if op == "all-gather"]
        assert gathers == [whole["gather"]]
        sums = [size for op, size in found[f"{name} sum"] if op == "reduce-scatter"]
        assert sums[-1] == whole["sum"] // devices
    for program in found.values():
        assert "all-reduce" not in {op for op, _ in program}
