"""The parts of a run: what each stage changes, and from which step on."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from typing import Any

from farspan.train.config import MAX_SEEDS, TrainConfig, device_count, validate

_SECTIONS = ("model", "data", "parallel")


@dataclass(frozen=True)
class Part:
    """Steps of a run that use one configuration.

    Attributes:
      start: Optimizer steps done when it begins.
      stop: Optimizer steps done when it ends.
      config: The run with this part's settings and no stages; `steps` is still that of the whole
        run, which shapes the schedule of the learning rate.
    """

    start: int
    stop: int
    config: TrainConfig


def split_into_parts(config: TrainConfig) -> tuple[Part, ...]:
    """Resolves the stages of a run.

    The order of the data in each part is drawn anew.

    Args:
      config: The run.

    Returns:
      Its parts in order; the first is the run without stages. Stages that begin at or after
      `config.steps` are left out.

    Raises:
      ValueError: The stages are not in order, or a part's configuration is out of range.
    """
    starts = [0, *(stage.from_step for stage in config.stages)]
    if any(a >= b for a, b in itertools.pairwise(starts)):
        raise ValueError(
            "stages must begin one after another, the first after step 1 or later, got from_step="
            f"{', '.join(map(str, starts[1:]))}; put them in order"
        )
    current = dataclasses.replace(config, stages=())
    resolved = [current]
    for index, stage in enumerate(config.stages, start=1):
        changes = dataclasses.asdict(stage)
        del changes["from_step"]
        changes = {name: value for name, value in changes.items() if value is not None}
        if not changes:
            raise ValueError(
                f"a stage must change something, got from_step={stage.from_step} alone; add for "
                "example seq_len=65536"
            )
        current = _with_fields(current, changes)
        resolved.append(dataclasses.replace(current, seed=(config.seed + index) % MAX_SEEDS))
    stops = [*starts[1:], config.steps]
    parts = tuple(
        Part(start, min(stop, config.steps), part)
        for start, stop, part in zip(starts, stops, resolved, strict=True)
        if start < config.steps
    )
    for part in parts:
        validate(part.config)
    return parts


def most_devices(config: TrainConfig) -> int:
    """Devices that the largest part of a run needs."""
    return max(device_count(part.config) for part in split_into_parts(config))


def _with_fields(config: TrainConfig, changes: dict[str, Any]) -> TrainConfig:
    """Sets fields by name, in whichever section has them; names are unique."""
    changed: dict[str, Any] = {}
    rest = dict(changes)
    for section in _SECTIONS:
        part = getattr(config, section)
        names = {field.name for field in dataclasses.fields(part)} & rest.keys()
        if names:
            changed[section] = dataclasses.replace(part, **{name: rest.pop(name) for name in names})
    return dataclasses.replace(config, **changed, **rest)
