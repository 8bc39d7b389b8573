"""Reading what the TPU compiler makes of a kernel: its bundles, and which units they use.

A bundle is one instruction of a core: what all of its units do next. The compiler can be asked for
the final bundles of a kernel, with the units that each occupies, for any chip, none of which need
be here. Bundles are static figures, not times: a bundle takes a cycle or more, and nothing here
knows how long a core waits for memory.

    path      the bundles that run once per pair of blocks: the body of the innermost loop that
              holds matmuls, one way through it, other conditional regions left out
    floor     bundles that the matmuls take if every matrix unit is always busy
    waits     each unit takes a matmul only when it is done with the one before, and a result is
              read only when it is there. Where a schedule sends matmuls faster than that, as the
              compiler's experimental scheduler does, its bundles alone flatter it

Two cores of a v4 or v5p chip run one program. A kernel says which axes of its grid may be halved
between them (`dimension_semantics`), and its bundles show whether one is: both cores meet at a
barrier (`BarrierMegacore`) if so; if not, the core whose id is not 0 branches to the end.
"""

from __future__ import annotations

import base64
import dataclasses
import importlib
import re
import tempfile
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from farspan.plan.compiler import (
    CompileError,
    MissingCompilerError,
    compiler_available,
    run_worker,
)
from farspan.plan.hardware import get_slice

_ROWS_PER_MATMUL = {"bf16": 16, "f32": 8}
"""Rows that one instruction streams through a matrix unit, by their type."""

_MATRIX_UNITS = {4: (128, 1), 2: (256, 2)}
"""By the number of a core's matrix units: their width, and the rows that they take per bundle.

131,072 or 524,288 FLOPs in a bundle: at the published peaks, clocks of 1.05 (v4), 1.5 (v5e), 1.75
(v5p), 1.75 (v6e) and 2.2 GHz (TPU7x)."""

_UNITS = {
    "MXU": "matrix", "XLU": "cross_lane", "VALU": "vector", "VPOP": "pop", "EUP": "transcendental",
    "VLOAD": "load", "VSTORE": "store", "SALU": "scalar",
    "VLOAD:FILL": "spill_load", "VSTORE:SPILL": "spill_store",
}  # fmt: skip
_BUNDLE = re.compile(r"^\s*(0x[0-9a-f]+|0)\s+([A-Z]{2})?\s*:\s*(>*)\s*\{(\})?")  # {}: no depth
_BRANCH = re.compile(r"\bsbr\.rel\b[^;}]*target = \$region(\d+)")
_REGION = re.compile(r"\b(?:Start|Start/End empty) region (\d+)\b")
_MATMUL = re.compile(r"\bvmatmul\.(?:\w+\.)*?(bf16|f32)\.[\w.]*?(?:mrb\[(\d+)\]\.)?mxu(\d)")
_POP = re.compile(r"\bvpop\.f32\.(?:mrb\[(\d+)\]|mrf)\.mxu(\d)")
_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
_MODULE = re.compile(r'"custom_call_config":\{"body":"([^"]+)"')
_UTILIZATION = "-final_hlo-static-per-bundle-utilization.txt"


@dataclasses.dataclass(frozen=True)
class PairPath:
    """One way through the body of the innermost loop that holds matmuls.

    Attributes:
      bundles: Its length.
      bundles_with_waits: Its length if matmuls wait for their units, and results for matmuls.
      matmuls: Matmul instructions of each matrix unit.
      matmul_bundles: Bundles that the busiest matrix unit needs for them.
      spill_loads, spill_stores: Vectors that are read from, written to memory for want of
        registers.
      used: Uses of each unit; of a matrix unit, bundles in which it is busy.
    """

    bundles: int
    bundles_with_waits: int
    matmuls: tuple[int, ...]
    matmul_bundles: int
    spill_loads: int
    spill_stores: int
    used: dict[str, int]

    def fraction(self, floor_bundles: float) -> float:
        """The part of the bundles that the matmuls need at least, at most 1."""
        return floor_bundles / max(floor_bundles, self.bundles)


