"""Reading a compiled program: what it sends, how often, and under which kernels it is hidden.

A program for TPU is scheduled: instructions start in the order in which they stand. A transfer is
hidden by the kernels that are launched between its start and its end. Compilers write one in four
ways, all of which are understood:

    all-gather(...)                                   synchronous: nothing runs beside it
    all-gather-start ... all-gather-done              likewise for other opcodes
    call-start ... call-update ... call-done          around a computation that holds it
    fusion ... fusion ... fusion                      that hold it and say AsyncCollectiveStart,
                                                      nothing and AsyncCollectiveDone
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Literal

from farspan.plan.module import (
    Computation,
    Instruction,
    Module,
    Visit,
    parse,
    runs,
    shape_bytes,
)
from farspan.schedules import Collective

COLLECTIVES = (
    "all-gather", "all-reduce", "all-to-all", "collective-permute", "ragged-all-to-all",
    "reduce-scatter",
)  # fmt: skip
_KERNEL = 'custom_call_target="tpu_custom_call"'
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")
_GROUPS = re.compile(r"replica_groups=(\{\{.*?\}\}|\{\}|mesh\[.*?\] \{.*?\}|\[[^ ]*)")
_OP_NAME = re.compile(r'op_name="[^"]*?([^/"]+)/pallas_call"')
_MATMULS = ("convolution", "dot")

Part = Literal["sync", "start", "middle", "done"]

# A fusion that both ends one transfer and starts another does so in this order.
_MARKS: dict[Part, str] = {"done": '"AsyncCollectiveDone"', "start": '"AsyncCollectiveStart"'}


@dataclasses.dataclass(frozen=True)
class Step:
    """What an instruction of a schedule does for a collective.

    Attributes:
      part: The collective itself (`sync`), or its start, its end, or what lies between.
      instruction: The instruction.
      start: Name of the instruction that started it; empty if that is not in this computation.
      home: The computation that the collective stands in.
      collective: The collective.
    """

    part: Part
    instruction: Instruction
    start: str
    home: Computation
    collective: Instruction


@dataclasses.dataclass(frozen=True)
class Transfer:
    """A collective of a compiled program.

    Attributes:
      kind: A name in `COLLECTIVES`.
      name: Name of the instruction that starts it.
      computation: The computation that it is in.
      loops: Trip counts of the loops around it, outermost first; None where data decides.
      group: Devices that take part.
      operand_bytes: Bytes that one device puts in, each time.
      pairs: Source and target of each message, for a collective-permute.
      groups: The groups of devices as the compiler writes them, for the others.
      asynchronous: Whether other instructions run between its start and its end.
      kernels: Names of the kernels launched between its start and its end.
      matmuls: Matrix products of the compiler's own between them.
    """

    kind: str
    name: str
    computation: str
    loops: tuple[int | None, ...]
    group: int
    operand_bytes: int
    pairs: tuple[tuple[int, int], ...] = ()
    groups: str = ""
    asynchronous: bool = False
    kernels: tuple[str, ...] = ()
    matmuls: int = 0

    @property
    def count(self) -> int:
        """How often it runs; a loop whose length data decides counts once."""
        return runs(self.loops)

    @property
    def hidden(self) -> bool:
        """Whether a kernel is launched between its start and its end."""
        return bool(self.kernels)

    @property
    def sent_bytes(self) -> int:
        """Bytes that leave the device, each time."""
        return Collective(self.kind, 1, self.operand_bytes, self.group).sent_bytes


@dataclasses.dataclass(frozen=True)
class Overlap:
    """The collectives of one kind in a program, over all their runs.

    Attributes:
      kind: A name in `COLLECTIVES`.
      transfers: How often they run; loops whose length data decides count once.
      hidden_transfers: Those under a kernel.
      matmul_transfers: Those under no kernel but under matrix products.
      operand_bytes: Bytes that one device puts in.
      sent_bytes: Bytes that leave it.
      hidden_bytes: Of the sent bytes, those under a kernel.
      matmul_bytes: Of the sent bytes, those under matrix products.
    """

    kind: str
    transfers: int
    hidden_transfers: int
    matmul_transfers: int
    operand_bytes: int
    sent_bytes: int
    hidden_bytes: int
    matmul_bytes: int


@dataclasses.dataclass(frozen=True)
class KernelLaunches:
    """Where a program launches a kernel.

    Attributes:
      name: The kernel.
      places: Instructions that launch it.
      looped_places: Those of them inside loops.
      launches: How often it is launched, each branch of a conditional counted as taken and a loop
        whose length data decides counted once.
    """

    name: str
    places: int
    looped_places: int
    launches: int


def instructions(hlo: str) -> list[Instruction]:
    """Lists the instructions of a compiled program, with how often each runs.

    Args:
      hlo: Text of the optimised module, `compiled.as_text()`.

    Returns:
      Instructions of every computation that the entry reaches.
    """
    module = parse(hlo)
    counts: dict[str, int] = defaultdict(int)
    for visit in module.visits():
        counts[visit.computation.name] += visit.count
    return [
        dataclasses.replace(found, count=times)
        for name, times in counts.items()
        for found in module.computations[name].instructions.values()
    ]


def collectives(hlo: str) -> dict[str, tuple[int, int]]:
    """Counts the collectives of a compiled program.

    Args:
      hlo: Text of the optimised module.

    Returns:
      By kind: how often they run, and the bytes that one device puts in over all runs. Groups of
      one device count as nothing.
    """
    return {row.kind: (row.transfers, row.operand_bytes) for row in overlap(hlo)}


def overlap(hlo: str) -> tuple[Overlap, ...]:
    """Sums up what a program sends and what of it is hidden, by kind."""
    return summary(transfers(hlo))


def summary(found: Iterable[Transfer]) -> tuple[Overlap, ...]:
    """Sums transfers up by kind, times the loops around them."""
    by_kind: dict[str, list[Transfer]] = defaultdict(list)
    for each in found:
        by_kind[each.kind].append(each)
    rows: list[Overlap] = []
    for kind, all_of in sorted(by_kind.items()):
        under = [x for x in all_of if x.hidden]
        beside = [x for x in all_of if x.matmuls and not x.hidden]
        counts = [sum(x.count for x in some) for some in (all_of, under, beside)]
        sent = [sum(x.count * x.sent_bytes for x in some) for some in (all_of, under, beside)]
        put_in = sum(x.count * x.operand_bytes for x in all_of)
        rows.append(
            Overlap(kind, counts[0], counts[1], counts[2], put_in, sent[0], sent[1], sent[2])
        )
    return tuple(rows)


def transfers(hlo: str) -> tuple[Transfer, ...]:
    """Finds the collectives of a compiled program.

    One that starts in one trip of a loop and ends in the next is hidden by what lies behind its
    start and before its end; one that ends elsewhere counts as not hidden. Groups of one device are
    left out.

    Args:
      hlo: Text of the optimised module.

    Returns:
      Them in the order of their computation's schedule; one in a computation that several places
      call stands there once for each.
    """
    module = parse(hlo)
    work = _Work(module)
    found: list[Transfer] = []
    for visit in module.visits():
        if visit.control:
            found += _in_schedule(module, visit, work)
    return tuple(x for x in found if x.group > 1)


def kernel_launches(hlo: str) -> tuple[KernelLaunches, ...]:
    """Counts the launches of each kernel of a program, by name."""
    places: Counter[str] = Counter()
    looped: Counter[str] = Counter()
    launches: Counter[str] = Counter()
    for visit in parse(hlo).visits():
        for found in visit.computation.instructions.values():
            if is_kernel(found):
                name = kernel_name(found)
                places[name] += 1
                looped[name] += bool(visit.loops)
                launches[name] += visit.count
    return tuple(KernelLaunches(x, places[x], looped[x], launches[x]) for x in sorted(places))


def largest_stacked_bytes(hlo: str, size: int) -> int:
    """Bytes of the largest buffer whose leading dimension is `size`; 0 if there is none."""
    sizes = (
        shape_bytes(dtype, dims)
        for visit in parse(hlo).visits()
        if visit.control
        for found in visit.computation.instructions.values()
        for dtype, dims in found.shapes
        if dims[:1] == (size,)
    )
    return max(sizes, default=0)


def is_kernel(found: Instruction) -> bool:
    """Whether an instruction launches a Pallas kernel on a TPU."""
    return found.op == "custom-call" and _KERNEL in found.text


def kernel_name(found: Instruction) -> str:
    """The name that the kernel's author gave it."""
    named = _OP_NAME.search(found.text)
    return named.group(1) if named else re.sub(r"(\.clone)?(\.\d+)*$", "", found.name)


