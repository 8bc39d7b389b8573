"""What a run folder says about its origin: the configuration, and one line per launch."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import sys
import time
from pathlib import Path

import jax

from farspan.train.config import TrainConfig, to_dict

CONFIG_FILE = "config.json"
LAUNCHES_FILE = "launches.jsonl"
_PACKAGES = ("farspan", "jax", "jaxlib", "libtpu", "numpy", "optax", "orbax-checkpoint", "grain")


def write_launch(run_dir: Path, config: TrainConfig, start_step: int) -> None:
    """Writes `config.json`, and appends this launch to `launches.jsonl`.

    Args:
      run_dir: Folder of the run; it exists.
      config: The run; it replaces the configuration of an earlier launch.
      start_step: Steps done before this launch.
    """
    unfinished = run_dir / (CONFIG_FILE + ".tmp")
    unfinished.write_text(json.dumps(to_dict(config), indent=2) + "\n", encoding="utf-8")
    unfinished.replace(run_dir / CONFIG_FILE)
    devices = jax.devices()
    launch = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": sys.argv,
        "start_step": start_step,
        "python": platform.python_version(),
        "versions": {name: version for name in _PACKAGES if (version := _version(name))},
        "platform": devices[0].platform,
        "device_kind": devices[0].device_kind,
        "num_devices": len(devices),
    }
    with (run_dir / LAUNCHES_FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps(launch) + "\n")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
