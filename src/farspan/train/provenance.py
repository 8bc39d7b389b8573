"""What a run folder says about its origin: the configuration, and one line per launch."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import socket
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import jax

from farspan.train.config import TrainConfig, to_dict
from farspan.train.run_files import LAUNCHES_FILE, read_objects

CONFIG_FILE = "config.json"
_PACKAGES = (
    *("farspan", "jax", "jaxlib", "libtpu", "numpy", "optax", "orbax-checkpoint", "grain"),
    *("tensorboardX", "tokenizers", "pyarrow", "sentencepiece"),
)
_GIT_SECONDS = 10


def write_config(run_dir: Path, config: TrainConfig) -> None:
    """Writes `config.json`. Call it when all is well: it replaces that of an earlier launch.

    Args:
      run_dir: Folder of the run; it exists.
      config: The run.
    """
    _replace(run_dir / CONFIG_FILE, json.dumps(to_dict(config), indent=2) + "\n")


def write_launch(run_dir: Path, *, start_step: int, started: float, found: str) -> None:
    """Adds this launch to `launches.jsonl`.

    Args:
      run_dir: Folder of the run; it exists.
      start_step: Steps done before this launch.
      started: When the launch began, in seconds since 1970; from the first one on, goodput counts.
      found: The environment that started the processes, in words.
    """
    devices = jax.devices()
    launch = {
        "time": datetime.fromtimestamp(started).astimezone().isoformat(timespec="milliseconds"),
        "command": sys.argv,
        "start_step": start_step,
        "git_commit": _git_commit(),
        "hostname": socket.gethostname(),
        "environment": found,
        "num_processes": jax.process_count(),
        "python": platform.python_version(),
        "versions": {name: version for name in _PACKAGES if (version := _version(name))},
        "platform": devices[0].platform,
        "device_kind": devices[0].device_kind,
        "num_devices": len(devices),
    }
    launches = run_dir / LAUNCHES_FILE
    before = [line for _, line in read_objects(launches)]  # but for one that a crash cut short
    _replace(launches, "".join([*before, json.dumps(launch) + "\n"]))


def _replace(path: Path, text: str) -> None:
    unfinished = path.with_name(path.name + ".tmp")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git_commit() -> str | None:
    """The commit of the working folder, with `-dirty` where files differ; None outside of git."""
    command = [
        "git",
        "--no-optional-locks",
        "describe",
        "--always",
        "--dirty",
        "--abbrev=40",
        "--exclude=*",
    ]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=_GIT_SECONDS
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
