"""Chips and slices: names, what they hold, and refusals that name the remedy."""

import math
import os
import subprocess
import sys

import pytest

from farspan.plan.aot import compiler_available
from farspan.plan.compiler import _ENVIRONMENT
from farspan.plan.hardware import TPU_CHIPS, get_slice, smallest_slice

GIB = 2**30


@pytest.mark.parametrize(
    ("name", "chips", "devices"),
    [
        ("v4:2x2x1", 4, 4),
        ("v5e:4x4", 16, 16),
        ("v5p:4x4x4", 64, 64),
        ("v6e:16x16", 256, 256),
        ("tpu7x:4x4x4", 64, 128),
        ("v5p:1x1x1", 1, 1),
    ],
)
def test_a_slice_by_its_name(name, chips, devices):
    found = get_slice(name)
    assert (found.name, found.num_chips, found.num_devices) == (name, chips, devices)


def test_links_that_lead_somewhere():
    assert get_slice("v5p:4x4x4").links_per_chip == 6
    assert get_slice("v5p:2x2x1").links_per_chip == 2
    assert get_slice("v6e:4x2").links_per_chip == 3
    assert get_slice("v6e:1x1").links_per_chip == 0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v9:2x2", r"chip must be one of tpu7x, v4, v5e, v5p, v6e, got 'v9'"),
        ("v5p", r"named by 3 dimensions in chips, got 'v5p'; use for example v5p:4x4x4"),
        ("v6e:4x4x4", "named by 2 dimensions"),
        ("v5p:4x4xfour", "named by 3 dimensions"),
        ("v5p:0x4x4", "named by 3 dimensions"),
        ("v6e:32x32", "at most 256 chips, got 'v6e:32x32' with 1024"),
        ("v5p:3x2x1", "first two dimensions of a slice are 1 or even"),
    ],
)
def test_names_that_mean_nothing(name, message):
    with pytest.raises(ValueError, match=message):
        get_slice(name)


@pytest.mark.parametrize(
    ("chip", "devices", "name"),
    [
        ("v5p", 1, "v5p:1x1x1"),
        ("v5p", 3, "v5p:2x2x1"),
        ("v5p", 8, "v5p:2x2x2"),
        ("v5p", 16, "v5p:2x2x4"),
        ("v5p", 64, "v5p:4x4x4"),
        ("v5p", 65, "v5p:4x4x8"),
        ("v6e", 8, "v6e:2x4"),
        ("tpu7x", 8, "tpu7x:2x2x1"),
    ],
)
def test_the_smallest_usual_slice(chip, devices, name):
    assert smallest_slice(chip, devices).name == name


def test_no_slice_is_larger_than_a_pod():
    with pytest.raises(ValueError, match="at most 256 chips, but 300 devices need 300"):
        smallest_slice("v6e", 300)


def test_published_figures_of_a_chip_are_those_of_its_devices():
    chips = {chip.name: chip for chip in TPU_CHIPS}
    peaks = {"v4": 275, "v5e": 197, "v5p": 459, "v6e": 918, "tpu7x": 2307}
    rates = {"v4": 1200, "v5e": 819, "v5p": 2765, "v6e": 1638, "tpu7x": 7380}
    memory = {"v4": 32, "v5e": 16, "v5p": 96, "v6e": 32, "tpu7x": 192}
    links = {"v4": 600, "v5e": 400, "v5p": 1200, "v6e": 800, "tpu7x": 1200}
    for name, chip in chips.items():
        assert chip.peak_flops_per_second * chip.devices_per_chip == peaks[name] * 1e12
        assert chip.hbm_bytes_per_second * chip.devices_per_chip == rates[name] * 1e9
        held = chip.hbm_bytes * chip.devices_per_chip
        assert memory[name] - 3 < held / GIB <= memory[name]
        both_ways = 2 * 2 * chip.torus_dimensions * chip.link_bytes_per_second
        assert both_ways == links[name] * 1e9


@pytest.mark.skipif(not compiler_available(), reason="needs libtpu: pip install 'farspan[tpu]'")
def test_the_compiler_knows_every_chip_by_our_name_and_shows_as_many_devices():
    names = [smallest_slice(chip.name, 4).name for chip in TPU_CHIPS]
    program = (
        "import sys\n"
        "from jax.experimental.topologies import get_topology_desc\n"
        "from farspan.plan.hardware import get_slice\n"
        "for name in sys.argv[1:]:\n"
        "    where = get_slice(name)\n"
        "    found = get_topology_desc(\n"
        "        platform='tpu', topology_name=name, **where.topology_options\n"
        "    ).devices\n"
        "    assert len(found) == where.num_devices, name\n"
        "    assert found[0].device_kind in where.chip.device_kinds, found[0].device_kind\n"
        "    assert found[0].num_cores == where.chip.cores_per_device, name\n"
    )
    environment = os.environ | _ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", program, *names], env=environment, check=True)
    assert math.prod(get_slice(names[0]).shape) == 4