@dataclasses.dataclass(frozen=True)
class KernelBundles:
    """What the compiler made of one kernel.

    Attributes:
      name: The kernel's name.
      bundles: All of its bundles.
      capacity: How often a bundle can use each unit.
      paths: The ways through a pair of blocks, the shortest first: without and with masking.
      grid: Steps along each axis of its grid; None where the program decides.
      dimension_semantics: `parallel` or `arbitrary`, by axis.
      working_cores: Cores of the device that take part: 1 or 2.
    """

    name: str
    bundles: int
    capacity: dict[str, int]
    paths: tuple[PairPath, ...]
    grid: tuple[int | None, ...]
    dimension_semantics: tuple[str, ...]
    working_cores: int

    def floor_bundles(self, flops: float) -> float:
        """Bundles that matmuls of so many bfloat16 FLOPs take at one core's peak, not rounded."""
        units = self.capacity["matrix"]
        width, rows = _MATRIX_UNITS[units]
        return flops / (units * rows * 2 * width**2)


def compile_kernels(
    program: str,
    arguments: Mapping[str, Any],
    hardware: str,
    *,
    kernels: str,
    timeout_seconds: float = 3600.0,
) -> tuple[KernelBundles, ...]:
    """Compiles a program and reads the bundles of its kernels.

    Args:
      program: `module:function`, as for `farspan.plan.aot.compile_program`.
      arguments: JSON values for it.
      hardware: A slice, such as `v5p:2x2x1`.
      kernels: What the names of the kernels have in common.
      timeout_seconds: The longest that it may take.

    Returns:
      The kernels, in the order in which they were compiled.

    Raises:
      MissingCompilerError: libtpu is not installed.
      ValueError: There is no such hardware, or the program raises it.
      CompileError: The program does not compile or does not fit, or not in time.
    """
    if not compiler_available():
        raise MissingCompilerError
    where = get_slice(hardware)
    with tempfile.TemporaryDirectory() as folder:
        flags = (
            f"--xla_jf_dump_to={folder}",
            "--xla_jf_dump_llo_text=true",
            f"--xla_jf_dump_to_filter={kernels}",
            "--xla_jf_dump_llo_pass_label_regex=.*final.*",
        )
        answer = run_worker(
            {
                "program": program,
                "arguments": dict(arguments),
                "topology": where.name,
                "topology_options": where.topology_options,
                "hlo_file": str(Path(folder) / "program"),
            },
            flags,
            None,
            timeout_seconds,
        )
        if "failed" in answer:
            raise CompileError(f"{program} did not compile for {where.name}: {answer['failed']}")
        return read_dump(folder, kernels)


def read_dump(folder: str | Path, kernels: str = "") -> tuple[KernelBundles, ...]:
    """Reads the kernels that the compiler left in a folder.

    Args:
      folder: What `--xla_jf_dump_to` named.
      kernels: What the names of the kernels have in common.

    Returns:
      The kernels, in the order in which they were compiled.
    """
    found: list[KernelBundles] = []
    for file in sorted(Path(folder).glob(f"*{_UTILIZATION}")):
        number, name = re.sub(r"-\d+$", "", file.name.removesuffix(_UTILIZATION)).split("-", 1)
        if kernels not in name or name.startswith(("TLP", "<")):
            continue
        about, bundles = "", ""
        for other in sorted(file.parent.glob(f"{number}-*-*_bundles.txt")):
            if "schedule-analysis" in other.name:
                about = other.read_text(encoding="utf-8")
            else:
                bundles = other.read_text(encoding="utf-8")
        utilization = file.read_text(encoding="utf-8")
        found.append(read_kernel(re.sub(r"\.\d+$", "", name), bundles, utilization, about))
    return tuple(found)


