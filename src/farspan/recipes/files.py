"""A run described by a JSON file, such as the config.json that each run folder holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

from farspan.train.config import TrainConfig
from farspan.train.decode import decode


def load_config(path: Path) -> TrainConfig:
    """Reads the configuration of a run.

    Args:
      path: A JSON file of the form of a run folder's config.json. What it leaves out takes the
        default of `TrainConfig`, not that of any recipe. Its run_dir counts as well.

    Returns:
      The configuration; its types are checked, its ranges are not.

    Raises:
      ValueError: The file is no such JSON; the message names the field and the nearest right name.
      OSError: It cannot be read.
    """
    if not path.is_file():
        raise FileNotFoundError(
            f"a configuration must be an existing file, got {path}; name the config.json of a run "
            "folder, or a recipe"
        )
    try:
        values = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse)
    except ValueError as error:
        raise ValueError(
            f"{path} must be a JSON file, got {error}; use the config.json of a run folder"
        ) from error
    if not isinstance(values, dict) or "model" not in values:
        found = ", ".join(cast("dict[str, Any]", values)) if isinstance(values, dict) else ""
        raise ValueError(
            f"{path} must describe a run, with a model, got "
            f"{found or type(values).__name__}; use the config.json of a run folder"
        )
    return decode(TrainConfig, cast("dict[str, Any]", values), str(path))


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant}, which is not a finite number")
