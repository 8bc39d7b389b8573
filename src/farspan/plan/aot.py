"""Compiles a program for TPUs that are not here, and reports what the compiler says of it.

The compiler is the one that runs on the chips: what it says of memory, of what is sent and of the
order in which everything starts holds for the run. It says nothing of time.
"""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import importlib.metadata
import json
import re
import tempfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from farspan.plan import hlo
from farspan.plan.compiler import (
    CompileError,
    MissingCompilerError,
    Progress,
    compiler_available,
    python_sources,
    run_worker,
)
from farspan.plan.hardware import Slice, get_slice
from farspan.platform import folder_to_write, user_cache_dir

__all__ = [
    "Buffer",
    "CompileError",
    "CompileReport",
    "Memory",
    "MissingCompilerError",
    "OutOfMemory",
    "compile_program",
    "compiler_available",
]

_PACKAGES = ("jax", "jaxlib", "libtpu", "farspan")
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = r"([\d.]+)([KMGT]?)B?"
_HBM_SHORT = re.compile(rf"temporaries \({_SIZE}\) exceeds available HBM \({_SIZE}\)")
_HBM_LONG = re.compile(rf"Used {_SIZE} of {_SIZE} hbm")
_BUFFER = re.compile(rf'Size: {_SIZE}\n(?:\s+Operator: (?:op_name="([^"]*)")?.*\n)?\s+Shape: (\S+)')
_TORN = (OSError, EOFError, ValueError, KeyError, TypeError, zlib.error)


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of one device that a program holds, and of the host on its behalf.

    Attributes:
      argument_bytes: What it is given.
      output_bytes: What it returns.
      alias_bytes: Of these, what takes the place of an argument.
      temporary_bytes: What it holds in between.
      code_bytes: Itself.
      peak_bytes: The most that is held at one time, itself not counted.
      host_argument_bytes, host_output_bytes, host_alias_bytes, host_temporary_bytes: The same in
        the host's memory.
    """

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temporary_bytes: int
    code_bytes: int
    peak_bytes: int
    host_argument_bytes: int
    host_output_bytes: int
    host_alias_bytes: int
    host_temporary_bytes: int

    @property
    def total_bytes(self) -> int:
        """What the device must have free for the program to run."""
        kept = self.argument_bytes + self.output_bytes - self.alias_bytes
        return kept + self.temporary_bytes + self.code_bytes

    @property
    def host_bytes(self) -> int:
        """What the host must have free for each device."""
        kept = self.host_argument_bytes + self.host_output_bytes - self.host_alias_bytes
        return kept + self.host_temporary_bytes


@dataclasses.dataclass(frozen=True)
class Buffer:
    """A buffer that the compiler names when memory is out.

    Attributes:
      size_bytes: Its size.
      shape: Dtype and dimensions, as the compiler writes them.
      operator: What makes it; empty if the compiler does not say.
    """

    size_bytes: int
    shape: str
    operator: str


@dataclasses.dataclass(frozen=True)
class OutOfMemory:
    """What the compiler says when a program does not fit one device.

    Attributes:
      wanted_bytes: What the program needs.
      available_bytes: What there is.
      largest: The largest buffers, if the compiler lists them.
      message: Its own words.
    """

    wanted_bytes: int
    available_bytes: int
    largest: tuple[Buffer, ...]
    message: str


@dataclasses.dataclass(frozen=True)
class CompileReport:
    """What the compiler says of a program.

    Attributes:
      program: `module:function`.
      hardware: The slice.
      num_devices: Its devices.
      hbm_bytes: Memory of one device that programs may use.
      flags: Arguments that libtpu was given.
      versions: Of jax, jaxlib, libtpu and farspan.
      lower_seconds: Time to trace and lower the program, when it was compiled.
      compile_seconds: Time to compile it.
      memory: What it holds; None if it does not fit.
      out_of_memory: The compiler's complaint if it does not fit.
      collectives: What it sends, by kind.
      kernels: The kernels that it launches.
      chips: Where the chip of each device stands in the slice, in the order in which the program
        numbers devices; empty if the program takes no array that is sharded over a mesh.
    """

    program: str
    hardware: str
    num_devices: int
    hbm_bytes: int
    flags: tuple[str, ...]
    versions: dict[str, str]
    lower_seconds: float
    compile_seconds: float
    memory: Memory | None
    out_of_memory: OutOfMemory | None
    collectives: tuple[hlo.Overlap, ...]
    kernels: tuple[hlo.KernelLaunches, ...]
    chips: tuple[tuple[int, ...], ...] = ()

    @property
    def fits(self) -> bool:
        """Whether the program fits the memory of its devices."""
        return self.memory is not None and self.memory.total_bytes <= self.hbm_bytes

    def to_json(self) -> dict[str, Any]:
        """The report as JSON values, `fits` among them."""
        return dataclasses.asdict(self) | {"fits": self.fits}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> CompileReport:
        """The report that `to_json` wrote."""
        fields: dict[str, Any] = {x.name: values[x.name] for x in dataclasses.fields(cls)}
        memory, lack = fields["memory"], fields["out_of_memory"]
        if lack is not None:
            largest = tuple(Buffer(**buffer) for buffer in lack["largest"])
            lack = OutOfMemory(**(lack | {"largest": largest}))
        fields["flags"] = tuple(fields["flags"])
        fields["memory"] = None if memory is None else Memory(**memory)
        fields["out_of_memory"] = lack
        fields["collectives"] = tuple(hlo.Overlap(**row) for row in fields["collectives"])
        fields["kernels"] = tuple(hlo.KernelLaunches(**row) for row in fields["kernels"])
        fields["chips"] = tuple(map(tuple, fields["chips"]))
        return cls(**fields)


def compile_program(
    program: str,
    arguments: Mapping[str, Any],
    hardware: str,
    *,
    flags: Sequence[str] = (),
    cache_dir: str | Path | None = None,
    use_cache: bool = True,
    keep_hlo: str | Path | None = None,
    on_progress: Progress | None = None,
    timeout_seconds: float = 3600.0,
) -> CompileReport:
    """Compiles a program for a slice of TPU chips, none of which need be here.

    Args:
      program: `module:function`. It is called as `function(devices, **arguments)`, with the
        devices of the slice, in a process of its own, and returns a `jax.stages.Lowered`.
      arguments: JSON values.
      hardware: The slice, as `farspan.plan.hardware.get_slice` takes it.
      flags: Arguments for libtpu, such as `--xla_tpu_enable_async_all_to_all=true`.
      cache_dir: Folder that keeps reports and programs; by default
        `user_cache_dir("aot")`.
      use_cache: Whether a report of the same program, arguments, hardware, flags, versions and
        sources is taken from there.
      keep_hlo: File for the text of the compiled program. None is written if it does not fit.
      on_progress: Is told the phase and the seconds spent in it, at least every second.
      timeout_seconds: The longest that it may take.

    Returns:
      What the compiler says. That a program does not fit is a result, no error.

    Raises:
      MissingCompilerError: libtpu is not installed.
      ValueError: There is no such hardware, or the program raises it, as it may a
        NotImplementedError.
      CompileError: The program does not compile for another reason, or not in time.
    """
    if not compiler_available():
        raise MissingCompilerError
    where = get_slice(hardware)
    if cache_dir is None:
        folder = user_cache_dir("aot")
    else:
        folder = folder_to_write(str(cache_dir), "cache_dir")
    versions = {name: importlib.metadata.version(name) for name in _PACKAGES}
    entry = _Entry(folder, _key(program, arguments, where.name, flags, versions))
    if use_cache:
        folder.mkdir(parents=True, exist_ok=True)
    found = entry.read() if use_cache else None
    if found is None:
        with tempfile.TemporaryDirectory() as scratch:
            text = Path(scratch) / "hlo.txt"
            answer = run_worker(
                {
                    "program": program,
                    "arguments": dict(arguments),
                    "topology": where.name,
                    "topology_options": where.topology_options,
                    "hlo_file": str(text),
                },
                flags,
                on_progress,
                timeout_seconds,
            )
            compiled = text.read_text(encoding="utf-8") if text.exists() else ""
        found = _report(program, where, flags, versions, answer, compiled), compiled
        if use_cache:
            entry.write(*found)
    report, compiled = found
    if keep_hlo is not None and compiled:
        Path(keep_hlo).write_text(compiled, encoding="utf-8")
    if on_progress is not None:
        on_progress("done", 0.0)
    return report


def _report(
    program: str,
    where: Slice,
    flags: Sequence[str],
    versions: dict[str, str],
    answer: dict[str, Any],
    compiled: str,
) -> CompileReport:
    lack = None
    if "failed" in answer:
        lack = _out_of_memory(answer["failed"])
        if lack is None:
            raise CompileError(f"{program} did not compile for {where.name}: {answer['failed']}")
    return CompileReport(
        program=program,
        hardware=where.name,
        num_devices=where.num_devices,
        hbm_bytes=where.chip.hbm_bytes,
        flags=tuple(flags),
        versions=versions,
        lower_seconds=answer["lower_seconds"],
        compile_seconds=answer["compile_seconds"],
        memory=None if lack else Memory(**answer["memory"]),
        out_of_memory=lack,
        collectives=hlo.overlap(compiled) if compiled else (),
        kernels=hlo.kernel_launches(compiled) if compiled else (),
        chips=tuple(map(tuple, answer.get("chips", ()))),
    )


def _out_of_memory(message: str) -> OutOfMemory | None:
    """Reads the compiler's complaint; None if it is not about the memory of the device."""
    found = _HBM_SHORT.search(message) or _HBM_LONG.search(message)
    if found is None:
        return None
    buffers = tuple(
        Buffer(_bytes(size, unit), shape, operator)
        for size, unit, operator, shape in _BUFFER.findall(message)
    )
    wanted, available = _bytes(*found.groups()[:2]), _bytes(*found.groups()[2:])
    return OutOfMemory(wanted, available, buffers, message)


