"""Rates of the chips that JAX runs on.

The peak is the dense bfloat16 matrix rate per JAX device, as its vendor states it. Most TPU
generations show one device per chip; TPU7x shows its two cores as two devices, so its entry is half
of a chip. The reported `device_kind` decides: cards that share a family name but not a rate (H100
PCIe and H100 SXM) are told apart, and a kind that is not listed has no peak.

Source: Google Cloud, "TPU versions" (v4 275, v5e 197, v5p 459, v6e 918, TPU7x 2,307 TFLOP/s per
chip); NVIDIA data sheets of A100 (312), H100 SXM (989) and H200 SXM (989), dense, without sparsity.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Chip:
    """One kind of accelerator, as one JAX device.

    Attributes:
        name: short name.
        device_kinds: values of `jax.Device.device_kind` that mean this chip.
        peak_flops_per_second: dense bfloat16 matrix FLOP/s of one device.
    """

    name: str
    device_kinds: tuple[str, ...]
    peak_flops_per_second: float


CHIPS = (
    Chip("v4", ("TPU v4",), 275e12),
    Chip("v5e", ("TPU v5 lite", "TPU v5e"), 197e12),
    Chip("v5p", ("TPU v5", "TPU v5p"), 459e12),
    Chip("v6e", ("TPU v6 lite", "TPU v6e"), 918e12),
    Chip("tpu7x", ("TPU7x", "TPU v7x"), 1153.5e12),
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


def find_chip(device_kind: str) -> Chip | None:
    """The chip whose JAX devices report `device_kind`, or None when it is not listed."""
    return next((chip for chip in CHIPS if device_kind in chip.device_kinds), None)
