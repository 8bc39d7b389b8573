"""Which Python holds which peer: their versions of Python and of jax need not be ours."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterable, Sequence

_PACKAGES = ("farspan", "jax", "jaxlib", "numpy", "torch", "tokamax", "ringattention")

_PROBE = """
import importlib.metadata, importlib.util, json, platform, sys
versions = {}
for name in sys.argv[1:]:
    if importlib.util.find_spec(name) is None:
        continue
    try:
        versions[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:  # found on PYTHONPATH
        versions[name] = "source"
print(json.dumps({"python": platform.python_version(), **versions}))
"""


@dataclasses.dataclass(frozen=True)
class Interpreter:
    """A Python, and the versions of the packages it holds (and its own, as `python`)."""

    path: str
    versions: dict[str, str]

    def lacks(self, needs: Iterable[str]) -> list[str]:
        """Those of `needs` that it does not hold."""
        return [name for name in needs if name not in self.versions]


def find_interpreters(others: Sequence[str]) -> list[Interpreter]:
    """This interpreter, then others.

    Raises:
      ValueError: If one of the others does not run.
    """
    return [_probe(path) for path in (sys.executable, *others)]


def merged_versions(interpreters: Sequence[Interpreter]) -> dict[str, str]:
    """Version of each package in the first interpreter that holds it."""
    merged: dict[str, str] = {}
    for interpreter in reversed(interpreters):
        merged |= interpreter.versions
    return merged


def _probe(path: str) -> Interpreter:
    command = [path, "-c", _PROBE, *_PACKAGES]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        why = str(getattr(error, "stderr", None) or error).strip().splitlines()[-1]
        raise ValueError(
            f"--peer-python must name a Python that runs, got {path}: {why}"
        ) from error
    return Interpreter(path, json.loads(done.stdout))
