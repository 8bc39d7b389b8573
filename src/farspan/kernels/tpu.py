"""Which TPU a program is made for, and the block sizes that suit it."""

from __future__ import annotations

import jax
from jax.sharding import get_abstract_mesh


def chip_of_program() -> str | None:
    """The kind of TPU that the program being traced is for, such as `TPU v5p`; None: no TPU.

    That of the mesh in force, so that a program for chips that are not here is traced for them;
    without one, that of the default device.
    """
    device = getattr(get_abstract_mesh(), "abstract_device", None)
    if device is None:
        default = jax.config.jax_default_device
        first = jax.devices()[0] if default is None or isinstance(default, str) else default
        return first.device_kind if first.platform == "tpu" else None
    return device.device_kind if "TPU" in device.device_kind else None


def default_blocks(chip: str | None, head_dim: int, *, backward: bool) -> tuple[int, int, int]:
    """Queries and keys per block, and queries per chunk."""
    del chip, head_dim, backward
    return 1024, 1024, 512
