"""Virtual CPU devices for machines without an accelerator."""

from __future__ import annotations

import contextlib

import jax

from farspan.platform import skip_absent_tpu


def ensure_devices(count: int) -> None:
    """Makes at least `count` devices available. Call before anything asks JAX for a device.

    On a machine without an accelerator the CPU is split into `count` virtual devices; accelerators
    are left as they are.

    Args:
      count: Devices needed, at least 1.

    Raises:
      ValueError: If there are fewer devices than `count`.
    """
    skip_absent_tpu()
    with contextlib.suppress(RuntimeError):  # JAX has started: its devices are what there is
        jax.config.update("jax_num_cpu_devices", max(count, jax.config.jax_num_cpu_devices or 1))
    available = jax.devices()
    if len(available) < count:
        raise ValueError(
            f"parallel sizes need {count} devices, but there are {len(available)} "
            f"({available[0].platform}); use smaller sizes or more devices"
        )
