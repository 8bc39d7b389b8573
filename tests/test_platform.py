"""A start without a TPU is quiet where libtpu is installed, and what is there is still used."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from farspan import platform

DEVICES = "import jax\nprint(jax.devices()[0].platform)\n"
STARTS = {
    "a command": "from farspan.cli.main import main\nmain(['--version'])\n" + DEVICES,
    "the library": "from farspan.dist import ensure_devices\nensure_devices(2)\n" + DEVICES,
    "a mesh": "import jax, farspan\nfarspan.make_mesh(cp_ring=1)\n" + DEVICES,
    "the library, after jax": "import jax\nfrom farspan.dist import ensure_devices\n"
    "ensure_devices(2)\n" + DEVICES,
}


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
@pytest.mark.parametrize("start", STARTS)
def test_a_start_on_cpu_is_quiet(start: str) -> None:
    if platform._platforms(Path("/")) != "cpu":
        pytest.skip("this machine has an accelerator")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "TPU_"))}
    done = subprocess.run(
        [sys.executable, "-c", STARTS[start]],
        capture_output=True, text=True, check=True, timeout=60, env=environment,
    )  # fmt: skip
    assert done.stdout.splitlines()[-1] == "cpu"
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("vendor", "kind", "expected"),
    [
        ("0x1ae0", "0xff0000", None),
        ("0x1ae0", "0x120000", None),
        ("0x1ae0", "0x020000", "cpu"),  # Google's network card
        ("0x1ae0", "0x010802", "cpu"),  # Google's disk
        ("0x8086", "0x120000", "cpu"),
    ],
)
def test_a_tpu_is_known_by_its_pci_device(
    vendor: str, kind: str, expected: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _set_plugins(monkeypatch)
    device = tmp_path / "sys/bus/pci/devices/0000:00:04.0"
    device.mkdir(parents=True)
    (device / "vendor").write_text(vendor + "\n")
    (device / "class").write_text(kind + "\n")
    assert platform._platforms(tmp_path) == expected


def test_a_tpu_is_known_by_its_device_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _set_plugins(monkeypatch)
    assert platform._platforms(tmp_path) == "cpu"
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/accel0").touch()
    assert platform._platforms(tmp_path) is None


@pytest.mark.parametrize(
    ("plugins", "gpu", "expected"),
    [
        (["xla_cuda13"], True, "cuda,cpu"),
        (["xla_cuda13"], False, "cpu"),
        ([], True, "cpu"),
        (["another"], False, None),
    ],
)
def test_other_accelerators_are_left_in(
    plugins: list[str],
    gpu: bool,
    expected: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _set_plugins(monkeypatch, *plugins)
    if gpu:
        (tmp_path / "dev").mkdir()
        (tmp_path / "dev/nvidiactl").touch()
    assert platform._platforms(tmp_path) == expected


@pytest.mark.parametrize("variable", ["JAX_PLATFORMS", "JAX_FORCE_TPU_INIT"])
def test_what_the_user_says_holds(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setenv(variable, "tpu")
    monkeypatch.setattr(platform, "_platforms", lambda _: pytest.fail("nothing is to be set"))
    platform.skip_absent_tpu()


def _set_plugins(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    def entry_points(*, group: str) -> SimpleNamespace:
        assert group == "jax_plugins"
        return SimpleNamespace(names=set(names))

    monkeypatch.setattr(platform.importlib.metadata, "entry_points", entry_points)


def test_caches_lie_in_the_users_cache_folder_or_in_the_one_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("FARSPAN_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert platform.user_cache_dir("aot") == tmp_path / "xdg" / "farspan" / "aot"
    monkeypatch.setenv("FARSPAN_CACHE_DIR", str(tmp_path / "named"))
    assert platform.user_cache_dir("tokens") == tmp_path / "named" / "tokens"


def test_a_url_is_no_folder_to_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a path it would be a folder `gs:` beside the program, gone with the machine."""
    assert platform.folder_to_write("~/runs", "run_dir") == Path.home() / "runs"
    with pytest.raises(
        ValueError, match=r"run_dir must be a folder .*'gs://bucket/run'; use a path"
    ):
        platform.folder_to_write("gs://bucket/run", "run_dir")
    monkeypatch.setenv("FARSPAN_CACHE_DIR", "s3://bucket/cache")
    with pytest.raises(ValueError, match="FARSPAN_CACHE_DIR must be"):
        platform.user_cache_dir("tokens")
