"""Kernels: how is one block of attention computed on one device?"""

from farspan.errors import unknown_choice
from farspan.kernels.base import Kernel, Scores
from farspan.kernels.dropout import Dropout
from farspan.kernels.reference import ReferenceKernel
from farspan.kernels.splash import SplashKernel
from farspan.kernels.xla import XlaKernel

KERNELS: dict[str, Kernel] = {
    kernel.name: kernel for kernel in (ReferenceKernel(), XlaKernel(), SplashKernel())
}


def get_kernel(kernel: str | Kernel) -> Kernel:
    """Looks a kernel up.

    Args:
      kernel: A name in `KERNELS`, `"auto"` (the fastest that runs everywhere: `xla`), or a kernel,
        such as `XlaKernel(rows=512)`.

    Raises:
      ValueError: If the name is unknown.
    """
    if not isinstance(kernel, str):
        return kernel
    if kernel == "auto":
        return KERNELS["xla"]
    if kernel not in KERNELS:
        raise unknown_choice("kernel", kernel, [*KERNELS, "auto"])
    return KERNELS[kernel]


__all__ = ["KERNELS", "Dropout", "Kernel", "ReferenceKernel", "Scores", "XlaKernel", "get_kernel"]
