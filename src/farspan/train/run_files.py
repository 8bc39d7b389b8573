"""Files of a run folder that hold one JSON object a line: their names, and reading them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

METRICS_FILE = "metrics.jsonl"
EVALUATIONS_FILE = "eval.jsonl"
LAUNCHES_FILE = "launches.jsonl"


def read_objects(path: Path) -> Iterator[tuple[dict[str, Any], str]]:
    """The complete objects of a file, in order, each with its line; none when there is no file.

    A line that a crash cut short is left out.
    """
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                found = json.loads(line)
            except ValueError:
                continue
            if line.endswith("\n") and isinstance(found, dict):
                yield cast("dict[str, Any]", found), line
