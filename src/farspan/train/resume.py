"""May a run go on from a checkpoint that another configuration wrote?"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from farspan.train.config import TrainConfig, flatten, from_dict, to_dict
from farspan.train.stages import Part, split_into_parts

_FREE_SECTIONS = ("parallel", "optimizer")
_FREE = frozenset({"steps", "kernel", "gradient_accumulation_steps", "remat_policy", "eval_data"})
# What these name is compared by content when the loader goes on, wherever it lies by now.
_COMPARED_BY_LOADER = frozenset({"data", "tokenizer", "chat_template"})
_UNSEEN = frozenset(
    {
        *("run_dir", "checkpoint_every", "keep_checkpoints", "log_every", "eval_every"),
        *("profile", "wandb_project", "cache_dir"),
    }
)


def check_resumable(
    saved: dict[str, Any], config: TrainConfig, done: int, run_dir: Path
) -> list[str]:
    """Compares the configuration of a checkpoint with that of the run that would go on from it.

    The model, the data, the seed and the batch must be the same in the part of the run that wrote
    the checkpoint: they decide which loss the run computes. How the work is split over devices may
    change. Optimizer settings, the number of steps and later stages may change, too, and act from
    the resumed step on.

    Args:
      saved: The configuration in the checkpoint, as nested dictionaries.
      config: The configuration of this run.
      done: Optimizer steps in the checkpoint, at least 1.
      run_dir: Folder of the run, for the message.

    Returns:
      The changes that are allowed but worth saying, such as `steps: 100 -> 200`.

    Raises:
      ValueError: Something that must stay the same differs.
    """
    saved_config = from_dict(saved, f"resume: the configuration in {run_dir}")
    current = to_dict(config)
    free = _FREE.union(_COMPARED_BY_LOADER, *(current[section] for section in _FREE_SECTIONS))
    before, now = (_flat(part_of_step(c, done)) for c in (saved_config, config))
    changed = [name for name in now if before[name] != now[name] and name not in _UNSEEN]
    refused = [name for name in changed if name not in free]
    if refused:
        values = "; ".join(f"{name}: {before[name]!r} then, {now[name]!r} now" for name in refused)
        raise ValueError(
            "resume: model, data, seed and batch must be those of the checkpoint in "
            f"{run_dir}, got {values}; restore them, or use another --run-dir for a new run"
        )
    return [f"{name}: {before[name]} -> {now[name]}" for name in changed]


def part_of_step(config: TrainConfig, step: int) -> Part:
    """The part of a run to which an optimizer step, counted from 1, belongs."""
    longer = dataclasses.replace(config, steps=max(config.steps, step))
    return next(part for part in split_into_parts(longer) if step <= part.stop)


def _flat(part: Part) -> dict[str, Any]:
    return flatten(to_dict(part.config))
