"""Whether a run fits, before anything is allocated."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import jax

from farspan.plan.hardware import TpuChip, find_chip
from farspan.plan.memory import binary_size
from farspan.plan.workload import AttentionLayers, NoDevice, Workload, shard_bytes
from farspan.train.config import TrainConfig, device_count
from farspan.train.optimizer import moment_dtypes, update_cost
from farspan.train.parallel import layer_kinds, make_context
from farspan.train.step import TrainSetup

_MEMINFO = Path("/proc/meminfo")


def make_workload(config: TrainConfig, document_tokens: int = 0) -> Workload:
    """Describes one step of a run to the planner; needs no devices.

    Args:
      config: The run.
      document_tokens: As in `Workload`.

    Returns:
      The step, on a mesh without devices.

    Raises:
      ValueError: If the combination of sizes is not possible.
    """
    model, optimizer = config.model, config.optimizer
    places = [NoDevice(place) for place in range(device_count(config))]
    context = make_context(config.parallel, model, places)
    multiple = context.sequence_multiple

    def kept_dtypes(axes: tuple[str, ...]) -> tuple[str, ...]:
        mean = ("float32",) if optimizer.ema_decay else ()
        return moment_dtypes(optimizer, model.param_dtype, axes) + mean

    return Workload(
        model=model,
        context=context,
        attention=tuple(
            AttentionLayers(kind.mask, kind.context, kind.layers)
            for kind in layer_kinds(model, context).values()
        ),
        seq_len=-(-config.data.seq_len // multiple) * multiple,
        rows=config.batch_size,
        accumulation=config.gradient_accumulation_steps,
        kept_dtypes=kept_dtypes,
        update_cost=functools.partial(update_cost, optimizer, model.param_dtype),
        document_tokens=document_tokens,
    )


def check_state_fits(setup: TrainSetup) -> None:
    """Refuses a run whose parameters and optimizer state alone exceed the memory at hand.

    Args:
      setup: The run's set-up; nothing of it is allocated yet.

    Raises:
      ValueError: If they do.
    """
    leaves: list[Any] = jax.tree.leaves(setup.abstract_state())
    needed = shard_bytes(leaves, [leaf.sharding.spec for leaf in leaves], setup.mesh)
    devices = setup.mesh.devices
    device = devices.flat[0]
    if device.platform == "cpu":
        needed *= devices.size
        available, where = host_bytes_available(), "of this machine, which all devices share, are"
    else:
        available, where = device_bytes(device), f"of each device ({device.device_kind}) are"
    if available is None or needed <= available:
        return
    raise ValueError(
        f"parameters and optimizer state must fit in memory, got {setup.num_params:,} parameters "
        f"with {binary_size(needed)} of state, where {binary_size(available)} {where} available; "
        "use a smaller model or more devices (`farspan plan` says what fits)"
    )


def device_bytes(device: Any) -> int | None:
    """Memory of an accelerator that a program may use; None where it is not known."""
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        return int(stats["bytes_limit"])
    chip = find_chip(device.device_kind)
    return chip.hbm_bytes if isinstance(chip, TpuChip) else None


def host_bytes_available() -> int | None:
    """Memory of this machine that is free or can be freed.

    Where only its whole memory is known, that; None where not even that is.
    """
    if _MEMINFO.exists():
        for line in _MEMINFO.read_text().splitlines():
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                return int(value.split()[0]) * 1024
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None