def steps(module: Module, inside: Computation) -> tuple[Step, ...]:
    """Finds what the instructions of a computation do for collectives, in their order."""
    found: list[Step] = []
    carriers: dict[str, str] = {}  # values that a transfer under way is part of, and its start
    for each in inside.instructions.values():
        start = next((carriers[name] for name in each.operands if name in carriers), "")
        for part, home, collective in _parts(module, inside, each, carried=bool(start)):
            begun = each.name if part == "start" else start
            found.append(Step(part, each, begun, home, collective))
            if part in ("start", "middle"):
                carriers[each.name] = begun
        if start and each.op in ("get-tuple-element", "bitcast"):
            carriers[each.name] = start
    return tuple(found)


def _parts(
    module: Module, inside: Computation, found: Instruction, *, carried: bool
) -> list[tuple[Part, Computation, Instruction]]:
    """The parts of collectives that an instruction is; each collective, and where it stands."""
    head, _, tail = found.op.rpartition("-")
    if found.op in COLLECTIVES:
        return [("sync", inside, found)]
    if tail in ("update", "done") and (carried or head in COLLECTIVES):
        return [("done" if tail == "done" else "middle", inside, found)]
    if tail == "start" and head in COLLECTIVES:
        return [("start", inside, found)]
    if tail != "start" and found.op != "fusion":
        return []
    inner = _first_collective(module, found)
    if inner is None:
        return []
    if tail == "start":
        return [("start", *inner)]
    texts = [each.text for each in inner[0].instructions.values()]
    parts: list[Part] = [
        part for part, mark in _MARKS.items() if any(mark in text for text in texts)
    ]
    return [(part, *inner) for part in parts or ["middle" if carried else "sync"]]