def _bytes(size: str, unit: str) -> int:
    return int(float(size) * _UNITS[unit])


@dataclasses.dataclass(frozen=True)
class _Entry:
    """A place in the cache: the report, and the text of the program."""

    folder: Path
    key: str

    def read(self) -> tuple[CompileReport, str] | None:
        """What is kept; None if nothing is, or only a part of it."""
        try:
            with gzip.open(self.folder / f"{self.key}.json.gz", "rt", encoding="utf-8") as file:
                kept = json.load(file)
            return CompileReport.from_json(kept["report"]), kept["hlo"]
        except _TORN:
            return None

    def write(self, report: CompileReport, compiled: str) -> None:
        """Keeps it; a reader sees all of it or nothing."""
        kept = json.dumps({"report": report.to_json(), "hlo": compiled})
        with tempfile.NamedTemporaryFile(dir=self.folder, delete=False) as file:
            file.write(gzip.compress(kept.encode()))
        Path(file.name).replace(self.folder / f"{self.key}.json.gz")


def _key(
    program: str,
    arguments: Mapping[str, Any],
    hardware: str,
    flags: Sequence[str],
    versions: dict[str, str],
) -> str:
    sources = hashlib.sha256()
    for file in python_sources(program):
        sources.update(file.read_bytes())
    parts = [program, dict(arguments), hardware, list(flags), versions, sources.hexdigest()]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
