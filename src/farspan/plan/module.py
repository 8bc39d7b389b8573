"""The text of a compiled program as computations and instructions, in the order of its schedule.

Trip counts of loops are found by running what their conditions need: compilers for CPU write them
down, the one for TPU does not.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

_DTYPE_BYTES = {
    "pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "s32": 4, "u32": 4, "s64": 8, "u64": 8,
    "bf16": 2, "f16": 2, "f32": 4, "f64": 8, "c64": 8, "c128": 16,
    "f8e4m3": 1, "f8e4m3fn": 1, "f8e5m2": 1,
}  # fmt: skip
_SHAPE = re.compile(r"\b([a-z]+\d*(?:e\d+m\d+\w*)?)\[([\d,]*)\]")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\) -> .* \{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.-]+) = (.*?) ([a-z][a-z0-9-]*)\((.*)$")
_OPERAND = re.compile(r"%([\w.-]+)")
_CALLS = re.compile(
    r"\b(calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.-]+)"
)
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
_MESH_GROUPS = re.compile(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}")
_MESH_AXIS = re.compile(r"'(\w+)'=(\d+)")
_INDEX = re.compile(r"\bindex=(\d+)")
_DIRECTION = re.compile(r"\bdirection=(\w+)")
_TRIP_COUNT = re.compile(r'known_trip_count"?:\s*\{"?n"?:\s*"?(\d+)')
_MOST_TRIPS = 100_000

_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "LT": operator.lt, "LE": operator.le, "GT": operator.gt, "GE": operator.ge,
    "EQ": operator.eq, "NE": operator.ne,
}  # fmt: skip
_ARITHMETIC: dict[str, Callable[..., Any]] = {
    "add": operator.add, "subtract": operator.sub, "multiply": operator.mul, "minimum": min,
    "maximum": max, "and": operator.and_, "or": operator.or_,
}  # fmt: skip
_SAME = ("copy", "bitcast", "reshape", "convert")

Value = Any
"""An integer, a function from index to value for a tuple, or None where it is not known."""

Values = Callable[[int], Value]


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction of a compiled program.

    Attributes:
      name: Its name, unique in its computation.
      op: Its opcode.
      shapes: Dtype and dimensions of each array it yields.
      operands: Names of the instructions that it reads.
      arguments: The text between the parentheses.
      text: What follows the opcode: operands and attributes.
      count: How often one run of the program executes it (loops with a known count multiplied
        out, others counted once; each branch of a conditional counted as taken).
    """

    name: str
    op: str
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    operands: tuple[str, ...]
    arguments: str
    text: str
    count: int = 1

    @property
    def result_bytes(self) -> int:
        """Bytes of the arrays it yields."""
        return sum(shape_bytes(*shape) for shape in self.shapes)

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

    @functools.cached_property
    def called(self) -> dict[str, tuple[str, ...]]:
        """Names of the computations that it calls, by role (`body`, `calls`, `branches` ...)."""
        found: dict[str, tuple[str, ...]] = {
            role: (name,) for role, name in _CALLS.findall(self.text)
        }
        if branches := _BRANCHES.search(self.text):
            found["branches"] = tuple(x.strip().lstrip("%") for x in branches.group(1).split(","))
        elif "true_computation" in found:
            found["branches"] = found.pop("true_computation") + found.pop("false_computation")
        return found

    @property
    def index(self) -> int:
        """Number of a parameter or of a tuple's element."""
        if self.op == "parameter":
            return int(self.arguments)
        found = _INDEX.search(self.text)
        assert found, f"{self.op} has no index"
        return int(found.group(1))


@dataclasses.dataclass(frozen=True)
class Computation:
    """Instructions in the order in which they are executed; the last one is its result."""

    name: str
    instructions: dict[str, Instruction]
    root: Instruction


@dataclasses.dataclass(frozen=True)
class Visit:
    """A computation, as one place in the program calls it.

    Attributes:
      computation: The computation.
      loops: Trip counts of the loops around it, outermost first; None where it is not known.
      arguments: What is known of its parameters.
      control: Whether its instructions are steps of the schedule; else they are parts of one step
        (of a fusion, a reduction or a wrapped collective).
    """

    computation: Computation
    loops: tuple[int | None, ...]
    arguments: Values
    control: bool

    @property
    def count(self) -> int:
        """How often it is executed."""
        return runs(self.loops)