def _first_collective(module: Module, found: Instruction) -> tuple[Computation, Instruction] | None:
    for called in module.callees(found):
        for each in called.instructions.values():
            inner = (called, each) if each.op in COLLECTIVES else _first_collective(module, each)
            if inner is not None:
                return inner
    return None


class _Work:
    """What is computed by an instruction and all that it calls."""

    def __init__(self, module: Module) -> None:
        self._module = module
        self._known: dict[str, tuple[frozenset[str], int]] = {}

    def of(self, some: Iterable[Instruction]) -> tuple[frozenset[str], int]:
        """Names of the kernels that instructions launch, and the number of matrix products."""
        kernels: set[str] = set()
        matmuls = 0
        for found in some:
            matmuls += found.op in _MATMULS
            if is_kernel(found):
                kernels.add(kernel_name(found))
            for called in self._module.callees(found):
                if called.name not in self._known:
                    self._known[called.name] = self.of(called.instructions.values())
                inner = self._known[called.name]
                kernels |= inner[0]
                matmuls += inner[1]
        return frozenset(kernels), matmuls


def _in_schedule(module: Module, visit: Visit, work: _Work) -> list[Transfer]:
    """The transfers that start in a computation."""
    inside = visit.computation
    order = list(inside.instructions.values())
    place = {each.name: number for number, each in enumerate(order)}
    found = steps(module, inside)
    begins: dict[str, int] = {}
    ends: dict[str, int] = {}
    for step in found:
        number = place[step.instruction.name]
        begun = inside.instructions.get(step.start)
        if step.part == "done":
            ends[step.start] = number
        elif step.part == "start" or (begun and step.part == "middle" and not begun.operands):
            begins[step.start] = number  # an update brings the operands of a start without any
    result: list[Transfer] = []
    for step in found:
        between: list[Instruction] = []
        if step.part == "start":
            begin, end = begins[step.start] + 1, ends.get(step.start)
            if end is not None:
                between = order[begin:end]
            elif "" in ends:  # the next trip of the loop ends it
                between = order[begin:] + order[: ends[""]]
        if step.part in ("sync", "start"):
            result.append(_transfer(visit, step, *work.of(between)))
    return result


def _transfer(visit: Visit, step: Step, kernels: frozenset[str], matmuls: int) -> Transfer:
    collective = step.collective
    pairs = _PAIRS.search(collective.text)
    messages = re.findall(r"(\d+),(\d+)", pairs.group(1)) if pairs else []
    groups = _GROUPS.search(collective.text)
    reduced = step.home.name.startswith("all-reduce-scatter")
    kind = "reduce-scatter" if reduced else collective.op.removesuffix("-start")
    return Transfer(
        kind,
        step.instruction.name,
        visit.computation.name,
        visit.loops,
        len({device for message in messages for device in message}) or collective.group_size,
        sum(step.home.instructions[name].result_bytes for name in collective.operands),
        tuple((int(source), int(target)) for source, target in messages),
        groups.group(1) if groups else "",
        step.part == "start",
        tuple(sorted(kernels)),
        matmuls,
    )
