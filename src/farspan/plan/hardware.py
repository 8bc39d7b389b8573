"""What chips can do, as their vendors publish it, and the slices that they are rented in.

Figures are per JAX device unless a name says otherwise. A TPU v4 or v5p chip is one device of two
cores, a v5e or v6e chip one device of one core, a TPU7x chip two devices of one core each. Peaks
are dense bfloat16 matrix rates. The reported `device_kind` decides: cards that share a family name
but not a rate (H100 PCIe and H100 SXM) are told apart, and a kind that is not listed has no peak.

Sources:
  Peak, HBM rate and torus: Google Cloud, "TPU v4", "TPU v5e", "TPU v5p", "TPU v6e" and "TPU7x
  (Ironwood)", https://docs.cloud.google.com/tpu/docs/v4 (and so on).
  Host memory: that of the virtual machine with four chips; the same pages, v4 and v5e by
  https://docs.cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus.
  HBM: what libtpu 0.0.50.1 lets a program use, to a hundredth of a GiB, from its message when one
  does not fit; the published capacities are 32, 16, 95, 32 and 192 GiB a chip.
  Links: the published bidirectional rate of a chip (v5e 400, v5p 1,200, v6e 800, TPU7x 1,200 GB/s)
  over its links and two directions; v4: "TPU v4: An Optically Reconfigurable Supercomputer",
  arXiv:2304.01433 (6 links of 50 GB/s).
  PCIe: https://jax-ml.github.io/scaling-book/tpus (15 GB/s a chip, v6e 32); TPU7x: not published.
  GPUs: NVIDIA data sheets of A100, H100 SXM and H200 SXM, dense, without sparsity.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from farspan.dist.torus import wrapped_axes
from farspan.errors import unknown_choice

_GIB = 2**30
_HOST_SIDE = 2


@dataclass(frozen=True)
class Chip:
    """One kind of accelerator, as one JAX device.

    Attributes:
      name: Short name.
      device_kinds: Values of `jax.Device.device_kind` that mean this chip.
      peak_flops_per_second: Dense bfloat16 matrix FLOP/s of one device.
    """

    name: str
    device_kinds: tuple[str, ...]
    peak_flops_per_second: float


@dataclass(frozen=True)
class TpuChip(Chip):
    """A TPU, whose slices `get_slice` knows.

    Attributes:
      hbm_bytes: High-bandwidth memory of one device that a program may use.
      hbm_bytes_per_second: Rate of that memory, of one device.
      devices_per_chip: JAX devices of one chip.
      cores_per_device: Tensor cores that act as one device.
      torus_dimensions: Dimensions of the network, 2 or 3; a chip has two links in each,
        each with two directions.
      link_bytes_per_second: Rate of one link in one direction.
      chips_per_pod: The largest slice.
      host_bytes_per_chip: Memory of the host, over its chips.
      pcie_bytes_per_second_per_chip: Rate between host and chip in one direction, or None where it
        is not published.
      topology_options: Further arguments of `get_topology_desc` that show devices as the runtime
        shows them on the chips.
    """

    hbm_bytes: int
    hbm_bytes_per_second: float
    devices_per_chip: int
    cores_per_device: int
    torus_dimensions: int
    link_bytes_per_second: float
    chips_per_pod: int
    host_bytes_per_chip: int
    pcie_bytes_per_second_per_chip: float | None
    topology_options: tuple[tuple[str, str], ...] = ()


TPU_CHIPS = (
    TpuChip(
        "v4", ("TPU v4",), 275e12,
        hbm_bytes=int(30.75 * _GIB), hbm_bytes_per_second=1200e9,
        devices_per_chip=1, cores_per_device=2,
        torus_dimensions=3, link_bytes_per_second=50e9, chips_per_pod=4096,
        host_bytes_per_chip=407 * 10**9 // 4, pcie_bytes_per_second_per_chip=15e9,
        topology_options=(("chip_config_name", "megacore"),),
    ),
    TpuChip(
        "v5e", ("TPU v5 lite", "TPU v5e"), 197e12,
        hbm_bytes=int(15.75 * _GIB), hbm_bytes_per_second=819e9,
        devices_per_chip=1, cores_per_device=1,
        torus_dimensions=2, link_bytes_per_second=50e9, chips_per_pod=256,
        host_bytes_per_chip=192 * 10**9 // 4, pcie_bytes_per_second_per_chip=15e9,
    ),
    TpuChip(
        "v5p", ("TPU v5", "TPU v5p"), 459e12,
        hbm_bytes=int(95.73 * _GIB), hbm_bytes_per_second=2765e9,
        devices_per_chip=1, cores_per_device=2,
        torus_dimensions=3, link_bytes_per_second=100e9, chips_per_pod=8960,
        host_bytes_per_chip=448 * _GIB // 4, pcie_bytes_per_second_per_chip=15e9,
    ),
    TpuChip(
        "v6e", ("TPU v6 lite", "TPU v6e"), 918e12,
        hbm_bytes=int(31.24 * _GIB), hbm_bytes_per_second=1638e9,
        devices_per_chip=1, cores_per_device=1,
        torus_dimensions=2, link_bytes_per_second=100e9, chips_per_pod=256,
        host_bytes_per_chip=720 * _GIB // 4, pcie_bytes_per_second_per_chip=32e9,
    ),
    TpuChip(
        "tpu7x", ("TPU7x", "TPU v7x"), 1153.5e12,
        hbm_bytes=int(94.74 * _GIB), hbm_bytes_per_second=3690e9,
        devices_per_chip=2, cores_per_device=1,
        torus_dimensions=3, link_bytes_per_second=100e9, chips_per_pod=9216,
        host_bytes_per_chip=960 * _GIB // 4, pcie_bytes_per_second_per_chip=None,
    ),
)  # fmt: skip

CHIPS: tuple[Chip, ...] = (
    *TPU_CHIPS,
    Chip(
        "a100",
        (
            "NVIDIA A100-SXM4-40GB",
            "NVIDIA A100-SXM4-80GB",
            "NVIDIA A100-PCIE-40GB",
            "NVIDIA A100 80GB PCIe",
        ),
        312e12,
    ),
    Chip("h100", ("NVIDIA H100 80GB HBM3",), 989e12),
    Chip("h200", ("NVIDIA H200",), 989e12),
)


@dataclass(frozen=True)
class Slice:
    """Chips that links join to a box, such as `v5p:4x4x4`.

    Attributes:
      chip: The kind of chip.
      shape: Chips along each dimension of the network.
    """

    chip: TpuChip
    shape: tuple[int, ...]

    @property
    def name(self) -> str:
        """The slice's name, as `get_slice` and `get_topology_desc` take it."""
        return f"{self.chip.name}:{'x'.join(map(str, self.shape))}"

    @property
    def num_chips(self) -> int:
        """Chips of the slice."""
        return math.prod(self.shape)

    @property
    def num_devices(self) -> int:
        """JAX devices of the slice."""
        return self.num_chips * self.chip.devices_per_chip

    @property
    def topology_options(self) -> dict[str, Any]:
        """What `get_topology_desc` is told beside the slice's name."""
        options: dict[str, Any] = dict(self.chip.topology_options)
        wrap = wrapped_axes(self.chip.device_kinds[0], self.shape)
        if any(wrap):
            options["wrap"] = wrap
        host = [min(side, _HOST_SIDE) for side in self.shape[:_HOST_SIDE]]
        if host != [_HOST_SIDE] * 2:  # a slice smaller than a host
            options["chips_per_host_bounds"] = [*host, 1]
        return options

    @property
    def links_per_chip(self) -> int:
        """Links of a chip that lead to others of the slice.

        Two for each dimension, but one where a dimension has two chips, and none where it has one.
        """
        return sum(min(size, 3) - 1 for size in self.shape)


