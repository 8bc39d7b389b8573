"""Reading a compiled program: which collectives run, how often, and with how many bytes."""

from __future__ import annotations

import dataclasses
import math
import re
from collections import defaultdict

COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")

_DTYPE_BYTES = {
    "pred": 1,
    "s8": 1,
    "u8": 1,
    "s16": 2,
    "u16": 2,
    "s32": 4,
    "u32": 4,
    "s64": 8,
    "u64": 8,
    "bf16": 2,
    "f16": 2,
    "f32": 4,
    "f64": 8,
}
_SHAPE = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\) -> .* \{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.-]+ = (.*?) ([a-z][a-z0-9-]*)\((.*)$")
_CALLS = re.compile(
    r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.-]+)"
)
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_MESH_GROUPS = re.compile(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}")
_MESH_AXIS = re.compile(r"'(\w+)'=(\d+)")
_TRIP_COUNT = re.compile(r'known_trip_count"?:\s*\{"?n"?:\s*"?(\d+)')


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction of a compiled program.

    Attributes:
      op: Its opcode.
      shapes: Dtype and dimensions of each array it yields.
      count: How often one run of the program executes it (loops with a known count multiplied
        out; each branch of a conditional counted as taken).
      text: What follows the opcode: operands and attributes.
    """

    op: str
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    count: int
    text: str

    @property
    def result_bytes(self) -> int:
        """Bytes of the arrays it yields."""
        return sum(_DTYPE_BYTES[dtype] * math.prod(dims) for dtype, dims in self.shapes)

    @property
    def group_size(self) -> int:
        """Devices that take part in a collective."""
        if listed := re.search(r"replica_groups=\{\{([\d,]*)\}", self.text):
            return listed.group(1).count(",") + 1
        if tiled := re.search(r"replica_groups=\[\d+,(\d+)\]", self.text):
            return int(tiled.group(1))
        if named := _MESH_GROUPS.search(self.text):
            sizes = dict(_MESH_AXIS.findall(named.group(1)))
            return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", named.group(2)))
        return 1

    @property
    def operand_bytes(self) -> int:
        """Bytes that one device puts into a collective."""
        if self.op == "all-gather":
            return self.result_bytes // self.group_size
        if self.op == "reduce-scatter":
            return self.result_bytes * self.group_size
        return self.result_bytes


def instructions(hlo: str) -> list[Instruction]:
    """Lists the instructions of a compiled program, with how often each runs.

    Args:
      hlo: Text of the optimised module, `compiled.as_text()`.

    Returns:
      Instructions of every computation that the entry reaches.
    """
    bodies, entry = _computations(hlo)
    counts: dict[str, int] = defaultdict(int)

    def visit(name: str, times: int) -> None:
        counts[name] += times
        for line in bodies[name]:
            found = _INSTRUCTION.match(line)
            if not found:
                continue
            trips = _TRIP_COUNT.search(line) if found.group(2) == "while" else None
            inner = times * (int(trips.group(1)) if trips else 1)
            called = _CALLS.findall(line)
            for branches in _BRANCHES.findall(line):
                called += [branch.strip().lstrip("%") for branch in branches.split(",")]
            for callee in called:
                if callee in bodies:
                    visit(callee, inner)

    visit(entry, 1)
    result: list[Instruction] = []
    for name, times in counts.items():
        for line in bodies[name]:
            if found := _INSTRUCTION.match(line):
                shape, op, text = found.groups()
                shapes = tuple(
                    (dtype, tuple(int(d) for d in dims.split(",") if d))
                    for dtype, dims in _SHAPE.findall(shape)
                    if dtype in _DTYPE_BYTES
                )
                result.append(Instruction(op, shapes, times, text))
    return result


def collectives(hlo: str) -> dict[str, tuple[int, int]]:
    """Counts the collectives of a compiled program.

    Args:
      hlo: Text of the optimised module.

    Returns:
      By opcode: how often they run, and the bytes that one device puts in over all runs. Groups
      of one device count as nothing.
    """
    totals: dict[str, tuple[int, int]] = {}
    for found in instructions(hlo):
        if found.op not in COLLECTIVES:
            continue
        if found.op != "collective-permute" and found.group_size == 1:
            continue
        count, size = totals.get(found.op, (0, 0))
        totals[found.op] = (count + found.count, size + found.count * found.operand_bytes)
    return totals


def _computations(hlo: str) -> tuple[dict[str, list[str]], str]:
    bodies: dict[str, list[str]] = {}
    entry, current = "", ""
    for line in hlo.splitlines():
        if header := _COMPUTATION.match(line):
            current = header.group(2)
            bodies[current] = []
            entry = current if header.group(1) else entry
        elif current:
            bodies[current].append(line)
    return bodies, entry
