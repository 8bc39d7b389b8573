"""The mesh, and where parameters lie on it."""

import pytest
from jax.sharding import PartitionSpec as P

import farspan
from farspan.dist import AXES
from farspan.dist.sharding import parameter_spec


def test_axes_come_outermost_first():
    mesh = farspan.make_mesh(data=2, cp_ring=2, cp_ulysses=2)
    assert mesh.axis_names == AXES
    assert mesh.devices.shape == (2, 1, 1, 1, 2, 2, 1)
    assert [d.id for d in mesh.devices.flat] == list(range(8))


def test_too_few_devices_says_how_many_and_what_to_do():
    with pytest.raises(ValueError, match=r"cp_ring=16 = 16 with 8 cpu device.*jax_num_cpu_devices"):
        farspan.make_mesh(cp_ring=16)
    with pytest.raises(ValueError, match="at least 1, got cp_ring=0"):
        farspan.make_mesh(cp_ring=0)


def test_parameters_split_over_batch_and_context_axes_together():
    mesh = farspan.make_mesh(data=2, cp_ring=2, cp_ulysses=2)
    axes = ("data", "cp_ring", "cp_ulysses")
    assert parameter_spec((4, 64, 32), ("layer", "model", "ffn"), mesh) == P(None, axes, None)
    assert parameter_spec((12,), ("model",), mesh) == P(("cp_ring", "cp_ulysses"))
    assert parameter_spec((7,), ("model",), mesh) == P(None)
    assert parameter_spec((64,), ("norm",), mesh) == P(None)
