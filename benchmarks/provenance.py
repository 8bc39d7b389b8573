"""What a figure came from: the commit of this checkout, and the versions of what was run."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peers.interpreters import Interpreter, find_interpreters, merged_versions


def provenance(interpreters: Sequence[Interpreter] | None = None) -> dict[str, Any]:
    """Finds `commit` and `versions`. Call it before a long run, in which files may change.

    Args:
      interpreters: The Pythons that take part; by default this one.
    """
    if interpreters is None:
        interpreters = find_interpreters([])
    return {"commit": _commit(), "versions": merged_versions(interpreters)}


def headline(found: dict[str, Any]) -> str:
    """Commit and versions on one line, from what holds the result of `provenance`."""
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    return f"commit {found['commit']}; {versions}"


def _commit() -> str | None:
    """The commit of this checkout, `+` behind it if files differ; None outside one."""
    command = ["git", "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"]
    try:
        done = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
