"""Programs compiled for TPUs that are not here: reports, the cache, errors, and no noise."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from farspan.plan import aot, compiler
from farspan.plan.aot import CompileError, CompileReport, MissingCompilerError, compile_program

needs_compiler = pytest.mark.skipif(
    not aot.compiler_available(), reason="needs libtpu: pip install 'farspan[tpu]'"
)

PROGRAMS = """
import time

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P, SingleDeviceSharding


def double(x, out):
    out[...] = x[...] * 2.0


def ring(devices, *, trips):
    # A kernel runs beside each transfer; the last step has none.
    mesh = Mesh(devices, ("x",), axis_types=(AxisType.Auto,))
    count = len(devices)

    def local(x):
        def step(_, carry):
            keys, out = carry
            came = lax.ppermute(keys, "x", [(i, (i + 1) % count) for i in range(count)])
            new = pl.pallas_call(double, out_shape=keys, name="double")(keys)
            new, came = lax.optimization_barrier((new, came))
            return came, out + new

        return lax.fori_loop(0, trips, step, (x, jnp.zeros_like(x)))[1]

    x = jax.ShapeDtypeStruct((8 * count, 128), jnp.float32, sharding=NamedSharding(mesh, P("x")))
    run = jax.shard_map(local, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    return jax.jit(run).lower(x)


def large(devices, *, gib):
    x = jax.ShapeDtypeStruct((gib, 2**28), jnp.float32, sharding=SingleDeviceSharding(devices[0]))
    return jax.jit(lambda x: (x * 2, x + 1)).lower(x)


def mistaken(devices):
    raise ValueError(f"sizes must fit, got {len(devices)}; use others")


def broken(devices):
    raise KeyError("a bug")


def endless(devices):
    time.sleep(600)
"""


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module of programs that the worker can import, and a cache of its own."""
    file = tmp_path / "aot_programs.py"
    file.write_text(PROGRAMS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("FARSPAN_CACHE_DIR", str(tmp_path / "cache"))
    return file


@needs_compiler
def test_a_ring_is_compiled_read_and_kept(
    programs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    phases: list[str] = []

    def compile_ring(**options: Any) -> CompileReport:
        return compile_program(
            "aot_programs:ring", {"trips": 3}, "v5p:2x2x1",
            on_progress=lambda phase, _: phases.append(phase), **options,
        )  # fmt: skip

    report = compile_ring(keep_hlo=tmp_path / "program.hlo")
    assert sorted(set(phases), key=phases.index) == ["starting", "lowering", "compiling", "done"]
    assert report.hardware == "v5p:2x2x1"
    assert report.num_devices == 4
    assert set(report.versions) == {"jax", "jaxlib", "libtpu", "farspan"}
    assert report.memory is not None
    assert report.memory.argument_bytes == report.memory.output_bytes == 8 * 128 * 4
    assert report.memory.total_bytes >= report.memory.temporary_bytes + 8 * 128 * 8
    assert report.memory.host_bytes == 0
    assert report.fits
    assert report.out_of_memory is None
    (permutes,) = report.collectives
    assert (permutes.kind, permutes.transfers) == ("collective-permute", 3)
    assert permutes.sent_bytes == 3 * 8 * 128 * 4
    assert [(kernel.name, kernel.launches) for kernel in report.kernels] == [("double", 3)]
    assert "is_scheduled=true" in (tmp_path / "program.hlo").read_text()
    assert CompileReport.from_json(json.loads(json.dumps(report.to_json()))) == report

    phases.clear()
    assert compile_ring() == report, "from the cache"
    assert phases == ["done"]
    (kept,) = (tmp_path / "cache" / "aot").iterdir()
    kept.write_bytes(kept.read_bytes()[:-40])
    again = compile_ring()
    assert "compiling" in phases, "what was torn is compiled again"
    assert dataclasses.replace(
        again, lower_seconds=0.0, compile_seconds=0.0
    ) == dataclasses.replace(report, lower_seconds=0.0, compile_seconds=0.0)
    programs.write_text(PROGRAMS + "\n")
    with pytest.raises(CompileError, match="allow more"):  # other sources are another program
        compile_ring(timeout_seconds=0.01)
    assert capfd.readouterr() == ("", "")


@needs_compiler
@pytest.mark.usefixtures("programs")
def test_a_program_that_does_not_fit_is_a_result() -> None:
    report = compile_program("aot_programs:large", {"gib": 8}, "v5e:2x2")
    assert report.memory is None
    assert not report.fits
    lack = report.out_of_memory
    assert lack is not None
    assert lack.wanted_bytes == 24 * 2**30, "x, twice x and x + 1"
    assert lack.available_bytes == report.hbm_bytes
    assert CompileReport.from_json(json.loads(json.dumps(report.to_json()))) == report


@needs_compiler
@pytest.mark.usefixtures("programs")
def test_errors_of_programs_and_of_the_compiler_are_told_apart() -> None:
    with pytest.raises(ValueError, match=r"^sizes must fit, got 4; use others$"):
        compile_program("aot_programs:mistaken", {}, "v5p:2x2x1")
    with pytest.raises(CompileError, match="KeyError: 'a bug'"):
        compile_program("aot_programs:broken", {}, "v5p:2x2x1")
    with pytest.raises(CompileError, match=r"died\n.*[Uu]nknown.*no_such_flag"):
        compile_program("aot_programs:ring", {"trips": 1}, "v5p:2x2x1", flags=("--no_such_flag",))
    with pytest.raises(CompileError, match=r"timeout_seconds=0.2.*starting"):
        compile_program("aot_programs:endless", {}, "v5p:2x2x1", timeout_seconds=0.2)


@needs_compiler
@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGKILL])
def test_the_compiler_ends_with_the_process_that_asked_for_it(
    programs: Path, ending: signal.Signals
) -> None:
    script = (
        "import signal\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a background job lacks it
        "from farspan.plan.aot import compile_program\n"
        "compile_program('aot_programs:endless', {}, 'v5p:2x2x1',\n"
        "    on_progress=lambda phase, _: print(phase, flush=True))\n"
    )
    asking = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(programs.parent)},
    )
    assert asking.stdout
    while "lowering" not in asking.stdout.readline():
        assert asking.poll() is None
    children = Path(f"/proc/{asking.pid}/task/{asking.pid}/children").read_text().split()
    assert len(children) == 1
    asking.send_signal(ending)
    asking.communicate(timeout=60)
    assert asking.returncode == -ending
    assert _soon(lambda: not _alive(int(children[0])))


