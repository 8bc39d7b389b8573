"""Kernels: how is one block of attention computed on one device?"""

import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from farspan.errors import unknown_choice
from farspan.kernels.base import Kernel, Scores
from farspan.kernels.dropout import Dropout
from farspan.kernels.reference import ReferenceKernel
from farspan.kernels.splash import SplashKernel
from farspan.kernels.tpu import chip_of_program
from farspan.kernels.xla import XlaKernel

KERNELS: dict[str, Kernel] = {
    kernel.name: kernel for kernel in (ReferenceKernel(), XlaKernel(), SplashKernel())
}


def get_kernel(
    kernel: str | Kernel, dtype: DTypeLike = jnp.bfloat16, mesh: Mesh | None = None
) -> Kernel:
    """Looks a kernel up.

    Args:
      kernel: A name in `KERNELS`, `"auto"` (the fastest for the devices and the dtype: `splash` on
        TPU, else `xla`), or a kernel, such as `XlaKernel(rows=512)`.
      dtype: Of queries, keys and values.
      mesh: The devices; by default those that the program is traced for.

    Raises:
      ValueError: If the name is unknown.
    """
    if not isinstance(kernel, str):
        return kernel
    if kernel == "auto":
        on_tpu = chip_of_program(mesh) is not None
        return KERNELS["splash" if on_tpu and SplashKernel.takes(dtype) else "xla"]
    if kernel not in KERNELS:
        raise unknown_choice("kernel", kernel, [*KERNELS, "auto"])
    return KERNELS[kernel]


__all__ = [
    "KERNELS",
    "Dropout",
    "Kernel",
    "ReferenceKernel",
    "Scores",
    "SplashKernel",
    "XlaKernel",
    "get_kernel",
]
