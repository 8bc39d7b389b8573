"""This machine: a quiet start of JAX where no TPU is, and which folders may be written.

Where libtpu is installed, say for `farspan plan --compile`, JAX looks for TPUs at its start, and
without one libtpu prints pages of errors before the CPU is used after all.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
from pathlib import Path

_GOOGLE_PCI_VENDOR = "0x1ae0"
_STORAGE_AND_NETWORK = ("0x01", "0x02")
_NVIDIA_DEVICES = ("dev/nvidiactl", "dev/nvidia0", "dev/dxg")
_CUDA_PLUGIN = "xla_cuda"


def skip_absent_tpu() -> None:
    """Tells JAX which platforms to try where libtpu is installed and no TPU is here.

    Call it before JAX starts its devices. What the user says by JAX_PLATFORMS or
    `jax.config` holds.
    """
    if os.environ.get("JAX_PLATFORMS") or "JAX_FORCE_TPU_INIT" in os.environ:
        return
    if importlib.util.find_spec("libtpu") is None:
        return
    platforms = _platforms(Path("/"))
    if platforms is None:
        return
    if "jax" in sys.modules:
        import jax

        if not jax.config.jax_platforms:
            jax.config.update("jax_platforms", platforms)
    else:
        os.environ["JAX_PLATFORMS"] = platforms


def _platforms(root: Path) -> str | None:
    """The platforms that JAX may find; None if they include a TPU or one unknown to farspan."""
    if _tpu_is_here(root):
        return None
    plugins = importlib.metadata.entry_points(group="jax_plugins").names
    if not all(name.startswith(_CUDA_PLUGIN) for name in plugins):
        return None
    gpu_is_here = any((root / device).exists() for device in _NVIDIA_DEVICES)
    return "cuda,cpu" if plugins and gpu_is_here else "cpu"


def _tpu_is_here(root: Path) -> bool:
    if any(root.glob("dev/accel*")):
        return True
    return any(
        _read(device / "vendor") == _GOOGLE_PCI_VENDOR
        and not _read(device / "class").startswith(_STORAGE_AND_NETWORK)  # of a virtual machine
        for device in root.glob("sys/bus/pci/devices/*")
    )


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def is_url(name: str) -> bool:
    """Tells a URL (`gs://bucket/folder`) from a path."""
    return "://" in name


def folder_to_write(path: str, setting: str) -> Path:
    """The folder that a setting names, for files that are appended to, renamed or mapped.

    Args:
      path: Its path, in which `~` is the home folder.
      setting: What the user set, for the message.

    Raises:
      ValueError: It is a URL: as a path, its files would lie in a local folder of that name.
    """
    if is_url(path):
        raise ValueError(
            f"{setting} must be a folder of a mounted file system, got the URL {path!r}; use a "
            "path, on a file system that all hosts share where there are several"
        )
    return Path(path).expanduser()


def user_cache_dir(kind: str) -> Path:
    """The folder in which this user's runs keep what takes long to make.

    Args:
      kind: What is kept: "tokens" of data, "aot" for what the TPU compiler said.

    Returns:
      A folder in $FARSPAN_CACHE_DIR, or in `farspan` in the user's cache folder; it may not exist.

    Raises:
      ValueError: $FARSPAN_CACHE_DIR is a URL.
    """
    if chosen := os.environ.get("FARSPAN_CACHE_DIR"):
        return folder_to_write(chosen, "FARSPAN_CACHE_DIR") / kind
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "farspan" / kind