def test_without_libtpu_the_extra_is_named_before_any_work(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(compiler.importlib.util, "find_spec", lambda _: None)
    assert not aot.compiler_available()
    with pytest.raises(MissingCompilerError, match=r"pip install 'farspan\[tpu\]'"):
        compile_program("none:such", {}, "v5p:2x2x1", cache_dir=tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_the_buffers_that_the_compiler_lists_are_read() -> None:
    message = """RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory \
space hbm. Used 20.50G of 15.75G hbm. Exceeded hbm capacity by 4.75G.

  Largest program allocations in hbm:

  1. Size: 8.00G
     Operator: op_name="jit(step)/dot_general" source_file="model.py" source_line=7
     Shape: bf16[32768,131072]{1,0:T(8,128)(2,1)}
     Unpadded size: 8.00G
     Allocation type: HLO temp
     ==========================

  2. Size: 512.0M
     Shape: f32[1024,131072]{1,0:T(8,128)}
     Allocation type: HLO temp
     ==========================
"""
    lack = aot._out_of_memory(message)
    assert lack is not None
    assert (lack.wanted_bytes, lack.available_bytes) == (int(20.5 * 2**30), int(15.75 * 2**30))
    assert [(x.size_bytes, x.operator, x.shape.split("{")[0]) for x in lack.largest] == [
        (8 * 2**30, "jit(step)/dot_general", "bf16[32768,131072]"),
        (512 * 2**20, "", "f32[1024,131072]"),
    ]
    assert (
        aot._out_of_memory("Ran out of memory in memory space vmem. Used 72M of 64M vmem") is None
    )


def _alive(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def _soon(holds: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 10
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.05)
    return holds()
