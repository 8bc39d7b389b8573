"""May a run go on from a checkpoint that another configuration wrote?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from farspan.train.config import TrainConfig, flatten, to_dict

_FREE_SECTIONS = ("parallel", "optimizer")
_FREE = frozenset({"steps", "kernel", "gradient_accumulation_steps", "remat_policy"})
_UNSEEN = frozenset({"run_dir", "checkpoint_every", "keep_checkpoints", "log_every"})


def check_resumable(saved: dict[str, Any], config: TrainConfig, run_dir: Path) -> list[str]:
    """Compares the configuration of a checkpoint with that of the run that would go on from it.

    The model, the data, the seed and the batch must be the same: they decide which loss the run
    computes. How the work is split over devices may change. Optimizer settings and the number of
    steps may change, too, and act from the resumed step on.

    Args:
      saved: The configuration in the checkpoint, as nested dictionaries.
      config: The configuration of this run.
      run_dir: Folder of the run, for the message.

    Returns:
      The changes that are allowed but worth saying, such as `steps: 100 -> 200`.

    Raises:
      ValueError: Something that must stay the same differs.
    """
    current = to_dict(config)
    free = _FREE.union(*(current[section] for section in _FREE_SECTIONS))
    before, now = flatten(saved), flatten(current)
    changed = [
        name for name in now if name in before and before[name] != now[name] and name not in _UNSEEN
    ]
    refused = [name for name in changed if name not in free]
    if refused:
        values = "; ".join(f"{name}: {before[name]!r} then, {now[name]!r} now" for name in refused)
        raise ValueError(
            "resume: model, data, seed and batch must be those of the checkpoint in "
            f"{run_dir}, got {values}; restore them, or use another --run-dir for a new run"
        )
    return [f"{name}: {before[name]} -> {now[name]}" for name in changed]
