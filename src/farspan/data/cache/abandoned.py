"""Names of folders under construction, and removal of those whose builder was killed."""

import hashlib
import os
import platform
import shutil
import time
from pathlib import Path

_PREFIX = "building"
_DAY_SECONDS = 24 * 60 * 60


def building_name(unique: str) -> str:
    """Returns the name of a folder under construction, which tells who builds it.

    Args:
      unique: Letters and digits that tell this one from others of the same process.
    """
    return f"{_PREFIX}-{_machine()}-{os.getpid()}-{unique}"


def remove_abandoned(root: Path) -> None:
    """Removes folders whose builder, on this machine, has died, or that nobody wrote for a day.

    Args:
      root: The folder that holds them.
    """
    for folder in root.glob(f"{_PREFIX}-*-*-*"):
        _, machine, process, _ = folder.name.rsplit("-", 3)
        dead = machine == _machine() and process.isdecimal() and not _is_alive(int(process))
        if dead or time.time() - _last_written(folder) > _DAY_SECONDS:
            shutil.rmtree(folder, ignore_errors=True)


def _machine() -> str:
    """The machine, and the container on it: both decide what a process number means."""
    try:
        space = str(Path("/proc/self/ns/pid").readlink())
    except OSError:  # no Linux, or no /proc
        space = ""
    return hashlib.blake2b((platform.node() + space).encode(), digest_size=8).hexdigest()


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # alive, but not ours
        return True
    return True


def _last_written(folder: Path) -> float:
    try:
        return max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
    except OSError:  # its builder published or removed it just now
        return time.time()