def read_kernel(name: str, bundles: str, utilization: str, about: str = "") -> KernelBundles:
    """Reads one kernel.

    Args:
      name: Its name.
      bundles: Text of its final bundles.
      utilization: Text of the units that each bundle uses.
      about: Text that holds its instruction in the program, with the kernel as it was written.

    Returns:
      What the texts say.
    """
    lines = utilization.splitlines()
    header = next(n for n, line in enumerate(lines) if line.startswith("MXU"))
    units = [_UNITS[unit.strip()] for unit in lines[header].split(",")]
    capacity = dict(zip(units, map(int, lines[header + 1].split()), strict=True))
    rows = [tuple(map(int, line.split())) for line in lines[header + 3 :] if line.strip()]
    code = _Code.read(bundles)
    assert len(rows) == len(code.texts), "both texts tell of the same bundles"
    streamed = _MATRIX_UNITS[capacity["matrix"]][1]
    paths = [_measure(code, rows, units, streamed, path) for path in code.pair_paths()]
    grid, semantics = _grid(about)
    return KernelBundles(
        name=name,
        bundles=len(rows),
        capacity=capacity,
        paths=tuple(sorted(paths, key=lambda path: path.bundles)),
        grid=grid,
        dimension_semantics=semantics,
        working_cores=2 if "BarrierMegacore" in bundles else 1,
    )


@dataclasses.dataclass(frozen=True)
class _Code:
    """Bundles and control flow; intervals of bundles are half open.

    Attributes:
      texts: Of each bundle.
      loops: Depth and interval of each loop.
      conditionals: Intervals that a branch can skip.
    """

    texts: list[str]
    loops: list[tuple[int, range]]
    conditionals: list[range]

    @staticmethod
    def read(text: str) -> _Code:
        lines: list[str] = []
        labels: list[str] = []
        depths: list[int] = []
        for line in text.splitlines():
            if found := _BUNDLE.match(line):
                number, label, depth, empty = found.groups()
                assert int(number, 16) == len(lines), "bundles are numbered from 0"
                lines.append(line)
                labels.append(label or "")
                depths.append(depths[-1] if empty and depths else len(depth))
            elif lines:
                lines[-1] += line
        starts = {int(r): n for n, line in enumerate(lines) for r in _REGION.findall(line)}
        branches = [(n, int(r)) for n, line in enumerate(lines) for r in _BRANCH.findall(line)]
        conditionals = [
            range(place + 1, starts[region])
            for place, region in branches
            if starts.get(region, 0) > place
        ]
        loops: list[tuple[int, range]] = []
        for start, (label, depth) in enumerate(zip(labels, depths, strict=True)):
            if label == "LB":
                end = start + 1
                while end < len(lines) and depths[end] >= depth:
                    if labels[end] == "LB" and depths[end] == depth:
                        break
                    end += 1
                loops.append((depth, range(start, end)))
        return _Code([_COMMENT.sub("", line) for line in lines], loops, conditionals)

    def pair_paths(self) -> list[list[int]]:
        """The ways through the deepest loop that holds matmuls."""
        places = [n for n, text in enumerate(self.texts) if "vmatmul" in text]

        def holds(interval: range) -> bool:
            return any(place in interval for place in places)

        working = [(depth, loop) for depth, loop in self.loops if holds(loop)]
        if not working:
            return []
        deepest = max(depth for depth, _ in working)
        paths: list[list[int]] = []
        for depth, loop in working:
            if depth < deepest:
                continue
            inside = [c for c in self.conditionals if _within(c, loop)]
            choices = [c for c in inside if holds(c)]
            leaves = [c for c in choices if not any(_within(x, c) and x != c for x in choices)]
            for leaf in leaves or [loop]:
                skipped = [c for c in inside if not _within(leaf, c)]
                paths.append([n for n in loop if not any(n in c for c in skipped)])
        return paths


def _within(inner: range, outer: range) -> bool:
    return outer.start <= inner.start and inner.stop <= outer.stop