def find_chip(device_kind: str) -> Chip | None:
    """The chip whose JAX devices report `device_kind`, or None when it is not listed."""
    return next((chip for chip in CHIPS if device_kind in chip.device_kinds), None)


def get_slice(name: str) -> Slice:
    """Looks a slice of TPU chips up by its name.

    Args:
      name: Chip and shape in chips, such as `v5p:4x4x4`, `v6e:4x4` or `tpu7x:2x2x1`.

    Returns:
      The slice.

    Raises:
      ValueError: If the chip is not known, or has no slice of that shape.
    """
    chip_name, _, shape_name = name.partition(":")
    chip = _get_chip(chip_name)
    example = "x".join(["4"] * chip.torus_dimensions)
    parts = shape_name.split("x")
    if len(parts) != chip.torus_dimensions or not all(
        re.fullmatch("[1-9][0-9]*", p) for p in parts
    ):
        raise ValueError(
            f"hardware: a slice of {chip.name} is named by {chip.torus_dimensions} dimensions in "
            f"chips, got {name!r}; use for example {chip.name}:{example}"
        )
    found = Slice(chip, tuple(map(int, parts)))
    if found.num_chips > chip.chips_per_pod:
        raise ValueError(
            f"hardware: a slice of {chip.name} has at most {chip.chips_per_pod} chips, got "
            f"{name!r} with {found.num_chips}; use a smaller one, such as {chip.name}:{example}"
        )
    if any(size > 1 and size % _HOST_SIDE for size in found.shape[:_HOST_SIDE]):
        raise ValueError(
            "hardware: the first two dimensions of a slice are 1 or even, as a host has 2 x 2 "
            f"chips, got {name!r}; use for example {chip.name}:{example}"
        )
    return found


def smallest_slice(chip_name: str, num_devices: int) -> Slice:
    """The smallest of the usual slices of a chip that has enough devices.

    Args:
      chip_name: Such as `v5p`.
      num_devices: Devices that are needed.

    Returns:
      A slice whose dimensions are powers of two, as equal as can be: 2x2x1, 2x2x2, 2x2x4, 2x4x4.

    Raises:
      ValueError: If the chip is not known, or no slice of it has as many devices.
    """
    chip = _get_chip(chip_name)
    shape = [1] * chip.torus_dimensions
    while math.prod(shape) * chip.devices_per_chip < num_devices:
        least = min(shape)
        places = [place for place, size in enumerate(shape) if size == least]
        shape[places[0] if least == 1 else places[-1]] *= 2
    found = Slice(chip, tuple(shape))
    if found.num_chips > chip.chips_per_pod:
        raise ValueError(
            f"hardware: a slice of {chip.name} has at most {chip.chips_per_pod} chips, but "
            f"{num_devices} devices need {-(-num_devices // chip.devices_per_chip)}; use smaller "
            "parallel sizes or another chip"
        )
    return found


def _get_chip(name: str) -> TpuChip:
    chip = next((chip for chip in TPU_CHIPS if chip.name == name.lower()), None)
    if chip is None:
        raise unknown_choice("hardware: chip", name, [chip.name for chip in TPU_CHIPS])
    return chip