@dataclasses.dataclass(frozen=True)
class Module:
    """A compiled program."""

    computations: dict[str, Computation]
    entry: Computation

    def callees(self, found: Instruction) -> tuple[Computation, ...]:
        """Computations that an instruction calls."""
        names = (name for group in found.called.values() for name in group)
        return tuple(self.computations[name] for name in names if name in self.computations)

    def visits(self) -> Iterator[Visit]:
        """Every computation that the entry reaches, once for each place that calls it."""
        yield from self._visits(Visit(self.entry, (), _unknown, control=True))

    def _visits(self, visit: Visit) -> Iterator[Visit]:
        yield visit
        for found in visit.computation.instructions.values():
            if found.called:
                for inner in self.called_by(visit, found):
                    yield from self._visits(inner)

    def called_by(self, visit: Visit, found: Instruction) -> tuple[Visit, ...]:
        """The computations that an instruction of a visited computation calls."""
        if found.op == "while":
            loops = (*visit.loops, self.trip_count(visit, found))
            state = _always(self._invariants(visit, found))
            callees = self.callees(found)
            return tuple(Visit(inner, loops, state, visit.control) for inner in callees)
        if found.op == "conditional":
            return tuple(
                Visit(inner, visit.loops, _always(self._lookup(visit, name)), visit.control)
                for inner, name in zip(self.callees(found), found.operands[1:], strict=True)
            )
        control = visit.control and found.op == "call"
        values = functools.cache(lambda place: self._lookup(visit, found.operands[place]))
        return tuple(Visit(inner, visit.loops, values, control) for inner in self.callees(found))

    def trip_count(self, visit: Visit, loop: Instruction) -> int | None:
        """How often a loop runs, or None if data decides it."""
        if written := _TRIP_COUNT.search(loop.text):
            return int(written.group(1))
        (body,), (condition,) = loop.called["body"], loop.called["condition"]
        end, step = self.computations[condition], self.computations[body]
        state = self._lookup(visit, loop.operands[0])
        for trips in range(_MOST_TRIPS):
            more = self.evaluate(end, end.root.name, _always(state))
            if more is None or not more:
                return None if more is None else trips
            state = self.evaluate(step, step.root.name, _always(state))
        return None

    def evaluate(self, inside: Computation, name: str, arguments: Values) -> Value:
        """The value of an instruction, as far as single integers decide it."""
        found = inside.instructions[name]

        @functools.cache
        def operand(place: int) -> Value:
            return self.evaluate(inside, found.operands[place], arguments)

        if found.op == "parameter":
            return arguments(found.index)
        if found.op == "tuple":
            return operand
        if found.op == "get-tuple-element":
            return _element(operand(0), found.index)
        if any(math.prod(dims) != 1 for _, dims in found.shapes):
            return None
        if found.op == "constant":
            return _constant(found.arguments)
        if found.op in _SAME:
            return operand(0)
        if found.op in ("fusion", "call"):
            (inner,) = self.callees(found)
            return self.evaluate(inner, inner.root.name, operand)
        if found.op not in ("compare", *_ARITHMETIC):
            return None
        left, right = operand(0), operand(1)
        if left is None or right is None:
            return None
        if found.op == "compare":
            direction = _DIRECTION.search(found.text)
            return _COMPARISONS[direction.group(1)](left, right) if direction else None
        return _ARITHMETIC[found.op](left, right)

    def _lookup(self, visit: Visit, name: str) -> Value:
        return self.evaluate(visit.computation, name, visit.arguments)

    def _invariants(self, visit: Visit, loop: Instruction) -> Value:
        """What is known of a loop's state in every trip: what the body hands on as it is."""
        (body,) = loop.called["body"]
        inside = self.computations[body]

        @functools.cache
        def known(index: int) -> Value:
            if inside.root.op != "tuple":
                return None
            kept = inside.instructions[inside.root.operands[index]]
            if kept.op != "get-tuple-element" or kept.index != index:
                return None
            if inside.instructions[kept.operands[0]].op != "parameter":
                return None
            return _element(self._lookup(visit, loop.operands[0]), index)

        return known


@functools.lru_cache(maxsize=1)
def parse(hlo: str) -> Module:
    """Reads a program.

    Args:
      hlo: Text of the optimised module, `compiled.as_text()`.

    Returns:
      The program. Where the text is scheduled, as it is for TPU, the order of the instructions is
      the order in which they start.
    """
    computations: dict[str, Computation] = {}
    entry: Computation | None = None
    header: re.Match[str] | None = None
    lines: dict[str, Instruction] = {}
    root: Instruction | None = None
    for line in hlo.splitlines():
        if opened := _COMPUTATION.match(line):
            header, lines, root = opened, {}, None
        elif header and line.startswith("}"):
            assert root, f"{header.group(2)} has no root"
            computation = Computation(header.group(2), lines, root)
            computations[computation.name] = computation
            entry = computation if header.group(1) else entry
            header = None
        elif header and (found := _INSTRUCTION.match(line)):
            instruction = _instruction(found)
            lines[instruction.name] = instruction
            root = instruction if found.group(1) else root
    assert entry, "the text holds no entry computation"
    return Module(computations, entry)


def runs(loops: Iterable[int | None]) -> int:
    """How often the inside of loops runs; one whose length is not known counts once."""
    return math.prod(1 if trips is None else trips for trips in loops)


def shape_bytes(dtype: str, dims: tuple[int, ...]) -> int:
    """Bytes of an array, without the padding of its layout."""
    return _DTYPE_BYTES[dtype] * math.prod(dims)


def _instruction(found: re.Match[str]) -> Instruction:
    _, name, result, op, text = found.groups()
    shapes = tuple(
        (dtype, tuple(int(d) for d in dims.split(",") if d))
        for dtype, dims in _SHAPE.findall(result)
        if dtype in _DTYPE_BYTES
    )
    arguments = _until_closed(text)
    return Instruction(name, op, shapes, tuple(_OPERAND.findall(arguments)), arguments, text)


def _until_closed(text: str) -> str:
    depth = 1
    for place, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return text[:place]
    return text


def _constant(text: str) -> int | None:
    if text in ("true", "false"):
        return int(text == "true")
    return int(text) if re.fullmatch(r"-?\d+", text) else None


def _element(value: Value, index: int) -> Value:
    return value(index) if callable(value) else None


def _always(value: Value) -> Values:
    """The parameters of a computation that has one."""
    return lambda _: value


def _unknown(_: int) -> Value:
    return None
