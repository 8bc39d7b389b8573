"""Which TPU a program is made for, and the block sizes that suit it."""

from __future__ import annotations

import dataclasses

import jax
from jax.sharding import Mesh, get_abstract_mesh

LANES = 128
"""Numbers of 32 bits in a row of a vector register: blocks are multiples of it."""


def chip_of_program(mesh: Mesh | None = None) -> str | None:
    """The kind of TPU that the program being traced is for, such as `TPU v5p`; None: no TPU.

    That of the mesh, or of the one in force, so that a program for chips that are not here is
    traced for them; without one, that of the default device.
    """
    if mesh is not None:
        first = mesh.devices.flat[0]
        return first.device_kind if first.platform == "tpu" else None
    device = getattr(get_abstract_mesh(), "abstract_device", None)
    if device is None:
        default = jax.config.jax_default_device
        first = jax.devices()[0] if default is None or isinstance(default, str) else default
        return first.device_kind if first.platform == "tpu" else None
    return device.device_kind if "TPU" in device.device_kind else None


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Block sizes of the TPU kernel.

    Attributes:
      query, key: Queries and keys per block, at most.
      chunk: Queries whose scores are worked on at once.
    """

    query: int
    key: int
    chunk: int


_BLOCKS = {
    "TPU v4": Blocks(512, 512, 512),  # 16 MiB of vector memory
    "TPU v6 lite": Blocks(2048, 1024, 512),
    "TPU7x": Blocks(2048, 1024, 512),
}
_OTHERS = Blocks(1024, 1024, 512)


def default_blocks(chip: str | None) -> Blocks:
    """The blocks that take the fewest bundles per pair by the compiler's static figures.

    From `benchmarks/kernel_cycles.py`, for head dims 64, 128 and 256, forward and backward; the
    table is in docs/performance.md. Where matrix units are fast beside the rest of a step, longer
    blocks pay.
    """
    return _BLOCKS.get(chip or "", _OTHERS)


def fitting_block(length: int, most: int) -> int:
    """The largest of `most`, its half, its quarter and so on that pads a length by little.

    Args:
      length: Tokens.
      most: Tokens per block, at most; a multiple of 128.

    Returns:
      A multiple of 128 that pads the length by an eighth of it at most, or to the next multiple of
      128.
    """
    whole = -(-length // LANES) * LANES
    if whole <= most:
        return whole
    block = most
    while block % (2 * LANES) == 0 and -length % block > length // 8:
        block //= 2
    return block if -length % block <= length // 8 else LANES
