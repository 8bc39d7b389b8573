"""The training step as a program for `farspan.plan.aot`: compiled for devices that are not here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from farspan.train.config import from_dict, validate
from farspan.train.step import build_setup


def lower_train_step(devices: Sequence[Any], *, config: Mapping[str, Any]) -> jax.stages.Lowered:
    """Lowers the step that a run would take, without its state.

    Args:
      devices: Devices to choose from, in any order.
      config: The run, as `farspan.train.config.to_dict` writes it.

    Returns:
      The lowered step.

    Raises:
      ValueError: If the configuration does not fit itself, or the devices are too few.
    """
    run = from_dict(config)
    validate(run)
    setup = build_setup(run, devices)
    # Kernels ask the mesh in force for which chip they are.
    with jax.sharding.use_abstract_mesh(setup.mesh.abstract_mesh):
        return setup.lower_step()
