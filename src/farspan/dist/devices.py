"""Virtual CPU devices for machines without an accelerator."""

from __future__ import annotations

import contextlib

import jax

from farspan.dist.processes import current_group
from farspan.platform import skip_absent_tpu


def ensure_devices(count: int) -> None:
    """Makes `count` devices available to the run. Call before anything asks JAX for a device.

    On a machine without an accelerator the CPU is split into virtual devices, of which each process
    of the run makes its share; accelerators are left as they are.

    Args:
      count: Devices needed by all processes together, at least 1.

    Raises:
      ValueError: If there are fewer devices than `count`, or if several processes cannot share them
        evenly or would not use all of them.
    """
    skip_absent_tpu()
    processes = current_group().count
    share = -(-count // processes)
    with contextlib.suppress(RuntimeError):  # JAX has started: its devices are what there is
        jax.config.update("jax_num_cpu_devices", max(share, jax.config.jax_num_cpu_devices or 1))
    available = jax.devices()
    platform = available[0].platform
    if processes > 1 and platform == "cpu" and count % processes:
        raise ValueError(
            f"processes must divide the devices of the parallel sizes, got {processes} "
            f"processes and {count} devices; start {_nearest_divisor(count, processes)}"
        )
    if len(available) < count:
        raise ValueError(
            f"parallel sizes need {count} devices, but there are {len(available)} "
            f"({platform}); use smaller sizes or more devices"
        )
    if processes > 1 and len(available) > count:
        raise ValueError(
            f"parallel sizes must use the devices of all {processes} processes, got sizes for "
            f"{count} of {len(available)} ({platform}); use larger sizes, for example "
            f"--data-parallel-size, or fewer processes"
        )


def _nearest_divisor(count: int, wanted: int) -> int:
    return min((d for d in range(1, count + 1) if count % d == 0), key=lambda d: abs(d - wanted))