def _measure(
    code: _Code,
    rows: Sequence[tuple[int, ...]],
    units: Sequence[str],
    streamed: int,
    path: Sequence[int],
) -> PairPath:
    used = {unit: sum(rows[n][place] for n in path) for place, unit in enumerate(units)}
    texts = [code.texts[n] for n in path]
    busy: Counter[str] = Counter()
    count: Counter[str] = Counter()
    for kind, _, unit in (found for text in texts for found in _MATMUL.findall(text)):
        busy[unit] += _ROWS_PER_MATMUL[kind] // streamed
        count[unit] += 1
    return PairPath(
        bundles=len(path),
        bundles_with_waits=_with_waits(texts, streamed),
        matmuls=tuple(count[unit] for unit in sorted(count)),
        matmul_bundles=max(busy.values()),
        spill_loads=used.pop("spill_load"),
        spill_stores=used.pop("spill_store"),
        used=used,
    )


@dataclasses.dataclass(frozen=True)
class _Matmul:
    number: int
    unit: str
    rows: int


def _with_waits(texts: Sequence[str], streamed: int) -> int:
    """Bundles until the last one, if a unit takes `streamed` rows in each.

    How long a result takes is not known: the least that the schedule grants it.
    """
    steps = _matmul_steps(texts)
    issued = {m.number: step for step, (begun, _) in enumerate(steps) for m in begun}
    granted = [step - issued[number] for step, (_, read) in enumerate(steps) for number in read]
    latency = min(granted, default=0)
    free: dict[str, int] = {}
    ready: dict[int, int] = {}
    now = 0
    for begun, read in steps:
        now = max([now, *(ready[number] for number in read)])
        for matmul in begun:
            start = max(now, free.get(matmul.unit, 0))
            free[matmul.unit] = start + matmul.rows // streamed
            ready[matmul.number] = start + latency
        now += 1
    return max([now, *free.values()])


def _matmul_steps(texts: Sequence[str]) -> list[tuple[list[_Matmul], list[int]]]:
    """Of each bundle: the matmuls that it begins, and the numbers of those that it reads.

    Results lie in numbered buffers of 8 rows of 128, or queue, as many of each matmul.
    """
    pops = Counter(unit for text in texts for _, unit in _POP.findall(text))
    matmuls = Counter(unit for text in texts for *_, unit in _MATMUL.findall(text))
    steps: list[tuple[list[_Matmul], list[int]]] = []
    buffers: dict[tuple[str, int], int] = {}
    queues: dict[str, deque[int]] = {unit: deque() for unit in matmuls}
    number = 0
    for text in texts:
        read: list[int] = []
        for place, unit in _POP.findall(text):
            if place:
                holder = buffers.get((unit, int(place)))
                read += [] if holder is None else [holder]
            elif queues.get(unit):
                read.append(queues[unit].popleft())
        begun: list[_Matmul] = []
        for kind, place, unit in _MATMUL.findall(text):
            rows = _ROWS_PER_MATMUL[kind]
            if place:
                buffers |= {(unit, int(place) + n): number for n in range(rows // 4)}
            else:
                queues[unit].extend([number] * (pops[unit] // matmuls[unit]))
            begun.append(_Matmul(number, unit, rows))
            number += 1
        steps.append((begun, read))
    return steps


def _grid(about: str) -> tuple[tuple[int | None, ...], tuple[str, ...]]:
    """Grid and dimension semantics, from the kernel's module in the program's text."""
    found = _MODULE.search(about)
    if found is None:
        return (), ()
    ir: Any = importlib.import_module("jaxlib.mlir.ir")
    dialect: Any = importlib.import_module("jaxlib.mosaic.python.tpu")
    with ir.Context() as context:
        context.allow_unregistered_dialects = True
        dialect.register_dialect(context)
        module: Any = ir.Module.parse(base64.b64decode(found.group(1)))
        for function in module.body.operations:
            attributes = {a: str(function.attributes[a]) for a in function.attributes}
            if "dimension_semantics" in attributes:
                steps = re.findall(r"-?\d+", attributes["iteration_bounds"].partition(":")[2])
                grid = tuple(int(n) if int(n) >= 0 else None for n in steps)
                named = re.findall(r"<(\w+)>", attributes["dimension_semantics"])
                return grid, tuple(named)
    return (), ()
